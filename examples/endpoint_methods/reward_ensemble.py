"""Ensembles of reward models against over-optimization (Coste et al., 2023-10, arXiv:2310.02743).

    mean           R = mean_i r_i
    worst          R = min_i r_i
    uncertainty    R = mean_i r_i - penalty * var_i r_i       the variance is that of the population

r_i is the number that endpoint i returns for the sample. Each r_i is also a reward, `member_0`, `member_1` and so on,
without a weight in the recipe. Where members disagree, the policy has probably found an error of some of them, and
earns less.
"""

import asyncio
from statistics import fmean, pvariance
from typing import Literal

from rollmesh.services.reward.scorer import Scorer
from rollmesh.shared.config.settings import NonNegativeFloat, Settings
from rollmesh.shared.domain.trajectory import Reward

QUESTION = """\
Rate the answer from 0 to 1. Return the number only.

[Task]
{task}

[Answer]
{answer}"""
MEMBERS_MAX = 8


class RewardEnsembleOptions(Settings):
    endpoints: tuple[str, ...] = ("rater_0", "rater_1", "rater_2")
    combine: Literal["mean", "worst", "uncertainty"] = "uncertainty"
    penalty: NonNegativeFloat = 0.5

    def check_fields(self):
        if not 2 <= len(self.endpoints) <= MEMBERS_MAX:
            raise ValueError(f"`endpoints` must have 2 to {MEMBERS_MAX} names, got {len(self.endpoints)}")


def combined(scores, how, penalty):
    """Return the reward for the scores of the members, [k]."""
    if how == "worst":
        return min(scores)
    return fmean(scores) - (penalty * pvariance(scores) if how == "uncertainty" else 0.0)


class RewardEnsemble(Scorer):
    Options = RewardEnsembleOptions
    rewards = tuple(f"member_{number}" for number in range(MEMBERS_MAX))

    def __init__(self, *, options):
        self.options = options

    def use_endpoints(self, endpoints):
        self.endpoints = endpoints

    async def score(self, item):
        question = QUESTION.format(task=item.task.messages[-1].content, answer=item.response())
        asking = [self.endpoints.ask(name, question, json=True) for name in self.options.endpoints]
        scores = [float(answer.value) for answer in await asyncio.gather(*asking)]
        value = combined(scores, self.options.combine, self.options.penalty)
        members = [Reward(name=f"member_{number}", value=score) for number, score in enumerate(scores)]
        return [Reward(name="", value=value, evidence=f"{self.options.combine} of {scores}"), *members]
