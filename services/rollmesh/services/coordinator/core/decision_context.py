"""The context of one decision: the state, the time, and the lists for facts and effects.

Inputs carry a `ticket`, by which the driver identifies the caller. A `Reply` effect answers it, in this decision or,
for a waiting caller, in a later one. The driver releases effects only after the facts of the decision are stored.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from rollmesh.services.coordinator.core.apply import apply
from rollmesh.services.coordinator.core.demand import LearnerDemand
from rollmesh.services.coordinator.core.facts import Fact, Purpose, Task
from rollmesh.services.coordinator.core.inputs import AcquireRollouts, LeaseBatch
from rollmesh.services.coordinator.core.records import ForeignSource, R, Request, RunSpec
from rollmesh.services.coordinator.core.state import PolicyClock, State
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import MeshError

FAILING_MAX = 32


@dataclass(frozen=True, slots=True)
class Reply:
    """Reply to the caller with `ticket`. A MeshError rejects a request that waited."""

    ticket: int
    value: object


@dataclass(frozen=True, slots=True)
class DrawTasks:
    """Request tasks from the data service. `TasksDrawn` or `DrawFailed` follows."""

    purpose: Purpose
    first_draw: int
    num: int
    split: str = ""
    step: int = 0
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class FinalizeGroup:
    """Request a decision from the reward service. `GroupDecided` or `FinalizeFailed` follows."""

    group: str
    deadline_passed: bool


@dataclass(frozen=True, slots=True)
class CancelEpisodes:
    """Cancel episodes at a worker whose leases have ended. This only saves work."""

    node_id: str
    lease_ids: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Write a dead letter to RM_<run>_DEAD."""

    episode: str
    cause: str
    task: Task
    group: str = ""
    purpose: Purpose = Purpose.TRAIN
    draw: int = 0
    tries: int = 0
    traceback: str = ""
    submitted_key: str = ""


Effect = Reply | DrawTasks | FinalizeGroup | CancelEpisodes | DeadLetter


@dataclass(slots=True)
class WorkerWait:
    """A worker that waits for episodes."""

    request: AcquireRollouts
    deadline: float


@dataclass(slots=True)
class BatchWait:
    """A trainer that waits for a batch."""

    request: LeaseBatch
    deadline: float


@dataclass(slots=True)
class Failing:
    """Failed attempts with the same cause."""

    num: int = 0
    last: str = ""


RECENT_MAX = 256
"""Number of the newest scored training episodes that GetRun summarizes."""


@dataclass(slots=True)
class FailedAttempts:
    """Failed attempts of a run, with the fields of the message of the same name."""

    num: int = 0
    num_alike: int = 0
    num_undecided: int = 0
    cause: str = ""
    traceback: str = ""

    def note(self, cause: str, traceback: str, num_undecided: int) -> None:
        """Count a failed attempt, or a group of `num_undecided` samples on which the reward service could not
        decide."""
        self.num += 1
        self.num_undecided += num_undecided
        self.num_alike = self.num_alike + 1 if _kind(cause) == _kind(self.cause) else 1
        self.cause, self.traceback = cause, traceback

    def reset_alike(self) -> None:
        """Reset the number of consecutive failures: an attempt succeeded."""
        self.num_alike = 0


@dataclass(frozen=True, slots=True)
class ScoredEpisode:
    """What RecentEpisodes is computed from."""

    rewards: tuple[tuple[str, float], ...]
    num_sampled_tokens: tuple[int, ...]
    """Numbers of sampled tokens, one per sample."""
    num_tool_calls: int
    num_tool_calls_failed: int
    newest_sample_id: str


def _kind(cause: str) -> list[str]:
    """Return component and kind of error of a cause, for example of "scorer correct: AttributeError: ..."."""
    return cause.split(":")[:2]


@dataclass(slots=True)
class EphemeralState:
    """State that is not in the ledger: deadlines on the coordinator's monotonic clock, waiting callers, open requests.

    Recovery rebuilds it: every lease gets one full term, and every open request is repeated.
    """

    episode_deadlines: dict[str, float] = field(default_factory=dict)
    batch_deadlines: dict[str, float] = field(default_factory=dict)
    group_deadlines: dict[str, float] = field(default_factory=dict)
    eval_deadlines: dict[tuple[int, int], float] = field(default_factory=dict)
    """Evaluations that pin a step: their tasks are requested, or episodes are open."""
    evals_dropped: set[tuple[int, int]] = field(default_factory=set)
    """Evaluations that got no tasks in time. They are not requested again."""
    workers: list[WorkerWait] = field(default_factory=list)
    trainers: list[BatchWait] = field(default_factory=list)
    demand: LearnerDemand = field(default_factory=LearnerDemand)
    drawing: bool = False
    finalizing: set[str] = field(default_factory=set)
    overdue: set[str] = field(default_factory=set)
    """Groups whose deadline has passed."""
    counted_at: float | None = None
    """Time up to which the run's time is counted; None before the first decision of this process."""
    draw_at: float | None = None
    """Time from which more submitted tasks can be drawn than fitted into the last decision; None if it drew all."""
    foreign_judged: tuple[int, tuple[ForeignSource, ...]] | None = None
    """Applied step and bounds of sources for which the waiting submitted samples were found young enough."""
    exhausted: bool = False
    """The data service has no further task."""
    data_waiting: str = ""
    """Why the data service returned no tasks; empty if it did."""
    progressed_at: float = 0.0
    """Time of the last progress, or of the recovery."""
    stall_recorded_at: float = float("-inf")
    """Time at which the last stall was recorded."""
    failing: dict[str, Failing] = field(default_factory=dict)
    """Failed attempts since then by component ("sandbox", "LEASE_EXPIRED"); at most `FAILING_MAX` components."""

    failed: FailedAttempts = field(default_factory=FailedAttempts)
    """All failed attempts since this coordinator started."""
    recent: deque[ScoredEpisode] = field(default_factory=lambda: deque(maxlen=RECENT_MAX))
    """The newest scored training episodes, the newest last."""

    def note_failure(self, cause: str, traceback: str = "", *, num_undecided: int = 0) -> None:
        """Count a failed attempt, or a group of `num_undecided` samples on which the reward service could not
        decide."""
        self.failed.note(cause, traceback, num_undecided)
        where = cause.partition(":")[0].partition(" ")[0]
        if where in self.failing or len(self.failing) < FAILING_MAX:
            failing = self.failing.setdefault(where, Failing())
            failing.num += 1
            failing.last = cause


@dataclass(slots=True)
class DecisionContext:
    """One decision that is being made."""

    state: State
    ephemeral: EphemeralState
    now: float
    facts: list[Fact] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)

    def emit(self, fact: Fact) -> None:
        """Apply `fact` at once, so that the rest of this decision builds on it."""
        apply(self.state, fact)
        self.facts.append(fact)

    def effect(self, effect: Effect) -> None:
        self.effects.append(effect)

    def reply(self, request: Request[R], value: R | MeshError) -> None:
        self.effects.append(Reply(request.ticket, value))

    @property
    def spec(self) -> RunSpec:
        return self.state.the_spec

    @property
    def clock(self) -> PolicyClock:
        return self.state.the_clock


def describe(version: PolicyVersion | None) -> str:
    return "none" if version is None else str(version)
