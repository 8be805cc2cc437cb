"""Values that facts and state share. Field names equal those of the protobuf messages they mirror."""

from __future__ import annotations

from enum import IntEnum

import msgspec


class Purpose(IntEnum):
    TRAIN = 1
    EVAL = 2
    EXPORT = 3


class SampleEnd(IntEnum):
    """The one end of every sample."""

    LIVE = 0
    TRAINED = 1
    STALE = 2
    FILTERED = 3
    FAILED = 4
    CANCELLED = 5
    EXPORTED = 6


class BoundPolicy(IntEnum):
    DROP = 1
    MASK = 2


class GroupDecision(IntEnum):
    KEEP = 1
    FILTER = 2
    EXTEND = 3


class RewardOutcome(IntEnum):
    OK = 1
    INFRA_FAILURE = 2
    NOT_APPLICABLE = 3


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all values: frozen, keyword-only."""


class Version(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Mirrors `PolicyVersion`."""

    policy: str = ""
    step: int = 0
    incarnation: int = 0
    weights_digest: str = ""

    @property
    def name(self) -> str:
        """For people, e.g. "main@5.0"."""
        return f"{self.policy}@{self.step}.{self.incarnation}"


class Message(Record, frozen=True, kw_only=True, omit_defaults=True):
    role: str = ""
    content: str = ""


class Task(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The public part of a task; the core passes it on and reads only its id and labels."""

    task_id: str = ""
    messages: tuple[Message, ...] = ()
    tools: tuple[str, ...] = ()
    oracle_ref: str = ""
    split: str = ""
    labels: dict[str, str] = {}


class Reward(Record, frozen=True, kw_only=True, omit_defaults=True):
    name: str = ""
    value: float = 0.0
    segment: int = 0
    scorer: str = ""
    evidence: str = ""
    outcome: RewardOutcome = RewardOutcome.OK


class SampleRewards(Record, frozen=True, kw_only=True, omit_defaults=True):
    sample_id: str = ""
    rewards: tuple[Reward, ...] = ()


class StepSpan(Record, frozen=True, kw_only=True, omit_defaults=True):
    """`num_tokens` trainable POLICY tokens sampled by (step, incarnation)."""

    step: int = 0
    incarnation: int = 0
    num_tokens: int = 0


class SampleMeta(Record, frozen=True, kw_only=True, omit_defaults=True):
    sample_id: str = ""
    policy: str = ""
    leaf: int = 0
    steps: tuple[StepSpan, ...] = ()
    num_tokens: int = 0
    rewards: tuple[Reward, ...] = ()
    trainable: bool = True
    num_sampled_tokens: int = 0


class PayloadRef(Record, frozen=True, kw_only=True, omit_defaults=True):
    sequence: int = 0
    size_bytes: int = 0


class DroppedSample(Record, frozen=True, kw_only=True, omit_defaults=True):
    sample_id: str = ""
    reason: str = ""


class Bound(Record, frozen=True, kw_only=True, omit_defaults=True):
    """How stale a trained token may be. Samples are judged by the bound under which their batch is leased."""

    max_staleness: int = 0
    beyond: BoundPolicy = BoundPolicy.DROP


class ConfigChange(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One changed setting, by dotted key; values as JSON."""

    key: str = ""
    old: str = ""
    new: str = ""


class RunSpec(Record, frozen=True, kw_only=True, omit_defaults=True):
    """What a run is. Changed by `RunChanged` alone; `rollmesh/v1/events.proto` describes each field."""

    run: str = ""
    policy: str = "main"
    learner: str = "main"
    max_staleness: int = 0
    beyond: BoundPolicy = BoundPolicy.DROP
    batch_groups: int = 1
    group_size: int = 1
    publish_every: int = 1
    tries_max: int = 3
    episode_lease_s: float = 30.0
    batch_lease_s: float = 60.0
    group_s_max: float = 600.0
    updates_max: int = 0
    eval_every: int = 0
    eval_tasks: int = 0
    eval_split: str = "test"
    eval_s_max: float = 60.0
    seed: int = 0
    success_reward: str = "correct"
    seconds_max: float = 0.0
    success_target: float = 0.0
    tokens_max: int = 0
    export_groups: int = 0
    export_split: str = "test"
    stall_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("batch_groups", "group_size", "publish_every", "tries_max"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")
        for name in (
            "max_staleness",
            "updates_max",
            "eval_every",
            "eval_tasks",
            "seconds_max",
            "tokens_max",
            "export_groups",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must not be negative")
        for name in ("episode_lease_s", "batch_lease_s", "group_s_max", "eval_s_max"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be a positive number of seconds")
        if self.exports and (self.updates_max or self.eval_every):
            raise ValueError(
                f"export_groups = {self.export_groups} with updates_max = {self.updates_max}, eval_every = {self.eval_every}: "
                "a run that exports its samples has no updates and no evaluations; set both to 0"
            )
        if self.stall_s < 0:
            raise ValueError(
                f"stall_s = {self.stall_s}: must not be negative; 0 means that a run never counts as stalled"
            )
        if not 0 <= self.success_target <= 1:
            raise ValueError(f"success_target = {self.success_target}: must be a share, 0 (never) to 1")
        if self.success_target and not (self.eval_every and self.eval_tasks):
            raise ValueError(
                f"success_target = {self.success_target} with eval_every = {self.eval_every}, eval_tasks = {self.eval_tasks}: "
                "success is seen in evaluations alone; set both above 0"
            )
        if self.publish_every > self.max_staleness + 1:
            raise ValueError(
                f"publish_every = {self.publish_every} with max_staleness = {self.max_staleness}: weights must be published "
                f"at least every max_staleness + 1 = {self.max_staleness + 1} updates, or no new sample could be within "
                "the bound; raise max_staleness or lower publish_every"
            )

    @property
    def exports(self) -> bool:
        """Whether samples are handed out instead of trained on."""
        return self.export_groups > 0

    @property
    def bound(self) -> Bound:
        """The bound of batches leased from now on."""
        return Bound(max_staleness=self.max_staleness, beyond=self.beyond)
