"""The spec of a run, with its ranges, and the bases of requests and of the records that are generated."""

from __future__ import annotations

from enum import IntEnum
from math import floor
from typing import Annotated, Generic, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta

from rollmesh.services.coordinator.core.replay_priorities import Priority, make_priority
from rollmesh.shared.config.settings import LIVE, NonNegativeInt, SettingError, Settings, Share
from rollmesh.shared.domain.plans import GROUP_SIZE_MAX, Variant, check_variants
from rollmesh.shared.domain.sources import ExternalSource

SAMPLES_PER_EPISODE_MAX = 4096
SAMPLE_TOKENS_MAX = 2**31 - 1
"""Maximum number of tokens on the path of a sample, so that totals of a run fit in 64 bits."""
EXTEND_FACTOR_MAX = 4
"""A group may grow to this many times the size with which it began. A group is kept as it is if a finalizer requests
more."""


class BoundPolicy(IntEnum):
    DROP = 1
    MASK = 2


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all values: frozen, keyword-only."""


R = TypeVar("R")
"""The reply to a request."""


class Request(msgspec.Struct, Generic[R], frozen=True, kw_only=True):
    """An input of a caller that waits for its reply R."""

    ticket: int


class TrainerRequest(Request[R], frozen=True, kw_only=True):
    """Fields of every trainer request."""

    policy: str
    learner: str
    trainer_epoch: int


class Bound(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The staleness bound of a trained token. A batch keeps the bound under which it was leased."""

    max_staleness: int
    beyond: BoundPolicy


UNLIMITED: Literal["unlimited"] = "unlimited"
"""Value of a bound that is written and admits all."""
_BOUND_MAX = 10**9


def _check_bound(field: str, value: object, least: int) -> None:
    """Check a bound without a default. Raises SettingError."""
    if value != UNLIMITED and not (isinstance(value, int) and least <= value <= _BOUND_MAX):
        must = f"must be a whole number in [{least}, {_BOUND_MAX}] or unlimited"
        raise SettingError(field, f"{must}, got {value!r:.100}; it has no default")


_ROUNDING = 1e-9


def whole_share(share: float, amount: int) -> int:
    """Return a share of an amount, rounded down to a whole number. A share such as 1/49 is a rounded number itself, so
    49 times it counts as 1."""
    return floor(share * amount + _ROUNDING)


class ReplaySpec(Settings):
    """The replay log: trained samples that later updates train again (docs/replay.md)."""

    max_staleness: Annotated[int, Meta(ge=1, le=_BOUND_MAX)] | Literal["unlimited"]
    """Largest number of updates between the oldest trained token of a replayed sample and its update. It must be
    written, `unlimited` included."""
    share: Annotated[float, Meta(gt=0, le=1)] = 0.5
    """Largest share of a batch that is replayed. With the priorities `fifo` and `return`, every batch has this share,
    rounded down to whole groups, once the log has enough, and only the rest of it is generated, at least one group.
    1 with `compensation`, whose extra updates are replayed as a whole."""
    capacity_groups: Annotated[int, Meta(ge=1, le=16_384)] = 512
    """Most groups in the log. The oldest leave it first."""
    capacity_bytes: Annotated[int, Meta(ge=1)] = 4 * 1024**3
    """Most bytes of the payloads of the groups in the log. The oldest groups leave it first. With payloads in files,
    the copies of these payloads need this room on the disk."""
    priority: str = "fifo"
    """What is kept and what is trained again: fifo, advantage, return, success_per_task or compensation
    (docs/replay.md)."""
    options: dict[str, float] = {}
    """Options of the priority."""

    def check_fields(self) -> None:
        """Raises SettingError."""
        _check_bound("max_staleness", self.max_staleness, least=1)
        if self.made.once and self.share != 1:
            raise SettingError(
                "share", f"must be 1 with priority {self.priority}, whose extra updates are replayed, got {self.share}"
            )

    @property
    def made(self) -> Priority:
        """The priority with its options."""
        return make_priority(self.priority, self.options)

    def quota(self, amount: int) -> int:
        """Return how much of a batch of this amount may be replayed. At least one unit is fresh."""
        return min(whole_share(self.share, amount), amount - 1)

    @property
    def bound(self) -> Bound:
        """The bound of replayed samples. No token of them is masked."""
        most = self.max_staleness
        return Bound(max_staleness=most if isinstance(most, int) else _BOUND_MAX, beyond=BoundPolicy.DROP)


EPISODES_LIVE_MAX = 131_072
"""Maximum number of episodes that admission reserves at once, so that one decision, such as StopRun, fits into a ledger
record."""
SpecName = Annotated[str, Meta(max_length=64)]
_Count = Annotated[int, Meta(ge=0, le=10**9)]
_Lease = Annotated[float, Meta(ge=0.01, le=86_400)]
_Duration = Annotated[float, Meta(ge=0.01, le=604_800)]


SubmittedSource = Literal["dataset", "rewritten", "peer", "human"]
"""A source of samples that clients may submit."""


class ForeignSource(Settings):
    """The bound and the share of the samples of one source that clients submit (SubmitSamples)."""

    source: SubmittedSource
    """The source. It must also be in `external_sources`."""
    max_age: Annotated[int, Meta(ge=0, le=_BOUND_MAX)] | Literal["unlimited"]
    """Largest number of updates from the submission of a sample to its update, or `unlimited`. It has no default, so
    that no source is without a written bound."""
    share: Annotated[float, Meta(gt=0, le=1)]
    """Largest share of the groups of a batch, without those that are drawn from the replay log. The shares of all
    sources sum to at most 1. A batch may have one larger group, because groups are whole."""
    keep_equal: bool = False
    """Whether groups with several samples whose rewards are all equal are kept. By default they end as
    filtered(ZERO_VARIANCE)."""

    def check_fields(self) -> None:
        if self.source not in get_args(SubmittedSource):
            raise SettingError("source", f"must be one of {', '.join(get_args(SubmittedSource))}, got {self.source!r}")
        _check_bound("max_age", self.max_age, least=0)


class RunSettings(Settings):
    """The parameters of a run, each declared here only. `RunSpec` is the recorded form, `RunConfig` (mesh/config.py)
    the form in files.

    A field of a running run is fixed unless it is marked LIVE. `rollmesh/v1/events.proto` states the same ranges.
    """

    policy: SpecName = "main"
    """Name of the trainable policy."""
    learner: SpecName = "main"
    """Name of the consumer of its samples."""
    max_staleness: Annotated[int, Meta(ge=0, le=EPISODES_LIVE_MAX - 1), LIVE] = 2
    """eta: largest number of updates between the oldest trained token and its update. 0 is on-policy. A larger value
    hides longer tails and trains on older samples (docs/staleness.md)."""
    admit_early: Annotated[bool, LIVE] = False
    """Whether groups are admitted as early as the bound allows. By default they are admitted on demand: samples that
    would only wait for a busy learner are generated later, from newer weights (docs/staleness.md)."""
    external_sources: Annotated[tuple[ExternalSource, ...], LIVE] = ()
    """Sources other than the policy whose tokens the run trains, such as `dataset` for given solutions. The staleness
    bound does not concern them (docs/staleness.md). Without the source here, an attempt that trains such tokens is
    rejected at its report."""
    foreign: Annotated[tuple[ForeignSource, ...], LIVE] = ()
    """Sources of finished samples that clients may submit (SubmitSamples, docs/trainers.md), each with its bound. They
    have their own counters, and a batch has at most their share of them."""
    batch_groups: Annotated[int, Meta(ge=1, le=65_536)] = 16
    """Groups (tasks) per update."""
    group_size: Annotated[int, Meta(ge=1, le=GROUP_SIZE_MAX)] = 16
    """Episodes per group, unless the selector plans another number."""
    variants: tuple[Variant, ...] = ()
    """What distinguishes the episodes of a training group, such as their temperature (docs/concepts.md#plans). Their
    counts sum to `group_size`. Empty: the episodes of a group are alike. A plan of the selector replaces them."""
    publish_every: Annotated[int, Meta(ge=1, le=EPISODES_LIVE_MAX), LIVE] = 1
    """Updates between published weights, at most max_staleness + 1."""
    tries_max: Annotated[int, Meta(ge=1, le=1000), LIVE] = 4
    """Attempts of an episode that fails for infrastructure reasons."""
    episode_lease_s: Annotated[_Lease, LIVE] = 30.0
    """Duration of an episode lease without renewal, seconds. After it another worker gets the episode."""
    batch_lease_s: Annotated[_Lease, LIVE] = 60.0
    """Duration of a batch lease without renewal, seconds. After it the batch is in doubt."""
    group_s_max: Annotated[_Duration, LIVE] = 600.0
    """Deadline of a group after its first lease, seconds. A group is then finalized with the members that it has."""
    updates_max: Annotated[_Count, LIVE] = 100
    """The run ends after this many updates. 0: no limit."""
    eval_every: Annotated[_Count, LIVE] = 10
    """Updates between evaluations. The first and the last step are always evaluated. 0: never evaluate."""
    eval_tasks: Annotated[int, Meta(ge=0, le=100_000)] = 320
    """Tasks per evaluation."""
    eval_split: SpecName = "test"
    """Split of the evaluation tasks."""
    eval_s_max: Annotated[_Duration, LIVE] = 120.0
    """Longest time for which an evaluation may hold back new weights, seconds."""
    seed: NonNegativeInt = 0
    """Key of all draws: tasks, sampling, minibatches."""
    success_reward: SpecName = "correct"
    """Name of the reward whose mean evaluations report as success: 1 is success, 0 is failure, and values between them
    are averaged."""
    seconds_max: Annotated[float, Meta(ge=0, le=1e9), LIVE] = 0.0
    """The run ends after this many seconds. Only time counts in which a coordinator leads the run, over all restarts.
    0: no limit."""
    success_target: Annotated[Share, LIVE] = 0.0
    """The run ends with the first evaluation in which at least this share of all evaluation tasks succeeds. 0: no
    target."""
    tokens_max: Annotated[int, Meta(ge=0, le=10**15), LIVE] = 0
    """The run ends once this many tokens were sampled for its training samples. Prompts and tool results do not count.
    0: no limit."""
    export_groups: _Count = 0
    """0: train. Above 0: export this many groups without a learner. They are generated with the initial weights,
    StreamSamples returns the samples, and the run ends. Settings of updates, staleness and evaluation then have no
    effect."""
    export_split: SpecName = "test"
    """Split from which an export draws its tasks, in the order of the source."""
    submitted_tasks: bool = False
    """Whether clients submit the tasks of the run (SubmitTasks, docs/trainers.md), each of which is drawn once, in the
    order of submission. By default the data service has the tasks. Evaluations use its splits in both cases."""
    stall_s: Annotated[float, Meta(ge=0, le=604_800), LIVE] = 300.0
    """Seconds without progress after which the run is reported as stalled, with the cause (docs/reliability.md). It
    must exceed the longest update and the longest episode. 0: never."""

    @property
    def exports(self) -> bool:
        """Whether samples are exported instead of trained on."""
        return self.export_groups > 0


class RunSpec(RunSettings, forbid_unknown_fields=False):
    """A run as the ledger records it, every value explicit. Only `RunChanged` changes it."""

    run: str
    """Name of the run."""
    beyond: BoundPolicy = BoundPolicy.DROP
    """What happens to samples beyond the bound."""
    replay: ReplaySpec | None = None
    """The replay log; None: a trained sample is not trained again."""

    def check_fields(self) -> None:
        """Raises SettingError."""
        episodes = (self.max_staleness + 1) * self.batch_groups * self.group_size
        if not self.exports and episodes > EPISODES_LIVE_MAX:
            raise SettingError(
                "batch_groups",
                f"must satisfy (max_staleness + 1) * batch_groups * group_size <= {EPISODES_LIVE_MAX}, got "
                f"{self.batch_groups} with max_staleness = {self.max_staleness} and group_size = {self.group_size}",
            )
        self._check_variants()
        self._check_replay()
        for name in ("updates_max", "eval_every"):
            if self.exports and getattr(self, name):
                raise SettingError(
                    name,
                    f"must be 0 in a run that exports its samples (export_groups = {self.export_groups}), got "
                    f"{getattr(self, name)}",
                )
        if self.eval_every and not self.eval_tasks:
            raise SettingError(
                "eval_tasks",
                f"must be >= 1 in a run that evaluates (eval_every = {self.eval_every}), got 0; set it, or set "
                "eval_every to 0",
            )
        if self.success_target and not (self.eval_every and self.eval_tasks):
            raise SettingError(
                "success_target",
                f"must be 0 without evaluations, got {self.success_target} with eval_every = {self.eval_every}, "
                f"eval_tasks = {self.eval_tasks}; set both above 0",
            )
        self._check_foreign()
        if self.publish_every > self.max_staleness + 1:
            raise SettingError(
                "publish_every",
                f"must be <= max_staleness + 1 = {self.max_staleness + 1}, got {self.publish_every}: otherwise no new "
                "sample could be within the bound; raise max_staleness or lower publish_every",
            )

    def _check_variants(self) -> None:
        check_variants(self.variants, self.group_size)
        if self.exports and self.variants:
            raise SettingError("variants", "must be empty in a run that exports its samples; remove them")
        for index, variant in enumerate(self.variants):
            if self.submitted_tasks and variant.extras:
                field = "hint_extra" if variant.hint_extra else "prefix_extra"
                raise SettingError(
                    f"variants[{index}].{field}",
                    f"must be empty in a run whose tasks are submitted, because they have no private extras, got "
                    f"{getattr(variant, field)}; use `{field.removesuffix('_extra')}`",
                )

    def _check_foreign(self) -> None:
        names = [one.source for one in self.foreign]
        for index, one in enumerate(self.foreign):
            field = f"foreign[{index}]"
            if self.exports:
                raise SettingError(field, "must not exist in a run that exports its samples; remove it")
            if names.count(one.source) > 1:
                raise SettingError(f"{field}.source", f"must be different in each entry, got {one.source} twice")
            if one.source not in self.external_sources:
                what = f"must be in external_sources ({', '.join(self.external_sources) or 'none'}), got {one.source}"
                raise SettingError(f"{field}.source", f"{what}; add it there, because its tokens are trained")
            if whole_share(one.share, self.fresh_groups) < 1:
                what = f"{1 / self.fresh_groups:g}, one of the {self.fresh_groups} groups of a batch that are fresh"
                raise SettingError(f"{field}.share", f"must be >= {what}, got {one.share:g}")
        if (total := sum(one.share for one in self.foreign)) > 1 + _ROUNDING:
            raise SettingError("foreign", f"must have shares that sum to at most 1, got {total:g}; lower a share")

    def _check_replay(self) -> None:
        if self.replay is None:
            return
        if self.exports:
            raise SettingError("replay", "must be absent in a run that exports its samples, because it has no updates")
        priority = self.replay.made
        if (priority.draws or priority.replaces) and whole_share(self.replay.share, self.batch_groups) < 1:
            raise SettingError(
                "replay.share",
                f"must be >= {1 / self.batch_groups:.4g}, one group of batch_groups = {self.batch_groups}, got "
                f"{self.replay.share}",
            )
        if (priority.draws or priority.replaces) and self.batch_groups < 2:
            raise SettingError(
                "batch_groups", f"must be >= 2 with priority {self.replay.priority}, because one group is fresh, got 1"
            )
        if priority.replaces and self.group_size < 2:
            raise SettingError(
                "group_size",
                f"must be >= 2 with priority {self.replay.priority}: a group of one has no advantage, got 1",
            )
        if priority.once and self.replay.capacity_groups < self.batch_groups:
            raise SettingError(
                "replay.capacity_groups",
                f"must be >= batch_groups = {self.batch_groups} with priority {self.replay.priority}, got "
                f"{self.replay.capacity_groups}",
            )
        if priority.once and self.replay.bound.max_staleness <= self.max_staleness:
            raise SettingError(
                "replay.max_staleness",
                f"must be > max_staleness = {self.max_staleness} with priority {self.replay.priority}, whose samples "
                f"are trained later than their batch, got {self.replay.max_staleness}",
            )

    @property
    def fresh_groups(self) -> int:
        """Groups per update that admission prepares: a batch without the share that is drawn from the replay log."""
        if self.replay is None or not self.replay.made.draws:
            return self.batch_groups
        return self.batch_groups - self.replay.quota(self.batch_groups)

    @property
    def deferred_groups_max(self) -> int:
        """Most groups of deferred samples that may wait for their extra update. Extra updates and others alternate
        then, so the last of n batches in the log waits for 2 * n updates, which must be within the bound of replay."""
        assert self.replay is not None, "only a replay log defers samples"
        batches = (self.replay.bound.max_staleness - self.max_staleness) // 2
        return min(self.replay.capacity_groups, max(1, batches) * self.batch_groups)

    @property
    def bound(self) -> Bound:
        """The bound of batches that are leased from now on."""
        return Bound(max_staleness=self.max_staleness, beyond=self.beyond)
