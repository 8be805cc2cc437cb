"""A reward for being brief, from the number of sampled tokens n.

`budget`: 1 if n <= budget, else 0. `linear`: -n / scale. A linear reward has no lower bound: with a weight that rivals
correctness it is hacked by skipping the work (seen on the demo within 30 updates at weight 0.5), so keep its weight small or
use the budget.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import msgspec

from rollmesh.services.reward.item import ScoreItem
from rollmesh.shared.trajectory import Reward


class LengthOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the length scorer."""

    form: Literal["budget", "linear"] = "budget"
    """Which formula."""
    budget_tokens: int = 256
    """Most tokens that earn the reward, for `budget`."""
    scale_tokens: float = 256.0
    """Tokens that cost one point, for `linear`."""

    def __post_init__(self) -> None:
        if self.budget_tokens < 1:
            raise ValueError(f"budget_tokens must be >= 1, got {self.budget_tokens}")
        if not (math.isfinite(self.scale_tokens) and self.scale_tokens > 0):
            raise ValueError(f"scale_tokens must be finite and > 0, got {self.scale_tokens}")


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
