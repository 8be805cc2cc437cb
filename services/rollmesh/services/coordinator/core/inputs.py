"""Inputs of the core, and its replies. A request carries the ticket of its caller, and its type names the type of its
reply.

`messages.py` has the requests and replies that are messages of the contract as they are. Here are those that are not:
they are checked or taken apart before the core, or come from the coordinator itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from rollmesh.services.coordinator.core.facts import (
    AnswerKey,
    ArchiveSealed,
    DroppedSample,
    GroupDecision,
    PayloadRef,
    Provenance,
    Purpose,
    SampleMeta,
    SampleRewards,
    SegmentSource,
    SubmittedGroup,
    Task,
    TrainedGroup,
)
from rollmesh.services.coordinator.core.messages import (
    AttachResolution,
    EpisodeOutcome,
    LeaseBatchResponse,
    LeasedSample,
    PublishVersionResponse,
    ReplayDeadResponse,
    ReportEpisodesResponse,
    SubmitSamplesResponse,
    SubmitTasksResponse,
)
from rollmesh.services.coordinator.core.records import Request, TrainerRequest
from rollmesh.shared.domain.plans import Plan, Variant
from rollmesh.shared.domain.versions import PolicyVersion

NO_PAYLOAD = PayloadRef()


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLease:
    """Permission to run one episode."""

    lease_id: str
    group: str
    episode: str
    attempt: int
    purpose: Purpose
    task: Task
    policy: str
    step_min: int
    incarnation_min: int
    lease_s: float
    seed: int
    index: int
    submitted: bool = False
    given: bytes = b""
    """The submitted episode that is given to the worker, encoded; empty for a rollout."""
    given_source: str = ""
    variant: Variant | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Acquired:
    """Leases, or the cause of the wait for them."""

    leases: tuple[EpisodeLease, ...] = ()
    waiting_for: str = ""


class AcquireRollouts(Request[Acquired], frozen=True, kw_only=True):
    node_id: str
    num_max: int
    wait_s: float
    reads_variants: bool = True
    """Whether the worker reads the variant of a lease. Those of protocol 1.0 ignore it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeReport:
    lease_id: str
    group: str
    episode: str
    attempt: int
    outcome: EpisodeOutcome
    payload: PayloadRef = NO_PAYLOAD
    samples: tuple[SampleMeta, ...] = ()
    num_tool_calls: int = 0
    num_tool_calls_failed: int = 0
    cause: str = ""
    traceback: str = ""
    """Traceback of a user's agent or scorer that raised."""
    reason: str = ""
    """Reason of the end of a completed episode without samples; empty: NO_SAMPLES."""
    invalid: str = ""
    """Why the report cannot be recorded as it is. Its attempt then counts as an infra failure."""
    counts: bool = True
    """Whether a failure counts towards `tries_max`. It does not if no node of a kind served, which is not due to the
    episode."""


class ReportEpisodes(Request[ReportEpisodesResponse], frozen=True, kw_only=True):
    node_id: str
    reports: tuple[EpisodeReport, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TasksDrawn:
    """Result of `DrawTasks`: (draw, task) in order."""

    purpose: Purpose
    tasks: tuple[tuple[int, Task], ...]
    step: int = 0
    incarnation: int = 0
    plans: Mapping[int, Plan] = field(default_factory=dict)
    """The plans of the selector, by draw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawFailed:
    """Failure of `DrawTasks`: no task now, or with `exhausted` no further task."""

    purpose: Purpose
    cause: str
    exhausted: bool = False
    step: int = 0
    incarnation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDecided:
    """Result of `FinalizeGroup`."""

    group: str
    decision: GroupDecision
    reason: str = ""
    num_extend: int = 0
    adjusted: tuple[SampleRewards, ...] = ()
    dropped: Mapping[str, str] = field(default_factory=dict)
    """Reasons of the dropped members, by sample id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalizeFailed:
    """Failure of `FinalizeGroup`: the reward service cannot decide on this group. `traceback` has the lines of the
    user's code."""

    group: str
    cause: str
    traceback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDead:
    """A node was removed. Its episodes are released."""

    node_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    trainer_epoch: int
    next_update: int
    incarnation: int
    resolution: AttachResolution


class AttachTrainer(Request[Attached], frozen=True, kw_only=True):
    policy: str
    learner: str
    last_update: int
    digest: str
    holder: str = ""
    keeps_no_checkpoints: bool = False
    dropped: tuple[DroppedSample, ...] = ()
    """With `named` and `applied`: the commit of the checkpoint's last update, if it is the one in doubt."""
    named: tuple[str, ...] = ()
    applied: bool = True


class GeometryUnit(IntEnum):
    GROUPS = 1
    SAMPLES = 2
    TOKENS = 3


class LeaseBatch(TrainerRequest[LeaseBatchResponse], frozen=True, kw_only=True):
    update: int
    unit: GeometryUnit = GeometryUnit.GROUPS
    amount: int = 0
    """Size of the batch in `unit`; 0 means the run's batch_groups."""
    wait_s: float = 0.0
    size_of: Callable[[LeaseBatchResponse], int] = lambda grant: 0
    """Size of the reply with a grant, bytes."""
    bytes_max: int = 0
    """Maximum size of the reply, bytes."""


class WatchReady(TrainerRequest[tuple[LeasedSample, ...]], frozen=True, kw_only=True):
    """A request to read, not to decide: `Core.ready_ahead` answers it."""

    unit: GeometryUnit = GeometryUnit.GROUPS
    amount: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    digest: str


class CommitUpdate(TrainerRequest[Committed], frozen=True, kw_only=True):
    update: int
    lease_ids: tuple[str, ...]
    dropped: tuple[DroppedSample, ...] = ()
    named: tuple[str, ...] = ()
    """Every sample id that the trainer named, used or dropped. It is compared with the leases."""
    applied: bool = True
    groups: tuple[TrainedGroup, ...] = ()


class PublishVersion(TrainerRequest[PublishVersionResponse], frozen=True, kw_only=True):
    version: PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmissionLimits:
    """Limits of the submitted tasks, or of the groups of submitted samples, of a run."""

    total_max: int
    waiting_max: int
    waiting_bytes_max: int
    ledger_bytes_left: int = 2**62
    """Number of bytes of the ledger that they may still use. The driver sets it."""


class SubmitTasks(Request[SubmitTasksResponse], frozen=True, kw_only=True):
    submission: str
    """As in `TasksSubmitted`."""
    tasks: tuple[Task, ...]
    answer_keys: tuple[AnswerKey, ...]
    finish: bool
    limits: SubmissionLimits


class SubmitSamples(Request[SubmitSamplesResponse], frozen=True, kw_only=True):
    submission: str
    """As in `SamplesSubmitted`."""
    source: SegmentSource
    groups: tuple[SubmittedGroup, ...]
    answer_keys: tuple[AnswerKey, ...] = ()
    provenance: Provenance = Provenance()
    limits: SubmissionLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRejected:
    """The first nodes could not serve this version."""

    version: PolicyVersion
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalled:
    """The run is stalled. The core ignores it if the run has made progress since."""

    root: str
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadTask:
    """The task of a dead letter."""

    dead_id: int
    task: Task
    draw: int


class ReplayDead(Request[ReplayDeadResponse], frozen=True, kw_only=True):
    """Replay dead letters."""

    tasks: tuple[DeadTask, ...]


class SealArchive(Request[ArchiveSealed], frozen=True, kw_only=True):
    """Record that an archive segment is durable and verified."""

    segment: ArchiveSealed


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed, so that deadlines may be over."""


Input = (
    Request[Any] | TasksDrawn | DrawFailed | GroupDecided | FinalizeFailed | NodeDead | VersionRejected | Stalled | Tick
)
