"""The report of `python -m benchmarks methods` in Markdown: verdicts, all arms of the table, and failures."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from statistics import fmean
from typing import Any, get_args

import msgspec

from benchmarks.methods.expectations import Measure, expected_of
from benchmarks.methods.records import EVAL_SAMPLES, LAST, ArmRecord, MethodArm
from benchmarks.methods.tasks import TASKS
from benchmarks.methods.verdict import FALSE_SHARE, LOOKS, MethodComparison

HEAD = (
    "method",
    "baseline",
    "task",
    "lag",
    "lr",
    "measure",
    "value",
    "baseline's",
    "difference",
    "seeds",
    "expected",
)
VERDICT_HEAD = (*HEAD, "p", "verdict")
MEANS = ("task", "lag", "lr", "method", "seeds", *get_args(Measure), "CPU s")


def markdown(
    rows: Sequence[MethodComparison],
    records: Mapping[MethodArm, ArmRecord],
    missing: int,
    pictures: Mapping[str, str],
) -> str:
    """Return the report. `missing` counts arms without a record; `pictures` has the file of the curves by task."""
    commits = sorted({record.commit for record in records.values()})
    cpu_s = sum(record.cpu_s for record in records.values())
    lines = [
        "# Methods, compared",
        "",
        (
            f"{len(records)} arms, {cpu_s / 3600:.2f} CPU hours, commit {', '.join(commits) or 'none'}; {missing} arms "
            "have no record."
        ),
        "",
        (
            f"A measure is the mean of the last {LAST} evaluations (`ess`: of the updates since the first of these), "
            "which sample at"
        ),
        f"temperature 1, {EVAL_SAMPLES} times per held-out task. Errors are standard errors over the pairs of seeds.",
        "",
        "## Verdicts",
        "",
        *_verdicts([row for row in rows if row.stage == "confirm"]),
        "",
        "## Screening",
        "",
        "These rows have no verdict: methods are chosen by them, and the verdicts are from other seeds.",
        "",
        *_table(HEAD, [_comparison_cells(row) for row in rows if row.stage == "screen"]),
        "",
        *_baselines({arm.like for arm in records if arm.like}),
        "## Means of the arms",
        "",
        *_table(MEANS, _means(records)),
        "",
    ]
    for name, task in TASKS.items():
        if any(arm.task == name for arm in records):
            lines += [f"## Task {name}", "", task.summary, ""]
            lines += [f"![Curves of {name}]({pictures[name]})", ""] if name in pictures else []
    failed = [record for record in records.values() if record.error]
    lines += ["## Failed arms", ""] if failed else []
    lines += [f"- {record.arm}: {record.error.splitlines()[0]}" for record in failed]
    return "\n".join(lines).rstrip() + "\n"


def _verdicts(rows: Sequence[MethodComparison]) -> list[str]:
    if not rows:
        return ["None: no method was confirmed (`--confirm`)."]
    looks = ", ".join(map(str, LOOKS))
    return [
        f"{len(rows)} comparisons, paired by seed, with seeds that did not screen. Each is looked at after {looks}",
        "seeds until it has a verdict. Benjamini and Hochberg's method limits the expected share of verdicts by chance",
        f"to {FALSE_SHARE:g} over all looks (`benchmarks/methods/verdict.py`). p is that of the paired t-test.",
        "",
        *_table(
            VERDICT_HEAD,
            [[*_comparison_cells(row), "" if row.p is None else f"{row.p:.2g}", row.verdict] for row in rows],
        ),
    ]


def _baselines(methods: Collection[str]) -> list[str]:
    """Return the settings that baselines have from the method with which they are compared."""
    if not methods:
        return []
    lines = ["## Baselines with settings of the method", ""]
    for method in sorted(methods):
        wanted = expected_of(method)
        settings = "; ".join(_flat(wanted.baseline_settings))
        lines.append(f"- `{wanted.baseline}` as `{method}`: {settings}")
    return [*lines, ""]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and "name" not in value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"`{prefix}{key}: {msgspec.json.encode(value).decode()}`"


def _comparison_cells(row: MethodComparison) -> list[str]:
    error = "" if row.error is None else f" ± {row.error:.3f}"
    case = row.case
    baseline, method = case.arms(0)
    return [
        method.label, baseline.label, case.task, str(case.lag), f"{case.lr:g}", case.measure,
        f"{row.value:.3f}", f"{row.baseline_value:.3f}",
        f"{row.difference:+.3f}{error}", str(row.seeds), case.expected,
    ]  # fmt: skip


def _means(records: Mapping[MethodArm, ArmRecord]) -> list[list[str]]:
    def case(arm: MethodArm) -> tuple[str, int, float, str]:
        return arm.task, arm.lag, -arm.lr, arm.label

    rows = []
    for (task, lag, lr, method), arms in groupby(sorted(records, key=case), case):
        good = [records[arm] for arm in arms if not records[arm].error]
        if good:
            measures = [record.measures() for record in good]
            means = [f"{fmean(one[name] for one in measures):.3f}" for name in measures[0]]
            rows.append(
                [task, str(lag), f"{-lr:g}", method, str(len(good)), *means, f"{fmean(r.cpu_s for r in good):.0f}"]
            )
    return rows


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]]
