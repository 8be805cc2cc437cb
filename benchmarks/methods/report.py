"""The report of `python -m benchmarks methods` in Markdown: verdicts, all arms of the table, and failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from statistics import fmean

from benchmarks.methods.records import EVAL_SAMPLES, LAST, ArmRecord, MethodArm
from benchmarks.methods.tasks import TASKS
from benchmarks.methods.verdict import ERRORS, MethodComparison

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
    "verdict",
)
MEANS = ("task", "lag", "lr", "method", "seeds", "success", "pass_at_k", "length", "entropy", "kl", "ess", "CPU s")


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
        (
            f"temperature 1, {EVAL_SAMPLES} times per held-out task. A difference is shown beyond {ERRORS:g} standard "
            "errors of the pairs"
        ),
        "of seeds. With 3 seeds, 18 % of the comparisons without a true difference exceed that.",
        "",
        *_table(HEAD, [_comparison_cells(row) for row in rows]),
        "",
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
    lines += [f"- {_name(record.arm)}: {record.error.splitlines()[0]}" for record in failed]
    return "\n".join(lines).rstrip() + "\n"


def _comparison_cells(row: MethodComparison) -> list[str]:
    error = "" if row.error is None else f" ± {row.error:.3f}"
    return [
        row.method, row.baseline, row.task, str(row.lag), f"{row.lr:g}", row.measure,
        f"{row.value:.3f}", f"{row.baseline_value:.3f}",
        f"{row.difference:+.3f}{error}", str(row.seeds), row.expected, row.verdict,
    ]  # fmt: skip


def _means(records: Mapping[MethodArm, ArmRecord]) -> list[list[str]]:
    def case(arm: MethodArm) -> tuple[str, int, float, str]:
        return arm.task, arm.lag, -arm.lr, arm.method

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


def _name(arm: MethodArm) -> str:
    return f"{arm.method} on {arm.task} at lag {arm.lag}, seed {arm.seed}, lr {arm.lr:g}"
