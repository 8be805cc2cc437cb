"""The course of a run as `series.jsonl` keeps it: what was seen on WatchRun, with the time at which it was seen.

One JSON object per line, told apart by `kind`: a `point` is the state at a moment, an `eval` the result of an
evaluation. Times are seconds of running time: they go on where an interrupted run stopped.
Collaborators: `watch` writes, display and report read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rollmesh.shared.errors import ConfigError
from rollmesh.shared.ledger_head import EMPTY, LedgerHead

RATE_WINDOW_S = 30.0
"""Tokens per second are averaged over this time; shorter than an update, the rate of training would jump."""


class Point(msgspec.Struct, frozen=True, kw_only=True, tag="point", tag_field="kind"):
    """The state of a run at a moment; counts are totals since its beginning."""

    time_s: float
    update: int = 0
    """Last committed update."""
    published_step: int = -1
    incarnation: int = 0
    checkpoint_update: int = 0
    mean_rewards: dict[str, float] = {}
    """Over the last update's groups."""
    samples: dict[str, int] = {}
    """Training samples: reserved, live, and by end."""
    reasons: dict[str, int] = {}
    """Ends by reason, e.g. {"stale/BEYOND_BOUND": 12}."""
    groups: dict[str, int] = {}
    tokens_generated: int = 0
    tokens_trained: int = 0
    trained_by_staleness: dict[int, int] = {}
    """Trained samples by staleness at their update."""
    waiting: dict[str, str] = {}
    stalled: str = ""
    """Why the run stands still; empty while it moves."""
    ended: str = ""
    failed_attempts: int = 0
    """Attempts of episodes that failed since the coordinator started."""
    failure: str = ""
    """Cause of the newest of them."""
    ledger_head: LedgerHead = EMPTY
    """Head of the ledger that this state is of."""


class Eval(msgspec.Struct, frozen=True, kw_only=True, tag="eval", tag_field="kind"):
    """An evaluation of the weights of one step."""

    time_s: float
    step: int
    incarnation: int = 0
    split: str = ""
    num_samples: int = 0
    success: float = 0.0
    success_by_label: dict[str, float] = {}
    complete: bool = True


@dataclass(slots=True)
class Series:
    """All points and evaluations in order of time."""

    points: list[Point] = field(default_factory=list)
    evals: list[Eval] = field(default_factory=list)

    def add(self, entry: Point | Eval) -> None:
        if isinstance(entry, Point):
            self.points.append(entry)
        else:
            self.evals.append(entry)

    @property
    def last(self) -> Point:
        """The newest point; an empty one before there is any."""
        return self.points[-1] if self.points else Point(time_s=0.0)

    @property
    def evals_by_step(self) -> list[Eval]:
        """One evaluation per step, in the order of steps: of a step that was made again, the newest."""
        newest = {e.step: e for e in self.evals if e.num_samples}
        return [newest[step] for step in sorted(newest)]

    @property
    def updates(self) -> list[Point]:
        """The first point at which each update was seen, in the order of updates; of one made again, the newest."""
        first: dict[int, Point] = {}
        for point in self.points:
            if point.update not in first or first[point.update].incarnation != point.incarnation:
                first[point.update] = point
        return [first[update] for update in sorted(first) if update > 0]

    def rates(self) -> tuple[float, float]:
        """Tokens per second (generated, trained) over the last RATE_WINDOW_S."""
        if len(self.points) < 2:
            return 0.0, 0.0
        last, begin = self.points[-1], self.points[-2]
        for point in reversed(self.points):
            begin = point
            if last.time_s - point.time_s >= RATE_WINDOW_S:
                break
        elapsed_s = max(last.time_s - begin.time_s, 1e-9)
        generated = (last.tokens_generated - begin.tokens_generated) / elapsed_s
        return generated, (last.tokens_trained - begin.tokens_trained) / elapsed_s


def staleness_shares(point: Point, bound: int) -> list[tuple[int, float]]:
    """(staleness, share of trained samples) from 0 to the bound, or to what was reached beyond it."""
    total = sum(point.trained_by_staleness.values())
    last = max([bound, *point.trained_by_staleness])
    return [(lag, point.trained_by_staleness.get(lag, 0) / total if total else 0.0) for lag in range(last + 1)]


def encode_line(entry: Point | Eval) -> bytes:
    return msgspec.json.encode(entry) + b"\n"


def read_series(path: Path) -> Series:
    """The file's content; empty if there is none. A last line cut off by a crash is left out. ConfigError if damaged."""
    series = Series()
    for entry in _entries(path):
        series.add(entry)
    return series


def _entries(path: Path) -> Iterator[Point | Eval]:
    if not path.exists():
        return
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last line break is not whole
        try:
            yield msgspec.json.decode(line, type=Point | Eval)
        except msgspec.DecodeError as err:
            raise ConfigError(f"{path}:{number}: {err}; the file is damaged, remove it to go on", path=path) from err
