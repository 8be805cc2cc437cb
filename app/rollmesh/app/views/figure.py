"""The plots of the report of a run, drawn by matplotlib without a display.

They show reward and held-out success by updates and by seconds, success by label before and after, the staleness of
trained samples, the time of the learner by phase, the samples by end, and the metrics of the learner that every view
shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO, StringIO
from typing import Any, cast

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator

from rollmesh.app.views.series import Eval, Point, Series, heldout_name, staleness_shares
from rollmesh.app.views.summary import Summary
from rollmesh.services.learner.metrics_log import SHOWN, MetricsLine

INK, MUTED, GRID = "#1f2933", "#7b8794", "#e4e7eb"
SUCCESS, REWARD, BEFORE, GOOD, BAD = "#0b6e99", "#c9a227", "#b8c4ce", "#3a7d44", "#b23a48"
PHASE_COLORS = {
    "train": "#0b6e99", "wait": "#c9a227", "publish": "#6c8ea4", "checkpoint": "#8f7aa6", "fetch": "#74a892",
    "decode": "#c2d3a7", "commit": "#a3b18a", "attach": "#b8c4ce", "other": "#dde3e8",
}  # fmt: skip
SAMPLE_COLORS = {
    "trained": GOOD, "filtered": "#b8c4ce", "cancelled": "#d5dce2", "stale": "#c9a227", "failed": BAD,
    "live": "#6c8ea4", "exported": "#8f7aa6",
}  # fmt: skip
STYLE: dict[str, Any] = {
    "font.family": "sans-serif", "font.size": 10, "text.color": INK, "axes.labelcolor": MUTED, "axes.edgecolor": GRID,
    "axes.titlesize": 11.5, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.titlepad": 12,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.8,
    "axes.axisbelow": True, "xtick.color": MUTED, "ytick.color": MUTED, "xtick.major.size": 0, "ytick.major.size": 0,
    "legend.frameon": False, "svg.fonttype": "none", "figure.facecolor": "white",
}  # fmt: skip

_ROWS_MIN = 5
"""The height is that of at least this many rows, so that a few rows do not become blocks."""


def draw(series: Series, summary: Summary, metrics: Mapping[int, MetricsLine]) -> Figure:
    """Return the figure; `metrics` are the learner's by update."""
    with rc_context(cast(Any, STYLE)):
        figure = Figure(figsize=(15, 16), layout=ConstrainedLayoutEngine(w_pad=0.18, h_pad=0.22))
        axes = figure.subplots(4, 3)
        evals, updates = series.evals_by_step, series.updates
        _course(axes[0, 0], evals, updates, by="updates")
        _course(axes[0, 1], evals, updates, by="seconds")
        _labels(axes[0, 2], evals)
        _staleness(axes[1, 0], series.last, summary.eta)
        _time(axes[1, 1], summary)
        _samples(axes[1, 2], summary)
        for ax, (label, name) in zip(axes[2:].flat, SHOWN, strict=True):
            _metric(ax, label, {update: line.metrics.get(name) for update, line in sorted(metrics.items())})
    return figure


def to_png(figure: Figure) -> bytes:
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    figure.set_layout_engine("none")  # the positions stay for the other format
    return buffer.getvalue()


def to_svg(figure: Figure) -> str:
    """Return an <svg> element, without the XML head that HTML does not accept."""
    buffer = StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _course(ax: Axes, evals: list[Eval], updates: list[Point], *, by: str) -> None:
    """Held-out success and training reward against updates or seconds."""
    by_updates = by == "updates"
    names = sorted({name for point in updates for name in point.mean_rewards})
    for number, name in enumerate(names):
        xs = [p.update if by_updates else p.time_s for p in updates if name in p.mean_rewards]
        ys = [p.mean_rewards[name] for p in updates if name in p.mean_rewards]
        ax.plot(xs, ys, color=REWARD, alpha=0.9 / (1 + number), linewidth=1.4, label=f"reward: {name}")
    if evals:
        xs = [e.step if by_updates else e.time_s for e in evals]
        ys = [e.success for e in evals]
        ax.plot(
            xs,
            ys,
            color=SUCCESS,
            linewidth=2.2,
            marker="o",
            markersize=5,
            label=heldout_name(any(e.graded for e in evals)),
        )
        ax.annotate(f"{ys[-1]:.3f}", (xs[-1], ys[-1]), (6, 6), textcoords="offset points", color=SUCCESS, weight="bold")
    bounded = all(0 <= v <= 1 for p in updates for v in p.mean_rewards.values())
    if bounded:
        ax.set_ylim(0, 1.06)
    ax.margins(x=0.04)
    ax.set_xlabel("update" if by_updates else "seconds since the services started")
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    ax.set_title(f"Evaluations and training reward by {by}")
    if ax.lines:
        ax.legend(loc="upper left", bbox_to_anchor=(0, -0.16), ncols=2)  # below the plot, because it would cover curves


def _labels(ax: Axes, evals: list[Eval]) -> None:
    """Success per label, before and after."""
    ax.set_title(f"{heldout_name(any(e.graded for e in evals)).capitalize()} by label")
    if not evals:
        return _nothing(ax, "no evaluation")
    first, last = evals[0], evals[-1]
    labels = list(last.success_by_label)
    if not labels:
        return _nothing(ax, "the tasks have no labels")
    for row, label in enumerate(labels):
        before, after = first.success_by_label.get(label, 0.0), last.success_by_label[label]
        ax.plot([before, after], [row, row], color=GRID, linewidth=5, solid_capstyle="round", zorder=1)
        ax.scatter([before], [row], color=BEFORE, s=60, zorder=2)
        ax.scatter([after], [row], color=SUCCESS, s=60, zorder=3)
        ax.annotate(
            f"{after:.2f}", (max(before, after), row), (10, 0), textcoords="offset points", va="center", color=INK
        )
    ax.set_yticks(range(len(labels)), [label.replace("=", " ") for label in labels])
    ax.set_ylim(max(len(labels), _ROWS_MIN) - 0.5, -0.6)
    ax.set_xlim(-0.04, 1.12)
    ax.set_xlabel(f"at update {first.step} (gray) and {last.step} (blue)")
    return None


def _staleness(ax: Axes, last: Point, bound: int) -> None:
    """Share of trained samples by staleness, against the bound."""
    ax.set_title("Staleness of trained samples")
    shares = staleness_shares(last, bound)
    colors = [SUCCESS if lag <= bound else BAD for lag, _ in shares]
    bars = ax.bar([lag for lag, _ in shares], [share for _, share in shares], color=colors, width=0.62)
    ax.bar_label(bars, labels=[f"{share:.0%}" for _, share in shares], padding=3, color=INK)
    ax.axvline(bound + 0.5, color=MUTED, linestyle="--", linewidth=1.2)
    ax.annotate(f"bound {bound}", (bound + 0.5, 1), (5, -12), xycoords=("data", "axes fraction"),
                textcoords="offset points", color=MUTED)  # fmt: skip
    ax.set_xlim(-0.6, max(bound, shares[-1][0]) + 1.2)
    ax.set_xticks([lag for lag, _ in shares])
    ax.set_xlabel("updates between the oldest trained token and its update")
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.0%}"))
    ax.margins(y=0.14)
    ax.grid(axis="x", visible=False)


def _time(ax: Axes, summary: Summary) -> None:
    """Seconds of the learner by phase."""
    seconds = {**summary.learner_seconds}
    seconds["other"] = max(0.0, summary.train_s - sum(seconds.values()))
    ax.set_title(f"Where the learner's {summary.train_s:.0f} s went")
    rows = sorted(((s, phase) for phase, s in seconds.items() if s >= 0.005), reverse=True)
    _bars(ax, [(phase, s, f"{s:.1f} s", PHASE_COLORS.get(phase, MUTED)) for s, phase in rows])
    ax.set_xlabel("seconds")


def _samples(ax: Axes, summary: Summary) -> None:
    """Samples by end."""
    samples = summary.samples
    ax.set_title(f"Ends of {samples.get('reserved', 0):,} samples")
    ends = sorted(((n, end) for end, n in samples.items() if end != "reserved" and n), reverse=True)
    _bars(ax, [(end, float(n), f"{n:,}", SAMPLE_COLORS.get(end, MUTED)) for n, end in ends])
    ax.set_xlabel("training samples")


def _metric(ax: Axes, label: str, values: Mapping[int, float | None]) -> None:
    """One metric of the learner by update."""
    ax.set_title(f"Learner: {label}")
    measured = {update: value for update, value in values.items() if value is not None}
    if not measured:
        return _nothing(ax, "not measured")
    ax.plot(list(measured), list(measured.values()), color=INK, linewidth=1.4)
    ax.margins(x=0.04)
    ax.set_xlabel("update")
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    return None


def _bars(ax: Axes, rows: list[tuple[str, float, str, str]]) -> None:
    """Horizontal bars, the first row on top."""
    if not rows:
        return _nothing(ax, "nothing yet")
    bars = ax.barh(range(len(rows)), [row[1] for row in rows], color=[row[3] for row in rows], height=0.62)
    ax.bar_label(bars, labels=[row[2] for row in rows], padding=5, color=INK)
    ax.set_yticks(range(len(rows)), [row[0] for row in rows])
    ax.set_ylim(max(len(rows), _ROWS_MIN) - 0.4, -0.6)
    ax.margins(x=0.16)
    ax.xaxis.set_major_locator(MaxNLocator(5))
    ax.grid(axis="y", visible=False)
    return None


def _nothing(ax: Axes, text: str) -> None:
    ax.set_xticks([])
    ax.set_yticks([])
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", color=MUTED)
