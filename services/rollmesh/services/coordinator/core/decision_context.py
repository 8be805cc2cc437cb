"""What one decision is made with: the state, the moment, and where facts and effects go.

Inputs carry a `ticket`: the driver's handle of whoever asked. It is answered by a `Reply` effect, now or, for those who wait,
in a later turn. Effects are released by the driver only after the turn's facts are stored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

from rollmesh.services.coordinator.core.apply import apply
from rollmesh.services.coordinator.core.facts import Fact, Purpose, Task
from rollmesh.services.coordinator.core.inputs import LeaseBatch
from rollmesh.services.coordinator.core.records import RunSpec
from rollmesh.services.coordinator.core.state import PolicyClock, State
from rollmesh.shared.versions import PolicyVersion

FAILING_MAX = 32


class Refusal(Exception):
    """The input is refused; nothing became true. `reason` is an ErrorInfo reason of the protos.

    `field` names the request's field that is wrong, if the input can never succeed.
    """

    def __init__(self, reason: str, message: str, field: str = "", **metadata: object) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.field = field
        self.metadata = {key: str(value) for key, value in metadata.items()}


def refuse(reason: str, message: str, field: str = "", **metadata: object) -> NoReturn:
    raise Refusal(reason, message, field, **metadata)


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer whoever holds `ticket`."""

    ticket: int
    value: object


@dataclass(frozen=True, slots=True)
class DrawTasks:
    """Ask the data service; answer with `TasksDrawn` or `DrawFailed`."""

    purpose: Purpose
    first_draw: int
    num: int
    split: str = ""
    step: int = 0
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class FinalizeGroup:
    """Ask the reward service; answer with `GroupDecided`."""

    group: str
    deadline_passed: bool


@dataclass(frozen=True, slots=True)
class CancelEpisodes:
    """Tell a worker to give up episodes whose leases are gone. Saves work only."""

    node_id: str
    lease_ids: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Record in RM_<run>_DEAD what was given up, and why."""

    episode: str
    cause: str
    task: Task
    group: str = ""
    purpose: Purpose = Purpose.TRAIN
    draw: int = 0
    tries: int = 0
    traceback: str = ""


Effect = Reply | DrawTasks | FinalizeGroup | CancelEpisodes | DeadLetter


@dataclass(slots=True)
class WorkerWait:
    """A worker that waits for episodes."""

    ticket: int
    node_id: str
    num_max: int
    deadline: float


@dataclass(slots=True)
class BatchWait:
    """A trainer that waits for a batch."""

    ticket: int
    request: LeaseBatch
    trainer_epoch: int
    deadline: float


@dataclass(slots=True)
class Failing:
    """Tries that failed alike."""

    num: int = 0
    last: str = ""


@dataclass(slots=True)
class FailedAttempts:
    """Mirrors the message of the same name."""

    num: int = 0
    num_alike: int = 0
    cause: str = ""
    traceback: str = ""

    def note(self, cause: str, traceback: str) -> None:
        """Count a failed attempt."""
        self.num += 1
        self.num_alike = self.num_alike + 1 if _kind(cause) == _kind(self.cause) else 1
        self.cause, self.traceback = cause, traceback

    def end_row(self) -> None:
        """An attempt came to its end."""
        self.num_alike = 0


def _kind(cause: str) -> list[str]:
    """Where it failed and with what kind of error: "scorer correct: AttributeError: ..." without the rest."""
    return cause.split(":")[:2]


@dataclass(slots=True)
class EphemeralState:
    """What needs no ledger: deadlines on the coordinator's monotonic clock, waiting lists, questions on the way.

    Rebuilt after recovery: every lease gets one full term of grace, every question is asked again.
    """

    episode_deadlines: dict[str, float] = field(default_factory=dict)
    batch_deadlines: dict[str, float] = field(default_factory=dict)
    group_deadlines: dict[str, float] = field(default_factory=dict)
    eval_deadlines: dict[tuple[int, int], float] = field(default_factory=dict)
    """Evaluations that pin a step: asked for, or with open episodes."""
    evals_given_up: set[tuple[int, int]] = field(default_factory=set)
    """Evaluations whose tasks never came; not asked for again."""
    workers: list[WorkerWait] = field(default_factory=list)
    trainers: list[BatchWait] = field(default_factory=list)
    drawing: bool = False
    finalizing: set[str] = field(default_factory=set)
    overdue: set[str] = field(default_factory=set)
    """Groups whose deadline has passed."""
    counted_at: float | None = None
    """Moment up to which the run's time is counted; None before the first decision of this life."""
    exhausted: bool = False
    """The data service has no task beyond those drawn."""
    data_waiting: str = ""
    """Why the data service gives nothing, if it does not."""
    progressed_at: float = 0.0
    """When the run last made progress, or was recovered."""
    stall_told_at: float = float("-inf")
    """When a stall was recorded last."""
    failing: dict[str, Failing] = field(default_factory=dict)
    """Failed tries since then by where they failed ("sandbox", "LEASE_EXPIRED"); at most `FAILING_MAX` places."""

    failed: FailedAttempts = field(default_factory=FailedAttempts)
    """All failed attempts of this coordinator's lifetime."""

    def note_failure(self, cause: str, traceback: str = "") -> None:
        """Count a failed try."""
        self.failed.note(cause, traceback)
        where = cause.partition(":")[0].partition(" ")[0]
        if where in self.failing or len(self.failing) < FAILING_MAX:
            failing = self.failing.setdefault(where, Failing())
            failing.num += 1
            failing.last = cause


@dataclass(slots=True)
class DecisionContext:
    """One decision in the making."""

    state: State
    ephemeral: EphemeralState
    now: float
    facts: list[Fact] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)

    def emit(self, fact: Fact) -> None:
        """Make `fact` true at once, so that the rest of this decision builds on it."""
        apply(self.state, fact)
        self.facts.append(fact)

    def effect(self, effect: Effect) -> None:
        self.effects.append(effect)

    def reply(self, ticket: int, value: object) -> None:
        self.effects.append(Reply(ticket, value))

    @property
    def spec(self) -> RunSpec:
        return self.state.the_spec

    @property
    def clock(self) -> PolicyClock:
        return self.state.the_clock


def describe(version: PolicyVersion | None) -> str:
    return "none" if version is None else str(version)
