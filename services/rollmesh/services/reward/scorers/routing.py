"""Reward a right answer, and a low price of the models that were asked for it (Router-R1, arXiv:2506.09033; code:
ulab-uiuc/Router-R1, `verl/utils/reward_score/qa_em.py`, `verl/trainer/main_ppo.py`).

    R = -1                                             if the format is wrong
        0                                              if the answer is wrong
        (1 - cost_weight) correct + cost_weight C      otherwise,    C = 1 - min(1, sqrt(price / price_max))

The levels are hierarchical: a malformed or wrong answer never earns the reward of a low price. Deviation: the authors
normalize the square root of the price by the 5 % and 95 % quantiles of the last 1,000 episodes; here the bound is fixed
(`price_max`), because a scorer keeps no state. `price` is in the currency of the table of endpoints, for all requests
of the agent in the episode.
"""

from __future__ import annotations

from math import sqrt
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from rollmesh.services.reward.item import ScoreItem
from rollmesh.services.reward.scorer import Scorer, not_applicable
from rollmesh.shared.config.settings import NonEmptyStr, PositiveFloat, Settings
from rollmesh.shared.domain.trajectory import Reward


class RoutingOptions(Settings):
    """Settings of the scorer `routing`."""

    correct: NonEmptyStr = "correct"
    """Name of the reward of the answer, in [0, 1]."""
    format: str = ""
    """Name of a reward that is below 1 for a wrong format. Empty: every format is right."""
    cost_weight: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """Weight of the reward of a low price."""
    price_max: PositiveFloat
    """Price of an episode from which the reward of a low price is 0, in the currency of the table of endpoints."""


class RoutingScorer(Scorer):
    """See the module."""

    Options: ClassVar[type[msgspec.Struct]] = RoutingOptions
    version = "1"

    def __init__(self, *, options: RoutingOptions) -> None:
        self._options = options
        self.reads = tuple(filter(None, (options.correct, options.format)))

    async def score(self, item: ScoreItem) -> Reward:
        options = self._options
        correct = item.reward(options.correct)
        well_formed = item.reward(options.format) if options.format else 1.0
        if correct is None or well_formed is None:
            return not_applicable("the reward of the answer or of its format is not applicable")
        price = sum(use.price for use in item.endpoints)
        evidence = f"price {price:g}"
        if well_formed < 1:
            return Reward(name="", value=-1.0, evidence=f"wrong format; {evidence}")
        if correct <= 0:
            return Reward(name="", value=0.0, evidence=f"wrong answer; {evidence}")
        cost = 1 - min(1.0, sqrt(price / options.price_max))
        value = (1 - options.cost_weight) * correct + options.cost_weight * cost
        return Reward(name="", value=value, evidence=evidence)
