"""The result of a bench: a table of numbers with their spread, and the machine, as text and as JSON."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Spread:
    """A median of repetitions with its smallest and largest value."""

    median: float
    low: float
    high: float
    digits: int = 0

    def __str__(self) -> str:
        d = self.digits
        return f"{self.median:,.{d}f} ({self.low:,.{d}f}-{self.high:,.{d}f})"


def spread(values: Sequence[float], digits: int = 0) -> Spread:
    return Spread(statistics.median(values), min(values), max(values), digits)


@dataclass(frozen=True, slots=True)
class BenchTarget:
    """A bound on a measured value. A bench that misses one fails."""

    what: str
    value: float
    bound: float
    at_most: bool = True

    @property
    def met(self) -> bool:
        return self.value <= self.bound if self.at_most else self.value >= self.bound

    def text(self, *, judged: bool) -> str:
        side = "most" if self.at_most else "least"
        verdict = ("met" if self.met else "missed") if judged else "not judged, because the run was short"
        return f"{self.what}: {self.value:.2f} (target: at {side} {self.bound:g}): {verdict}"


@dataclass(slots=True)
class Report:
    """Rows of one bench; all rows have the keys of the first."""

    bench: str
    setting: str
    """The fixed parameters, in a line."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    targets: list[BenchTarget] = field(default_factory=list)

    def text(self, *, judged: bool = True) -> str:
        """Return the table with notes and targets. Without `judged`, a target has no verdict."""
        if not self.rows:
            return "\n".join([f"{self.bench}: no rows", *(f"- {note}" for note in self.notes)])
        lines = [f"{self.bench}: {self.setting}", ""]
        lines += _markdown(list(self.rows[0]), [[_cell(value) for value in row.values()] for row in self.rows])
        return "\n".join(
            [*lines, "", *(f"- {note}" for note in [*self.notes, *(t.text(judged=judged) for t in self.targets)])]
        )

    def as_json(self, *, judged: bool = True) -> dict[str, Any]:
        rows = [{name: _plain(value) for name, value in row.items()} for row in self.rows]
        targets = [
            {"what": t.what, "value": t.value, "bound": t.bound, "at_most": t.at_most, "met": t.met if judged else None}
            for t in self.targets
        ]
        return {
            "bench": self.bench,
            "setting": self.setting,
            "rows": rows,
            "notes": self.notes,
            "targets": targets,
        }


def machine() -> dict[str, Any]:
    """The machine of the numbers. `load_1m` far above `cores` means that other processes used the cores."""
    cores = len(os.sched_getaffinity(0))
    return {
        "cores": cores,
        "load_1m": round(os.getloadavg()[0], 1),
        "cpu": _cpu_name(),
        "python": platform.python_version(),
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.machine()


def _cell(value: Any) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else str(value)


def _plain(value: Any) -> Any:
    return {"median": value.median, "low": value.low, "high": value.high} if isinstance(value, Spread) else value


def _markdown(head: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    rule = ["-" * width for width in widths]
    return [
        "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in [head, rule, *rows]
    ]
