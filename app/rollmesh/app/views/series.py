"""series.jsonl: the states of a run from WatchRun, each with the time at which it was received.

One JSON object per line, distinguished by `kind`: a `point` is a state, an `eval` the result of an evaluation. Times
are seconds of running time: a resumed run continues to count from where it stopped. Collaborators: `watch` writes it,
`display` and `report` read it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rollmesh.shared.domain.decoding import UNDECODABLE
from rollmesh.shared.domain.ledger_head import EMPTY, LedgerHead
from rollmesh.shared.errors import ConfigError

RATE_WINDOW_S = 30.0
"""Tokens per second are averaged over this time. In a window shorter than an update, the rate of trained tokens would
jump."""


class Point(msgspec.Struct, frozen=True, kw_only=True, tag="point", tag_field="kind"):
    """The state of a run at one time; counts are totals since its start."""

    time_s: float
    update: int = 0
    """Last committed update."""
    published_step: int = -1
    incarnation: int = 0
    checkpoint_update: int = 0
    mean_rewards: dict[str, float] = {}
    """Mean over the groups of the last update."""
    samples: dict[str, int] = {}
    """Number of training samples: reserved, live, and by end."""
    reasons: dict[str, int] = {}
    """Number of ends by reason, e.g. {"stale/BEYOND_BOUND": 12}."""
    groups: dict[str, int] = {}
    tokens_generated: int = 0
    tokens_trained: int = 0
    trained_by_staleness: dict[int, int] = {}
    """Trained samples by staleness at their update; -1 counts those without tokens of the policy."""
    replay: dict[str, int] = {}
    """Number of replayed samples as in `samples`; empty in a run without replay."""
    replayed_by_staleness: dict[int, int] = {}
    """Trained replayed samples by staleness at their update, which `trained_by_staleness` does not have."""
    waiting: dict[str, str] = {}
    stalled: str = ""
    """Why the run is stalled; empty while it makes progress."""
    ended: str = ""
    failed_attempts: int = 0
    """Number of failed attempts of episodes since the coordinator started."""
    failure: str = ""
    """Cause of the newest failed attempt."""
    ledger_head: LedgerHead = EMPTY
    """Ledger head of this state."""


class Eval(msgspec.Struct, frozen=True, kw_only=True, tag="eval", tag_field="kind"):
    """An evaluation of the weights of one step."""

    time_s: float
    step: int
    incarnation: int = 0
    split: str = ""
    num_samples: int = 0
    success: float = 0.0
    """Mean of the run's success reward."""
    success_by_label: dict[str, float] = {}
    complete: bool = True
    graded: bool = False
    """Whether values of the success reward were neither 0 nor 1."""


def heldout_name(graded: bool) -> str:
    """Return what an evaluation measured. A mean of graded rewards is not a share of solved tasks."""
    return "held-out reward" if graded else "held-out success"


@dataclass(slots=True)
class Series:
    """All points and evaluations, ordered by time."""

    points: list[Point] = field(default_factory=list)
    evals: list[Eval] = field(default_factory=list)

    def add(self, entry: Point | Eval) -> None:
        if isinstance(entry, Point):
            self.points.append(entry)
        else:
            self.evals.append(entry)

    @property
    def last(self) -> Point:
        """The newest point, or an empty one."""
        return self.points[-1] if self.points else Point(time_s=0.0)

    @property
    def evals_by_step(self) -> list[Eval]:
        """One evaluation per step, ordered by step; the newest one if a step was repeated."""
        newest = {e.step: e for e in self.evals if e.num_samples}
        return [newest[step] for step in sorted(newest)]

    @property
    def updates(self) -> list[Point]:
        """The first point of each update, ordered by update; of the newest incarnation if an update was repeated."""
        first: dict[int, Point] = {}
        for point in self.points:
            if point.update not in first or first[point.update].incarnation != point.incarnation:
                first[point.update] = point
        return [first[update] for update in sorted(first) if update > 0]

    def rates(self) -> tuple[float, float]:
        """Return tokens per second (generated, trained) over the last RATE_WINDOW_S."""
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
    """Return (staleness, share of trained samples) from 0 to the bound, or to the maximum if it is larger. Samples
    without tokens of the policy have no staleness and are not counted."""
    counts = {lag: num for lag, num in point.trained_by_staleness.items() if lag >= 0}
    total = sum(counts.values())
    return [(lag, counts.get(lag, 0) / total if total else 0.0) for lag in range(max([bound, *counts]) + 1)]


def encode_line(entry: Point | Eval) -> bytes:
    return msgspec.json.encode(entry) + b"\n"


def read_series(path: Path) -> Series:
    """Return the content of the file, empty if it does not exist. A last line cut off by a crash is skipped.

    Raises ConfigError if the file is damaged.
    """
    series = Series()
    for entry in _entries(path):
        series.add(entry)
    return series


def _entries(path: Path) -> Iterator[Point | Eval]:
    if not path.exists():
        return
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):  # text after the last line break is an incomplete line
        try:
            yield msgspec.json.decode(line, type=Point | Eval)
        except UNDECODABLE as err:
            raise ConfigError(
                f"{path}:{number}: {err}; the file is damaged; remove it, then resume", path=path
            ) from err
