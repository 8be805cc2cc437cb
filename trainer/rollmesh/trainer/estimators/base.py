"""The estimator port, its built-in estimators, and how they read a reward vector. Free of torch: the reward service
reads it too.

Which rewards count: those about the whole sample with outcome OK. An INFRA_FAILURE says nothing about the model, so
such a member is excluded from every mean, and as a sample it has no advantage at all (never a zero score).
NOT_APPLICABLE excludes that one reward of that one member (see `reward_sums` and `filled`). A baseline counts
episodes, not samples: a mean is taken over the samples of each episode, then over episodes. Members that will not be
trained (stale, filtered) stay in the statistics, because a baseline without them would be biased.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from msgspec.structs import replace as with_rewards
from numpy.typing import NDArray

from rollmesh.shared.config.plugin import optional_attribute, required
from rollmesh.shared.config.registry import Extension, Registry
from rollmesh.shared.domain.trajectory import (
    WHOLE_SAMPLE,
    FloatArray,
    GroupContext,
    MemberOutcome,
    Outcome,
    Reward,
    TrainingSample,
)
from rollmesh.trainer.part import UpdatePart

if TYPE_CHECKING:  # it imports torch
    from rollmesh.trainer.batch import UpdateBatch

UNSCORED = "UNSCORED"
"""Reason of a sample without a usable reward."""
DOWN_SAMPLED = "DOWN_SAMPLED"
"""Reason of a sample that is not trained because others of its group or batch were chosen."""
UNDECIDED = 1.0
"""What `of_group` returns for a member whose advantage its group alone does not decide: not 0, so that finalizers keep
the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The result of an estimator for a batch of S samples with M trained tokens."""

    advantages: FloatArray
    """[M] advantage of each trained token."""
    sample_weights: FloatArray | None = None
    """[S] factors of the samples' weights in the loss; None means 1."""
    dropped: Mapping[int, str] = field(default_factory=dict)
    """Number of a sample -> typed reason, e.g. `UNSCORED`, for samples that are not trained."""
    token_mask: NDArray[np.bool_] | None = None
    """[M], False keeps a token out of the loss; None means all True."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers to report as `estimator/NAME`."""
    columns: Mapping[str, FloatArray] = field(default_factory=dict)
    """Name -> [M] further columns for loss terms and update rules, as the estimator's attribute `columns` names
    them."""
    measures: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Group -> name -> number: what a selector gets of each group with used tokens as `result.trained.measures`, beside
    the names of `TRAINED_MEASURES`. Those of the first estimate of an update count. A number that is not finite is
    omitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSize:
    """Numbers of episodes per group with which an estimator works."""

    least: int = 1
    """The smallest one."""
    odd: bool = False
    """Whether only odd numbers are allowed."""

    def allows(self, size: int) -> bool:
        """Return whether a group of `size` episodes is allowed."""
        return size >= self.least and (size % 2 == 1 or not self.odd)

    def __str__(self) -> str:
        """Return what the number must be, e.g. "odd and >= 3"."""
        return " and ".join(filter(None, ("odd" if self.odd else "", f">= {self.least}" if self.least > 1 else "")))


class Estimator(UpdatePart):
    """Base of estimators: a function from a batch to the advantage of each token.

    Constructed as `cls(weights=..., options=...)`, without `options` if the class has no `Options`. `weights` is
    `reward.weights`: reward name -> weight. A reward that it does not name is recorded and not optimized. Empty: every
    reward has weight 1.
    """

    @optional_attribute
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that each of its estimates returns."""
        return ()

    @optional_attribute
    def group_size(self) -> GroupSize:
        """What `run.group_size` must satisfy."""
        return GroupSize()

    @required
    def of_group(self, group: GroupContext) -> dict[str, float]:
        """Return sample id -> its advantage as far as its group alone decides it, for the members that have usable
        rewards.

        If all are 0, the group has no gradient, and finalizers filter it.
        """
        raise NotImplementedError

    @required
    def __call__(self, batch: UpdateBatch) -> Estimate:
        """Return the advantages of the batch."""
        raise NotImplementedError


class GroupEstimator(Estimator):
    """Base of estimators that are functions of one group. A subclass defines `of_group`."""

    def __init__(self, *, weights: Mapping[str, float], options: Any = None) -> None:
        self.weights = weights
        self.options = options

    def __call__(self, batch: UpdateBatch) -> Estimate:
        scalars: dict[str, float] = {}
        for group in batch.groups:
            scalars |= self.of_group(group)
        return spread(batch, scalars)

    def reward_sums(self, group: GroupContext) -> tuple[list[MemberOutcome], NDArray[np.float64]]:
        """Return the members with usable rewards, and the weighted sum of the rewards of each."""
        return reward_sums(group, self.weights)

    def weight_of(self, reward: str) -> float:
        """Return the weight of a reward in the run."""
        return weight_of(reward, self.weights)


ESTIMATORS = Registry(
    "estimator",
    {
        "grpo": "rollmesh.trainer.estimators.grpo:Grpo",
        "gdpo": "rollmesh.trainer.estimators.gdpo:Gdpo",
        "gae": "rollmesh.trainer.estimators.gae:Gae",
        "archer": "rollmesh.trainer.estimators.archer:Archer",
        "riql": "rollmesh.trainer.estimators.riql:Riql",
        "red": "rollmesh.trainer.estimators.red:Red",
        "mc_grpo": "rollmesh.trainer.estimators.mc_grpo:McGrpo",
        "trloo": "rollmesh.trainer.estimators.trloo:Trloo",
        "hgpo": "rollmesh.trainer.estimators.hgpo:Hgpo",
        "v0": "rollmesh.trainer.estimators.v0:V0",
        "v05": "rollmesh.trainer.estimators.v05:V05",
        "dsdr": "rollmesh.trainer.estimators.dsdr:Dsdr",
        "copo": "rollmesh.trainer.estimators.copo:Copo",
        "risk_po": "rollmesh.trainer.estimators.risk_po:RiskPo",
        "mssr": "rollmesh.trainer.estimators.mssr:Mssr",
        "ace": "rollmesh.trainer.estimators.ace:Ace",
        "vcpo": "rollmesh.trainer.estimators.vcpo:Vcpo",
        "remax": "rollmesh.trainer.estimators.remax:Remax",
        "w_reinforce": "rollmesh.trainer.estimators.w_reinforce:WReinforce",
        "unlikeliness": "rollmesh.trainer.estimators.unlikeliness:Unlikeliness",
        "rloo": "rollmesh.trainer.estimators.rloo:Rloo",
        "opo": "rollmesh.trainer.estimators.opo:Opo",
        "gpg": "rollmesh.trainer.estimators.gpg:Gpg",
        "reinforce_plus_plus": "rollmesh.trainer.estimators.reinforce_plus_plus:ReinforcePlusPlus",
        "overlong": "rollmesh.trainer.estimators.overlong:Overlong",
        "gated_length": "rollmesh.trainer.estimators.gated_length:GatedLength",
        "adaptive_kl": "rollmesh.trainer.estimators.adaptive_kl:AdaptiveKl",
        "kl_reward": "rollmesh.trainer.estimators.kl_reward:KlReward",
        "stable_reinforce": "rollmesh.trainer.estimators.stable_reinforce:StableReinforce",
        "campo": "rollmesh.trainer.estimators.campo:Campo",
        "verl_rank": "rollmesh.trainer.estimators.verl_rank:VerlRank",
        "rep_exp": "rollmesh.trainer.estimators.rep_exp:RepExp",
        "g_ra": "rollmesh.trainer.estimators.g_ra:GRa",
        "grpo_lambda": "rollmesh.trainer.estimators.grpo_lambda:GrpoLambda",
        "roc": "rollmesh.trainer.estimators.roc:Roc",
        "pf_ppo": "rollmesh.trainer.estimators.pf_ppo:PfPpo",
        "d3s": "rollmesh.trainer.estimators.d3s:D3s",
        "parrot": "rollmesh.trainer.estimators.parrot:Parrot",
        "spa": "rollmesh.trainer.estimators.spa:Spa",
        "tree": "rollmesh.trainer.estimators.tree:TreeAdvantage",
        "roles": "rollmesh.trainer.estimators.roles:Roles",
        "implicit_reward": "rollmesh.trainer.estimators.implicit_reward:ImplicitReward",
        "first_turn_baseline": "rollmesh.trainer.estimators.first_turn_baseline:FirstTurnBaseline",
        "ui_s1": "rollmesh.trainer.estimators.ui_s1:UiS1",
        "recap": "rollmesh.trainer.estimators.recap:Recap",
        "none": "rollmesh.trainer.estimators.no_advantage:NoAdvantage",
    },
    Estimator,
)


def make_estimator(
    chosen: Extension | str, weights: Mapping[str, float] | None = None, base_dir: str | Path | None = None
) -> Estimator:
    """Construct an estimator. A user's file is relative to `base_dir`. Raises ConfigError."""
    made = ESTIMATORS.make(chosen, base_dir, weights=dict(weights or {}))
    return cast(Estimator, made)


def has_failure(member: MemberOutcome) -> bool:
    """Return whether a reward of a member, of its sample or of a turn, is a failure of the infrastructure or not
    finite."""
    return any(
        r.outcome is Outcome.INFRA_FAILURE or (r.outcome is Outcome.OK and not isfinite(r.value))
        for r in member.rewards
    )


def is_scored(member: MemberOutcome) -> bool:
    """Return whether a member has a reward, of its sample or of a turn, and no failure among them."""
    return any(r.outcome is Outcome.OK for r in member.rewards) and not has_failure(member)


def usable_rewards(member: MemberOutcome) -> dict[str, float] | None:
    """Return name -> value of a member's whole-sample rewards. None if the infrastructure failed, or if nothing was
    scored.

    A value that is not finite counts as a failure of the scorer.
    """
    whole = [r for r in member.rewards if r.segment == WHOLE_SAMPLE]
    if any(r.outcome is Outcome.INFRA_FAILURE or (r.outcome is Outcome.OK and not isfinite(r.value)) for r in whole):
        return None
    return {r.name: r.value for r in whole if r.outcome is Outcome.OK} or None


def weight_of(reward: str, weights: Mapping[str, float]) -> float:
    """Return the weight of a reward: 0 for one that `weights` does not name, and 1 for all if it is empty."""
    return weights.get(reward, 0.0) if weights else 1.0


def reward_sums(group: GroupContext, weights: Mapping[str, float]) -> tuple[list[MemberOutcome], NDArray[np.float64]]:
    """Return the members with usable rewards, and the weighted sum of the rewards of each.

    A reward that a member does not have is replaced by the mean over the episodes of the group that have it, so that
    the mean does not change, and the distance of the member from the mean is 0; see `deviation_of_sums`.
    """
    usable = [(m, r) for m in group.members if (r := usable_rewards(m)) is not None]
    sums = np.zeros(len(usable))
    for name in dict.fromkeys(name for _, rewards in usable for name in rewards):
        having = [(m, r[name]) for m, r in usable if name in r]
        mean = 0.0
        if len(having) < len(usable):
            mean = float(episode_weights([m for m, _ in having]) @ np.array([value for _, value in having]))
        sums += weight_of(name, weights) * np.array([r.get(name, mean) for _, r in usable])
    return [m for m, _ in usable], sums


def filled(group: GroupContext, among: Collection[str] = (), *, turns_suffice: bool = False) -> GroupContext:
    """Return the group with every whole-sample reward for each scored member, for estimators that do not read
    `reward_sums`.

    A reward that a member does not have gets its mean over the episodes that have it: those of the sample ids `among`,
    or all if none of them has it. A member without usable rewards is in no mean, and stays as it is. With
    `turns_suffice`, for estimators that read rewards of turns, one with those alone is scored, and one with a failure
    among them is not.
    """
    scored = {
        m.sample_id: {r.name: r.value for r in m.rewards if r.segment == WHOLE_SAMPLE and r.outcome is Outcome.OK}
        for m in group.members
        if (is_scored(m) if turns_suffice else usable_rewards(m) is not None)
    }
    names = dict.fromkeys(name for rewards in scored.values() for name in rewards)
    if all(len(rewards) == len(names) for rewards in scored.values()):
        return group
    means = {}
    for name in names:
        having = [m for m in group.members if name in scored.get(m.sample_id, ())]
        having = [m for m in having if m.sample_id in among] or having
        means[name] = float(episode_weights(having) @ np.array([scored[m.sample_id][name] for m in having]))
    members = []
    for member in group.members:
        lacks = [name for name in names if name not in scored.get(member.sample_id, names)]
        added = tuple(Reward(name=name, value=means[name]) for name in lacks)
        members.append(with_rewards(member, rewards=(*member.rewards, *added)) if added else member)
    return with_rewards(group, members=tuple(members))


def without_reward(group: GroupContext, name: str) -> GroupContext:
    """Return the group without one reward of its members, except where it is not OK."""
    members = (
        with_rewards(m, rewards=tuple(r for r in m.rewards if r.name != name or r.outcome is not Outcome.OK))
        for m in group.members
    )
    return with_rewards(group, members=tuple(members))


def undecided(group: GroupContext) -> dict[str, float]:
    """Return `UNDECIDED` for each member with usable rewards: the result of `of_group` of an estimator that needs the
    whole batch."""
    return {m.sample_id: UNDECIDED for m in group.members if usable_rewards(m) is not None}


def turn_rewards(member: MemberOutcome, weights: Mapping[str, float]) -> NDArray[np.float64]:
    """Return [T]: the weighted sum of the rewards of each turn of a member, without those of the whole sample.

    Rewards that are not OK count 0; `usable_rewards` says whether a member is usable at all. A reward belongs to the
    turn of `SampleSummary.turn_of`.
    """
    sums = np.zeros(len(member.summary.turns))
    for reward in member.rewards:
        if reward.segment == WHOLE_SAMPLE or reward.outcome is not Outcome.OK or not isfinite(reward.value):
            continue
        if (turn := member.summary.turn_of(reward.segment)) is not None:
            sums[turn] += weight_of(reward.name, weights) * reward.value
    return sums


def adjusted_sums(
    batch: UpdateBatch, weights: Mapping[str, float], added: NDArray[np.float64]
) -> list[tuple[list[MemberOutcome], NDArray[np.float64]]]:
    """Return the members with usable rewards of each group, and their reward sums plus `added` [S] of the samples of
    the batch. A member that is not leased gets the mean of those of its group, or 0 if none is leased."""
    of_sample = {s.sample.sample_id: value for s, value in zip(batch.samples, added.tolist(), strict=True)}
    found = []
    for group in batch.groups:
        members, sums = reward_sums(group, weights)
        own = [of_sample[m.sample_id] for m in members if m.sample_id in of_sample]
        mean = float(np.mean(own)) if own else 0.0
        found.append((members, sums + np.array([of_sample.get(m.sample_id, mean) for m in members])))
    return found


def segment_rewards(sample: TrainingSample, weights: Mapping[str, float]) -> NDArray[np.float64]:
    """Return [n]: the weighted sum of the rewards of each segment on the path of a sample. Rewards that are not OK
    count 0."""
    sums = np.zeros(len(sample.segments))
    places = {index: n for n, index in enumerate(sample.indices or range(len(sample.segments)))}
    for reward in sample.sample.rewards:
        if reward.outcome is Outcome.OK and isfinite(reward.value) and reward.segment in places:
            sums[places[reward.segment]] += weight_of(reward.name, weights) * reward.value
    return sums


def episode_weights(members: Sequence[MemberOutcome]) -> NDArray[np.float64]:
    """Return weights [n] of members in a mean, with sum 1. Every episode counts once, shared by its samples."""
    episodes = [m.episode or m.sample_id for m in members]
    sizes = Counter(episodes)
    weights = np.array([1.0 / sizes[e] for e in episodes], dtype=np.float64)
    return weights / len(sizes) if sizes else weights


def centered(values: NDArray[np.float64], weights: NDArray[np.float64], epsilon: float | None) -> NDArray[np.float64]:
    """Return values [n] minus their weighted mean, divided by their weighted standard deviation plus `epsilon` if it is
    given."""
    from_first = values - values[:1]  # equal values become exactly 0, whatever their size
    centered = from_first - weights @ from_first
    return centered if epsilon is None else centered / (np.sqrt(weights @ np.square(centered)) + epsilon)


def deviation(values: NDArray[np.float64], weights: NDArray[np.float64]) -> float:
    """Return the weighted standard deviation of values [n]; 0 for none."""
    return float(np.sqrt(weights @ np.square(centered(values, weights, None)))) if len(values) else 0.0


def deviation_of_sums(
    members: Sequence[MemberOutcome],
    sums: NDArray[np.float64],
    weights: NDArray[np.float64],
    of_rewards: Mapping[str, float],
) -> float:
    """Return the standard deviation of reward sums [n], given the `weights` [n] of the members and `of_rewards` of the
    rewards.

    The variance of a reward that some members do not have is that of the members that have it. Its covariance with
    another reward counts the others as 0.
    """
    rewards = [usable_rewards(member) or {} for member in members]
    added = 0.0
    for name in dict.fromkeys(name for of_member in rewards for name in of_member):
        having = np.array([name in of_member for of_member in rewards])
        share = float(weights[having].sum())
        if not having.all() and share > 0:
            values = np.array([of_member[name] for of_member in rewards if name in of_member])
            of_having = deviation(values, weights[having] / share)
            added += (1 - share) * (weight_of(name, of_rewards) * of_having) ** 2
    found = deviation(sums, weights)
    return found if added == 0 else float(np.sqrt(found**2 + added))


def episode_means(members: Sequence[MemberOutcome], values: NDArray[np.float64]) -> dict[str, float]:
    """Return episode -> mean of the values [n] of its members, in the order of the members."""
    found: dict[str, list[float]] = {}
    for member, value in zip(members, values.tolist(), strict=True):
        found.setdefault(member.episode or member.sample_id, []).append(value)
    return {episode: float(np.mean(mine)) for episode, mine in found.items()}


def spread(batch: UpdateBatch, scalars: Mapping[str, float]) -> Estimate:
    """Give every token of a sample the scalar of the sample. `scalars`: sample id -> advantage. A sample without one is
    dropped."""
    values = [scalars.get(sample.sample.sample_id) for sample in batch.samples]
    per_sample = np.array([0.0 if value is None else value for value in values], dtype=np.float32)
    dropped = {number: UNSCORED for number, value in enumerate(values) if value is None}
    return Estimate(advantages=batch.per_token(per_sample), dropped=dropped)
