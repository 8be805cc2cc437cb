"""Reward brevity by the number n of sampled tokens.

`budget`: 1 if n <= budget, else 0. `linear`: -n / scale. A linear reward has no lower bound. If its weight is similar
to that of correctness, the policy learns to skip the work (on the demo within 30 updates at weight 0.5). Use a small
weight or the budget.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from rollmesh.services.reward.item import ScoreItem
from rollmesh.services.reward.scorer import Scorer
from rollmesh.shared.config.settings import PositiveFloat, PositiveInt, Settings
from rollmesh.shared.domain.trajectory import Reward


class LengthOptions(Settings):
    """Settings of the length scorer."""

    form: Literal["budget", "linear"] = "budget"
    """The formula."""
    budget_tokens: PositiveInt = 256
    """Maximum number of tokens for a reward of 1, with `budget`."""
    scale_tokens: PositiveFloat = 256.0
    """Number of tokens per point, with `linear`."""


class LengthScorer(Scorer):
    """See the module."""

    Options: ClassVar[type[msgspec.Struct]] = LengthOptions
    version = "1"

    def __init__(self, *, options: LengthOptions) -> None:
        self._options = options

    async def score(self, item: ScoreItem) -> Reward:
        num_tokens = item.num_action_tokens
        if self._options.form == "budget":
            value = float(num_tokens <= self._options.budget_tokens)
        else:
            value = -num_tokens / self._options.scale_tokens
        return Reward(name="", value=value, evidence=f"{num_tokens} tokens")
