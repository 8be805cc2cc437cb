"""Advantage by a risk measure of bundles of questions (RiskPO, arXiv:2510.00911; code: RTkenny/RiskPO).

A bundle has B groups; the k-th episodes of its groups are one outcome s, the sum of their rewards. With the quantiles
q_lo and q_hi of outcomes at the levels a and b:

    A_RVaR = ((s - q_lo)+ - (s - q_hi)+ [+ q_lo - q_hi]) / (b - a)     range value at risk: outcomes between the quantiles
    A_CVaR = -(q_lo - s)+ / a                                          conditional value at risk: outcomes below q_lo
    A      = (w A_CVaR + A_RVaR) / (w + 1) [/ std of the outcomes of the bundle]
    A_i    = A c_i                                                     for the episode i of the bundle

The parts in brackets are the options `shift` (the paper's `natural baseline`) and `scale_by_std`. The option `credit`
shares A between the episodes of an outcome: `uniform` c_i = 1; `score` 0.5 for a reward above 0, else 1.5; `std` 1 / the
standard deviation of the rewards of its group; `sum_mean` (R_i - m_i) / sum over the outcome of (R_j - m_j), with m the
mean of the group, and 1 / B if that sum is 0. The defaults are those of the published script
`run_qwen2.5_1.5b_MVaR_dapomath.sh`: no shift, sum_mean, divided by the deviation. Its script for MATH has the shift,
`std`, and the levels 0.2 and 0.9. With `sum_mean` an episode can have a larger advantage than its outcome, and one of
the other sign, where the rewards of an outcome are on both sides of their means.

Quantiles are tracked over updates, q <- q + lr (level - share of outcomes below q), and checkpointed. They begin at the
quantiles of the first batch. With the shift A is 0 for s >= q_hi, negative below, and steeper below q_lo. A group whose
rewards agree is informative in its bundle, so the recipe keeps all groups.

Deviations: bundles are formed from groups in the order of the batch, and quantiles of a batch are over all of its
outcomes, not over those of one bundle. The last bundle may have fewer groups; its sums are scaled to B. Episodes
without a partner in every group of the bundle are not trained. A bundle whose outcomes all agree is not divided by its
standard deviation, and standard deviations are those of the population.
"""  # noqa: E501, W505

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from rollmesh.shared.config.settings import NonNegativeFloat, PositiveInt, Settings
from rollmesh.shared.domain.trajectory import GroupContext
from rollmesh.trainer.estimators.base import (
    UNSCORED,
    Estimate,
    GroupEstimator,
    episode_means,
    undecided,
    usable_rewards,
)

if TYPE_CHECKING:
    from rollmesh.trainer.batch import UpdateBatch

UNBUNDLED = "UNBUNDLED"
"""Reason of a sample whose episode has no partner in another group of its bundle."""
AGREE = 1e-6
"""Standard deviation up to which the outcomes of a bundle agree, and sum of deviations that counts as 0."""

LEAST_STD = 1e-3
"""Standard deviation of the rewards of a group up to which the credit `std` does not divide."""

_Level = Annotated[float, Meta(gt=0, lt=1)]
Quantiles = tuple[float, float]


class RiskPoOptions(Settings):
    """Settings of the estimator `risk_po`."""

    bundle_groups: PositiveInt = 5
    """Groups per bundle (B). `run.batch_groups` should be a multiple."""
    low: _Level = 0.2
    """Level of the lower quantile (a)."""
    high: _Level = 0.8
    """Level of the upper quantile (b)."""
    tail_weight: NonNegativeFloat = 1.5
    """Weight of the outcomes below the lower quantile (w). 0 is the range value at risk alone."""
    quantiles: Literal["tracked", "batch", "mixed"] = "tracked"
    """Quantiles over all updates, those of the batch, or the mean of both."""
    quantile_lr: Annotated[float, Meta(gt=0, le=1)] = 0.1
    """Step size of the tracked quantiles, in units of the rewards."""
    shift: bool = False
    """Add q_lo - q_hi to the range value at risk, so that no advantage is above 0."""
    credit: Literal["uniform", "score", "std", "sum_mean"] = "sum_mean"
    """Share of the advantage of an outcome that each of its episodes gets."""
    scale_by_std: bool = True
    """Divide by the standard deviation of the outcomes of the bundle."""

    def check_fields(self) -> None:
        if self.low >= self.high:
            raise ValueError(f"`low` must be < high = {self.high}, got {self.low}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """G groups with usable rewards, of which each has at least K episodes."""

    episodes: list[list[str]]
    """[G][K]."""
    rewards: NDArray[np.float64]
    """[G, K]."""
    means: NDArray[np.float64]
    """[G] over all episodes of the group, as the next one."""
    deviations: NDArray[np.float64]
    """[G]."""
    factor: float
    """By which outcomes of a bundle with fewer groups are multiplied."""

    @property
    def outcomes(self) -> NDArray[np.float64]:
        """[K]."""
        sums: NDArray[np.float64] = self.rewards.sum(axis=0) * self.factor
        return sums

    def credit(self, how: str) -> NDArray[np.float64]:
        """Return [G, K]: the factor of the advantage of the outcome for each of its episodes."""
        rewards = self.rewards
        if how == "score":
            return np.where(rewards > 0, 0.5, 1.5)
        if how == "std":
            deviations = np.where(self.deviations > LEAST_STD, self.deviations, 1.0)
            return np.ones_like(rewards) / deviations[:, None]
        if how == "sum_mean":
            above = rewards - self.means[:, None]
            sums = above.sum(axis=0)
            agree = np.abs(sums) <= AGREE
            return np.where(agree, 1.0 / max(1, len(rewards)), above / np.where(agree, 1.0, sums))
        return np.ones_like(rewards)


class RiskPo(GroupEstimator):
    """Mixed value at risk of bundles, with tracked quantiles as memory."""

    Options: ClassVar[type[Settings]] = RiskPoOptions
    needs_behavior = False

    def __init__(self, *, weights: Mapping[str, float], options: RiskPoOptions) -> None:
        super().__init__(weights=weights, options=options)
        self._tracked: Quantiles | None = None
        self._used: Quantiles = (0.0, 0.0)
        """Quantiles of the last batch, for further estimates of it."""

    def __call__(self, batch: UpdateBatch) -> Estimate:
        bundles = [self._outcomes(part) for part in _parts(batch.groups, self.options.bundle_groups)]
        every = np.concatenate([np.empty(0), *(bundle.outcomes for bundle in bundles)])
        if batch.repeat == 0 and len(every):
            self._used = self._advance(every)
        advantages: dict[str, float] = {}
        for bundle in bundles:
            values = risk_advantages(bundle.outcomes, self._used, self.options)
            std = float(bundle.outcomes.std()) if len(values) else 0.0
            if self.options.scale_by_std and std > AGREE:
                values = values / std
            for row, episodes in zip(values * bundle.credit(self.options.credit), bundle.episodes, strict=True):
                advantages |= dict(zip(episodes, row.tolist(), strict=True))
        return self._estimate(batch, advantages, every)

    def of_group(self, group: GroupContext) -> dict[str, float]:
        """Return `UNDECIDED` for each member with usable rewards, because its bundle decides."""
        return undecided(group)

    def state(self) -> dict[str, Any]:
        return {"tracked": self._tracked}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._tracked = None if state["tracked"] is None else tuple(state["tracked"])

    def _outcomes(self, groups: tuple[GroupContext, ...]) -> Bundle:
        """Return the bundle of the groups. A group without usable rewards is not part of it."""
        scored = [episode_means(*self.reward_sums(group)) for group in groups]
        scored = [values for values in scored if values]
        num = min((len(values) for values in scored), default=0)
        every = [np.array(list(values.values())) for values in scored]
        return Bundle(
            episodes=[list(values)[:num] for values in scored],
            rewards=np.array([values[:num] for values in every]).reshape(len(scored), num),
            means=np.array([values.mean() for values in every]),
            deviations=np.array([values.std() for values in every]),
            factor=self.options.bundle_groups / len(scored) if scored else 1.0,
        )

    def _advance(self, outcomes: NDArray[np.float64]) -> Quantiles:
        """Return the quantiles for this batch, and move the tracked ones towards it."""
        options: RiskPoOptions = self.options
        levels = np.array([options.low, options.high])
        of_batch = np.quantile(outcomes, levels)
        tracked = of_batch if self._tracked is None else np.array(self._tracked)
        used = {"tracked": tracked, "batch": of_batch, "mixed": (tracked + of_batch) / 2}[options.quantiles]
        below = np.array([(outcomes < q).mean() for q in tracked])
        low, high = (tracked + options.quantile_lr * (levels - below)).tolist()
        self._tracked = (low, high)
        return float(used[0]), float(used[1])

    def _estimate(self, batch: UpdateBatch, advantages: Mapping[str, float], outcomes: NDArray[np.float64]) -> Estimate:
        usable = {m.sample_id for g in batch.groups for m in g.members if usable_rewards(m) is not None}
        values = np.zeros(len(batch.samples), np.float32)
        dropped: dict[int, str] = {}
        for number, sample in enumerate(batch.samples):
            episode = sample.episode or sample.sample.sample_id
            if sample.sample.sample_id not in usable:
                dropped[number] = UNSCORED
            elif episode not in advantages:
                dropped[number] = UNBUNDLED
            else:
                values[number] = advantages[episode]
        low, high = self._used
        outcome = float(outcomes.mean()) if len(outcomes) else 0.0
        metrics = {"quantile_low": low, "quantile_high": high, "outcome_mean": outcome}
        return Estimate(advantages=batch.per_token(values), dropped=dropped, metrics=metrics)


def risk_advantages(outcomes: NDArray[np.float64], quantiles: Quantiles, options: RiskPoOptions) -> NDArray[np.float64]:
    """Return the advantage of each outcome [K]."""
    low, high = quantiles
    in_range = np.maximum(outcomes - low, 0) - np.maximum(outcomes - high, 0) + options.shift * (low - high)
    tail = -np.maximum(low - outcomes, 0) / options.low
    combined: NDArray[np.float64] = options.tail_weight * tail + in_range / (options.high - options.low)
    return combined / (options.tail_weight + 1)


def _parts(groups: tuple[GroupContext, ...], size: int) -> list[tuple[GroupContext, ...]]:
    return [groups[i : i + size] for i in range(0, len(groups), size)]
