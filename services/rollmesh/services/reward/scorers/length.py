"""A reward for being brief, from the number of sampled tokens n.

`budget`: 1 if n <= budget, else 0. `linear`: -n / scale. A linear reward has no lower bound: with a weight that rivals
correctness it is hacked by skipping the work (seen on the demo within 30 updates at weight 0.5), so keep its weight small or
use the budget.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from rollmesh.services.reward.item import ScoreItem
from rollmesh.shared.settings import PositiveFloat, PositiveInt, Settings
from rollmesh.shared.trajectory import Reward


class LengthOptions(Settings):
    """Settings of the length scorer."""

    form: Literal["budget", "linear"] = "budget"
    """Which formula."""
    budget_tokens: PositiveInt = 256
    """Most tokens that earn the reward, for `budget`."""
    scale_tokens: PositiveFloat = 256.0
    """Tokens that cost one point, for `linear`."""


class LengthScorer:
    """See the module."""

    Options: ClassVar[type[msgspec.Struct]] = LengthOptions
    version: ClassVar[str] = "1"

    def __init__(self, *, options: LengthOptions) -> None:
        self._options = options

    async def score(self, item: ScoreItem) -> Reward:
        num_tokens = item.num_action_tokens
        if self._options.form == "budget":
            value = float(num_tokens <= self._options.budget_tokens)
        else:
            value = -num_tokens / self._options.scale_tokens
        return Reward(name="", value=value, evidence=f"{num_tokens} tokens")
