"""Inputs of the core, and its replies. A request carries the ticket of its caller. Its reply follows it in this
file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from rollmesh.services.coordinator.core.facts import (
    ConfigChange,
    DroppedSample,
    GroupDecision,
    PayloadRef,
    Purpose,
    Reward,
    SampleMeta,
    SampleRewards,
    SampleSummary,
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
)
from rollmesh.services.coordinator.core.records import Request, TrainerRequest
from rollmesh.shared.domain.versions import PolicyVersion

NO_PAYLOAD = PayloadRef()


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateRun:
    ticket: int
    spec: RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeRun:
    ticket: int
    spec: RunSpec
    changes: tuple[ConfigChange, ...]
    change_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    recorded: bool
    reopened: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AcquireRollouts:
    ticket: int
    node_id: str
    num_max: int
    wait_s: float


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Acquired:
    """Leases, or the cause of the wait for them."""

    leases: tuple[EpisodeLease, ...] = ()
    waiting_for: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewLeases:
    ticket: int
    node_id: str
    lease_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed:
    gone: tuple[str, ...]
    lease_s: float


class EpisodeOutcome(IntEnum):
    COMPLETED = 1
    INFRA_FAILURE = 2
    CANCELLED = 3


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
    invalid: str = ""
    """Why the report cannot be recorded as it is. Its attempt then counts as an infra failure."""
    counts: bool = True
    """Whether a failure counts towards `tries_max`. It does not if no node of a kind served, which is not due to the
    episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportEpisodes:
    ticket: int
    node_id: str
    reports: tuple[EpisodeReport, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """Results per report: empty, or why it was not recorded."""

    results: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TasksDrawn:
    """Result of `DrawTasks`: (draw, task) in order."""

    purpose: Purpose
    tasks: tuple[tuple[int, Task], ...]
    step: int = 0
    incarnation: int = 0


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
class AttachTrainer:
    ticket: int
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


class Resolution(IntEnum):
    CONTINUED = 1
    ROLLED_FORWARD = 2
    ROLLED_BACK = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    trainer_epoch: int
    next_update: int
    incarnation: int
    resolution: Resolution


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRequest:
    """Fields of every trainer request."""

    ticket: int
    policy: str
    learner: str
    trainer_epoch: int


class GeometryUnit(IntEnum):
    GROUPS = 1
    SAMPLES = 2
    TOKENS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseBatch(TrainerRequest):
    update: int
    unit: GeometryUnit = GeometryUnit.GROUPS
    amount: int = 0
    """Size of the batch in `unit`; 0 means the run's batch_groups."""
    wait_s: float = 0.0
    size_of: Callable[[BatchGrant], int] = lambda grant: 0
    """Size of the reply with a grant, bytes."""
    bytes_max: int = 0
    """Maximum size of the reply, bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchReady(TrainerRequest):
    """A request to read, not to decide: `Core.ready_ahead` answers it."""

    unit: GeometryUnit = GeometryUnit.GROUPS
    amount: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedKey:
    run: str
    task: str
    group: str
    episode: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedSample:
    meta: SampleMeta
    group: str
    task: str
    payload: PayloadRef
    staleness: int
    mask_below_step: int
    key: LeasedKey
    rewards_as_reported: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    sample_id: str
    rewards: tuple[Reward, ...]
    end: str
    episode: str
    summary: SampleSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMembers:
    group: str
    task: str
    members: tuple[Member, ...]
    labels: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchGrant:
    """A lease, or the cause of the wait for it."""

    lease_id: str = ""
    waiting_for: str = ""
    samples: tuple[LeasedSample, ...] = ()
    groups: tuple[GroupMembers, ...] = ()
    lease_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GetBatch(TrainerRequest):
    lease_id: str
    sample_ids: tuple[str, ...] = ()
    """Samples of the lease that are requested; empty means all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewBatch(TrainerRequest):
    lease_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitUpdate(TrainerRequest):
    update: int
    lease_ids: tuple[str, ...]
    dropped: tuple[DroppedSample, ...] = ()
    named: tuple[str, ...] = ()
    """Every sample id that the trainer named, used or dropped. It is compared with the leases."""
    applied: bool = True
    groups: tuple[TrainedGroup, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseBatch(TrainerRequest):
    lease_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportCheckpoint(TrainerRequest):
    update: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishVersion(TrainerRequest):
    version: PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRejected:
    """The first nodes could not serve this version."""

    version: PolicyVersion
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRun:
    ticket: int
    reason: str


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayDead:
    """Replay dead letters."""

    ticket: int
    tasks: tuple[DeadTask, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Dead letters that this request replayed. The other requested ones had been replayed before."""

    dead_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed, so that deadlines may be over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """An empty reply."""


Input = (
    CreateRun
    | ChangeRun
    | AcquireRollouts
    | RenewLeases
    | ReportEpisodes
    | TasksDrawn
    | DrawFailed
    | GroupDecided
    | FinalizeFailed
    | NodeDead
    | AttachTrainer
    | LeaseBatch
    | GetBatch
    | RenewBatch
    | CommitUpdate
    | ReleaseBatch
    | ReportCheckpoint
    | PublishVersion
    | VersionRejected
    | StopRun
    | Stalled
    | ReplayDead
    | Tick
)
