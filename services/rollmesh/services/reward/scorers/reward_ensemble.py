"""Ensembles of reward models against over-optimization (Coste et al., 2023-10, arXiv:2310.02743).

    mean           R = mean_i r_i
    worst          R = min_i r_i
    uncertainty    R = mean_i r_i - penalty * var_i r_i       the variance is that of the population

r_i in [0, 1] is the number that endpoint i returns for the sample; any other answer is an infra failure. Each r_i is
also a reward, `member_0`, `member_1` and so on, without a weight in the recipe. Where members disagree, the policy has
probably found an error of some of them, and earns less.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pvariance
from typing import ClassVar, Literal

import msgspec

from rollmesh.services.reward.item import ScoreItem
from rollmesh.services.reward.scorer import Scorer
from rollmesh.services.reward.scorers.judging import all_of, client_of, framed, is_score
from rollmesh.shared.config.settings import NonNegativeFloat, Settings
from rollmesh.shared.domain.trajectory import Reward
from rollmesh.shared.endpoints.answer import Asks

QUESTION = """\
Rate the answer from 0 to 1. Return the number only.
{data}"""
MEMBERS_MAX = 8


class RewardEnsembleOptions(Settings):
    """Settings of the scorer `reward_ensemble`."""

    endpoints: tuple[str, ...] = ("rater_0", "rater_1", "rater_2")
    """Names of the members in the table `endpoints`."""
    combine: Literal["mean", "worst", "uncertainty"] = "uncertainty"
    """The formula."""
    penalty: NonNegativeFloat = 0.5
    """Weight of the variance, with `uncertainty`."""

    def check_fields(self) -> None:
        if not 2 <= len(self.endpoints) <= MEMBERS_MAX:
            raise ValueError(f"`endpoints` must have 2 to {MEMBERS_MAX} names, got {len(self.endpoints)}")


def _combined(scores: Sequence[float], how: str, penalty: float) -> float:
    """Return the reward for the scores of the members, [k]."""
    if how == "worst":
        return min(scores)
    return fmean(scores) - (penalty * pvariance(scores) if how == "uncertainty" else 0.0)


class RewardEnsembleScorer(Scorer):
    """See the module."""

    Options: ClassVar[type[msgspec.Struct]] = RewardEnsembleOptions
    version = "1"
    rewards = diagnostics = tuple(f"member_{number}" for number in range(MEMBERS_MAX))

    def __init__(self, *, options: RewardEnsembleOptions) -> None:
        self._options = options
        self._endpoints: Asks | None = None

    def use_endpoints(self, endpoints: Asks) -> None:
        self._endpoints = endpoints

    async def score(self, item: ScoreItem) -> Sequence[Reward]:
        options = self._options
        endpoints = client_of(self._endpoints, "reward_ensemble", *options.endpoints)
        question = QUESTION.format(data=framed(task=item.task.messages[-1].content, answer=item.whole_response()))

        async def rate(name: str) -> float:
            said = await endpoints.ask(name, question, json=True)
            if not is_score(said.value):
                raise ValueError(f"`{name}` must return a number in [0, 1], got {str(said.value)[:100]!r}")
            return float(said.value)

        scores = await all_of(map(rate, options.endpoints))
        value = _combined(scores, options.combine, options.penalty)
        members = [Reward(name=f"member_{number}", value=score) for number, score in enumerate(scores)]
        return [Reward(name="", value=value, evidence=f"{options.combine} of {scores}"), *members]
