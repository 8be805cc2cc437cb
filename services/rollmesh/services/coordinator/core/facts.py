"""What can become true. Each class mirrors the message of the same name in `rollmesh/v1/events.proto`, field by field."""

from __future__ import annotations

from rollmesh.services.coordinator.core.records import (
    ConfigChange,
    DroppedSample,
    GroupDecision,
    PayloadRef,
    Purpose,
    Record,
    RunSpec,
    SampleEnd,
    SampleMeta,
    SampleRewards,
    Task,
    Version,
)


class RunCreated(Record, frozen=True, kw_only=True, tag=True):
    spec: RunSpec


class GroupReserved(Record, frozen=True, kw_only=True, tag=True):
    group: str
    purpose: Purpose = Purpose.TRAIN
    policy: str = ""
    task: Task = Task()
    draw: int = 0
    num_episodes: int = 0
    update_intended: int = 0
    step_min: int = 0
    incarnation_min: int = 0
    dead_id: int = 0


class EpisodesAdded(Record, frozen=True, kw_only=True, tag=True):
    group: str
    num_episodes: int = 0


class EpisodeLeased(Record, frozen=True, kw_only=True, tag=True):
    group: str
    episode: str
    attempt: int = 0
    lease_id: str = ""
    node_id: str = ""


class EpisodeReturned(Record, frozen=True, kw_only=True, tag=True):
    group: str
    episode: str
    counts: bool = False
    cause: str = ""


class EpisodeEnded(Record, frozen=True, kw_only=True, tag=True):
    group: str
    episode: str
    end: SampleEnd = SampleEnd.FAILED
    reason: str = ""
    cause: str = ""


class EpisodeScored(Record, frozen=True, kw_only=True, tag=True):
    group: str
    episode: str
    payload: PayloadRef = PayloadRef()
    samples: tuple[SampleMeta, ...] = ()


class GroupFinalized(Record, frozen=True, kw_only=True, tag=True):
    group: str
    decision: GroupDecision = GroupDecision.KEEP
    reason: str = ""
    adjusted: tuple[SampleRewards, ...] = ()
    members: tuple[SampleRewards, ...] = ()


class SamplesEnded(Record, frozen=True, kw_only=True, tag=True):
    sample_ids: tuple[str, ...] = ()
    end: SampleEnd = SampleEnd.STALE
    reason: str = ""
    group: str = ""


class TrainerAttached(Record, frozen=True, kw_only=True, tag=True):
    policy: str = ""
    learner: str = ""
    trainer_epoch: int = 0
    last_update: int = 0
    holder: str = ""
    keeps_no_checkpoints: bool = False


class BatchLeased(Record, frozen=True, kw_only=True, tag=True):
    lease_id: str
    policy: str = ""
    learner: str = ""
    trainer_epoch: int = 0
    update: int = 0
    groups: tuple[str, ...] = ()
    sample_ids: tuple[str, ...] = ()


class BatchReturned(Record, frozen=True, kw_only=True, tag=True):
    lease_id: str
    reason: str = ""


class BatchInDoubt(Record, frozen=True, kw_only=True, tag=True):
    lease_id: str
    reason: str = ""


class UpdateCommitted(Record, frozen=True, kw_only=True, tag=True):
    policy: str = ""
    learner: str = ""
    trainer_epoch: int = 0
    update: int = 0
    incarnation: int = 0
    lease_ids: tuple[str, ...] = ()
    used: tuple[str, ...] = ()
    dropped: tuple[DroppedSample, ...] = ()
    applied: bool = True
    digest: str = ""


class CheckpointReported(Record, frozen=True, kw_only=True, tag=True):
    policy: str = ""
    learner: str = ""
    update: int = 0


class RolledBack(Record, frozen=True, kw_only=True, tag=True):
    policy: str = ""
    learner: str = ""
    to_update: int = 0
    incarnation: int = 0


class VersionPublished(Record, frozen=True, kw_only=True, tag=True):
    version: Version


class VersionQuarantined(Record, frozen=True, kw_only=True, tag=True):
    version: Version
    cause: str = ""


class RunEnded(Record, frozen=True, kw_only=True, tag=True):
    reason: str = ""


class RunStalled(Record, frozen=True, kw_only=True, tag=True):
    root: str = ""
    cause: str = ""
    stalled_s: float = 0.0


class TaskReplayed(Record, frozen=True, kw_only=True, tag=True):
    dead_id: int = 0
    task: Task = Task()
    draw: int = 0


class TimeCounted(Record, frozen=True, kw_only=True, tag=True):
    seconds: float = 0.0


class RunStopping(Record, frozen=True, kw_only=True, tag=True):
    reason: str = ""


class RunChanged(Record, frozen=True, kw_only=True, tag=True):
    spec: RunSpec
    change_id: str = ""
    changes: tuple[ConfigChange, ...] = ()
    reopened: bool = False


Fact = (
    RunCreated
    | GroupReserved
    | EpisodesAdded
    | EpisodeLeased
    | EpisodeReturned
    | EpisodeEnded
    | EpisodeScored
    | GroupFinalized
    | SamplesEnded
    | TrainerAttached
    | BatchLeased
    | BatchReturned
    | BatchInDoubt
    | UpdateCommitted
    | CheckpointReported
    | RolledBack
    | VersionPublished
    | VersionQuarantined
    | RunEnded
    | RunStalled
    | TaskReplayed
    | TimeCounted
    | RunStopping
    | RunChanged
)

PROGRESS = (RunCreated, EpisodeScored, GroupFinalized, UpdateCommitted, CheckpointReported, VersionPublished)
"""Facts that bring a run nearer to trained weights. Leases, retries, failures and reservations do not: they also go round in a
run that gets nowhere. Nor does an attach: a learner that keeps dying attaches again and again."""
