"""The spec of a run, with its ranges, and the base of the generated records in `facts.py`."""

from __future__ import annotations

from enum import IntEnum

import msgspec

SAMPLES_PER_EPISODE_MAX = 4096
SAMPLE_TOKENS_MAX = 2**31 - 1
"""Largest number of tokens on a sample's path: totals of a run then fit in 64 bits."""
EXTEND_FACTOR_MAX = 4
"""A group may grow to this many times `group_size`; a finalizer that wants more gets the group as it is."""


class BoundPolicy(IntEnum):
    DROP = 1
    MASK = 2


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all values: frozen, keyword-only."""


class Bound(Record, frozen=True, kw_only=True, omit_defaults=True):
    """How stale a trained token may be. Samples are judged by the bound under which their batch is leased."""

    max_staleness: int = 0
    beyond: BoundPolicy = BoundPolicy.DROP


SPEC_NAME_CHARS_MAX = 64
EPISODES_LIVE_MAX = 131_072
"""Most episodes that admission reserves at once: one decision, such as StopRun, then fits into a ledger record."""
_COUNT_MAX = 10**9
_LEASE_S = (0.01, 86_400.0)
_WEEK_S = 604_800.0
SPEC_RANGES: dict[str, tuple[float, float]] = {
    "batch_groups": (1, 65_536),
    "group_size": (1, 16_384),
    "max_staleness": (0, EPISODES_LIVE_MAX - 1),
    "publish_every": (1, EPISODES_LIVE_MAX),
    "tries_max": (1, 1000),
    "updates_max": (0, _COUNT_MAX),
    "eval_every": (0, _COUNT_MAX),
    "eval_tasks": (0, 100_000),
    "export_groups": (0, _COUNT_MAX),
    "tokens_max": (0, 10**15),
    "episode_lease_s": _LEASE_S,
    "batch_lease_s": _LEASE_S,
    "group_s_max": (0.01, _WEEK_S),
    "eval_s_max": (0.01, _WEEK_S),
    "seconds_max": (0, 1e9),
    "stall_s": (0, _WEEK_S),
}
"""Least and largest value by field; documented in `rollmesh/v1/events.proto`."""


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
        for name, (least, most) in SPEC_RANGES.items():
            if not least <= getattr(self, name) <= most:  # a NaN fails every comparison
                raise ValueError(f"{name} = {getattr(self, name)}: must be in [{least}, {most}]")
        for name in ("policy", "learner", "eval_split", "export_split", "success_reward"):
            if len(getattr(self, name)) > SPEC_NAME_CHARS_MAX:
                raise ValueError(
                    f"{name} = {getattr(self, name)[:20]!r}...: must have at most {SPEC_NAME_CHARS_MAX} characters"
                )
        episodes = (self.max_staleness + 1) * self.batch_groups * self.group_size
        if not self.exports and episodes > EPISODES_LIVE_MAX:
            raise ValueError(
                f"batch_groups = {self.batch_groups} with group_size = {self.group_size}, max_staleness = {self.max_staleness}: "
                f"(max_staleness + 1) * batch_groups * group_size must be at most {EPISODES_LIVE_MAX}, got {episodes}"
            )
        if self.exports and (self.updates_max or self.eval_every):
            raise ValueError(
                f"export_groups = {self.export_groups} with updates_max = {self.updates_max}, eval_every = {self.eval_every}: "
                "a run that exports its samples has no updates and no evaluations; set both to 0"
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
