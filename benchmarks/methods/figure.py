"""The curves of `python -m benchmarks methods`: one figure per task, with a column per lag and learning rate, and a row
per measure.

A line is the mean over the seeds of a method. The band is from the smallest to the largest seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from benchmarks.methods.records import ArmRecord, MethodArm
from rollmesh.app.views.figure import STYLE

ROWS = ("success", "entropy", "length", "ess")
"""Measures that are drawn. `ess` is by update, the others by evaluation."""
Curve = list[tuple[int, float]]


def draw_task(task: str, records: Mapping[MethodArm, ArmRecord], methods: Sequence[str]) -> Figure:
    """Return the figure of a task, which has at least one record that did not fail."""
    found = [record for arm, record in records.items() if arm.task == task and not record.error]
    cases = sorted({(record.arm.lag, -record.arm.lr) for record in found})
    colors = dict(zip(methods, colormaps["tab20"].colors * (1 + len(methods) // 20), strict=False))  # type: ignore[attr-defined]
    with rc_context(cast(Any, STYLE)):
        size = (1.5 + 4.2 * len(cases), 2.6 * len(ROWS))
        figure = Figure(figsize=size, layout=ConstrainedLayoutEngine())
        axes = figure.subplots(len(ROWS), len(cases), squeeze=False, sharex=True, sharey="row")
        for row, measure in enumerate(ROWS):
            for column, (lag, lr) in enumerate(cases):
                ax = axes[row, column]
                for method in methods:
                    arms = [one for one in found if (one.arm.label, one.arm.lag, -one.arm.lr) == (method, lag, lr)]
                    if arms:
                        _line(ax, method, [curve(record, measure) for record in arms], colors[method])
                ax.set_title(f"{measure}, lag {lag}, lr {-lr:g}")
        axes[-1, 0].set_xlabel("update")
        shown = {label: line for ax in axes[0] for line, label in zip(*ax.get_legend_handles_labels(), strict=True)}
        figure.legend(list(shown.values()), list(shown), loc="outside right upper")
    return figure


def curve(record: ArmRecord, measure: str) -> Curve:
    """Return (update, value) of a measure."""
    if measure == "ess":
        return [(point.update, point.metrics["ess"]) for point in record.updates if "ess" in point.metrics]
    return [(point.update, getattr(point, measure)) for point in record.evals]


def _line(ax: Axes, method: str, curves: Sequence[Curve], color: Any) -> None:
    by_update: dict[int, list[float]] = {}
    for update, value in (point for one in curves for point in one):
        by_update.setdefault(update, []).append(value)
    xs = sorted(by_update)
    ax.plot(xs, [fmean(by_update[x]) for x in xs], color=color, linewidth=1.8, label=Path(method).stem)
    ax.fill_between(xs, [min(by_update[x]) for x in xs], [max(by_update[x]) for x in xs], color=color, alpha=0.15)
