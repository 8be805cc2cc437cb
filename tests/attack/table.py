"""The result table: rows of Markdown between two markers of docs/sandbox/attacks.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from .catalog import FAMILIES
from .world import ROOT

DOCS = ROOT / "docs" / "sandbox" / "attacks.md"
BEGIN, END = "<!-- attacks: written by `make suite NAME=attack` -->", "<!-- end of attacks -->"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one attack in one run."""

    name: str
    verdict: str
    faults: list[str]
    missing: str = ""
    """The mechanism that this host lacks for it; the attack then did not run."""


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """Times of the neighbor's calls, in milliseconds."""

    quiet_calls: int
    quiet_p50_ms: float
    quiet_p99_ms: float
    attacked_calls: int
    attacked_p50_ms: float
    attacked_p99_ms: float
    worst: str
    """The attack with the highest median, and that median."""
    worst_p50_ms: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the suite as one kind of user."""

    user: str
    rows: list[Row]
    pace: Pace
    controls: dict[str, str]
    """By attack with a control: why the control did not show that it succeeds in a plain process; empty if it did."""

    @property
    def num_contained(self) -> int:
        return sum(not row.faults and not row.missing for row in self.rows)


def to_markdown(reports: Sequence[Report]) -> str:
    """Return the summary, the table of call times and the table of attacks."""
    return "\n".join([_summary(reports), "", _pace(reports), "", _attacks(reports)])


def _summary(reports: Sequence[Report]) -> str:
    lines = [f"As {report.user}: {len(report.rows)} attacks, {report.num_contained} contained." for report in reports]
    shown = [why for report in reports for why in report.controls.values()]
    if shown:
        lines.append(f"{shown.count('')} of {len(shown)} controls did in a plain process what the jail refused.")
    return " ".join(lines)


def _without(report: Report) -> str:
    missing = sorted({row.missing for row in report.rows if row.missing})
    return f", the rest not held without a writable {' and '.join(missing)}" if missing else ""


def _pace(reports: Sequence[Report]) -> str:
    lines = [
        "| neighbor's calls | quiet p50, p99 (ms) | under attack p50, p99 (ms) | p50 ratio | highest p50 of one attack (ms) |",
        "| --- | --- | --- | --- | --- |",
    ]
    for report in reports:
        pace = report.pace
        lines.append(
            f"| {report.user} | {pace.quiet_p50_ms:.2f}, {pace.quiet_p99_ms:.2f} ({pace.quiet_calls} calls) "
            f"| {pace.attacked_p50_ms:.2f}, {pace.attacked_p99_ms:.2f} ({pace.attacked_calls} calls) "
            f"| {pace.attacked_p50_ms / pace.quiet_p50_ms:.2f} | {pace.worst_p50_ms:.2f}: {pace.worst} |"
        )
    return "\n".join(lines)


def _attacks(reports: Sequence[Report]) -> str:
    by_user = [{row.name: row for row in report.rows} for report in reports]
    controls = {name: why for report in reports for name, why in report.controls.items()}
    users = " | ".join(f"as {report.user}" for report in reports)
    lines = [
        f"| family | attack | expected | {users} | without isolation |",
        f"| --- | --- | --- |{' --- |' * len(reports)} --- |",
    ]
    for family in FAMILIES:
        for attack in family.attacks:
            cells = " | ".join(_cell(rows.get(attack.name)) for rows in by_user)
            lines.append(
                f"| {family.name} | {attack.name} | {attack.verdict.value} | {cells} | {_control(controls, attack.name)} |"
            )
    return "\n".join(lines)


def _cell(row: Row | None) -> str:
    if row is None:
        return "not run"
    if row.missing:
        return f"not held: no {row.missing}"
    return f"{row.verdict}" if not row.faults else f"**NOT CONTAINED**: {'; '.join(row.faults)}"


def _control(controls: Mapping[str, str], name: str) -> str:
    if name not in controls:
        return ""
    return "succeeds" if not controls[name] else "not shown"


def replace_between_markers(text: str, table: str) -> str:
    """Return the document with its table replaced. Raises ValueError if the markers are missing."""
    if BEGIN not in text or END not in text:
        raise ValueError(f"{DOCS} lacks the markers {BEGIN} and {END}")
    head, rest = text.split(BEGIN, 1)
    return f"{head}{BEGIN}\n{table}\n{END}{rest.split(END, 1)[1]}"


def write(reports: Sequence[Report], path: Path) -> None:
    """Write the table into the document at `path`."""
    path.write_text(replace_between_markers(path.read_text(), to_markdown(reports)))


def names_in(text: str) -> list[str]:
    """Return the names of the attacks in a document's table, in order."""
    table = text.split(BEGIN, 1)[1].split(END, 1)[0]
    families = {family.name for family in FAMILIES}
    cells = [[cell.strip() for cell in line.split("|")] for line in table.splitlines()]
    return [row[2] for row in cells if len(row) > 3 and row[1] in families]
