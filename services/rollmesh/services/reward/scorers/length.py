"""Reward brevity by the number n of sampled tokens.

`budget`: 1 if n <= budget, else 0. `linear`: -n / scale. A linear reward has no lower bound. If its weight is similar
to that of correctness, the policy learns to skip the work (on the demo within 30 updates at weight 0.5). Use a small
weight or the budget.

`overlong` is the soft overlong punishment of DAPO (arXiv:2503.14476): 0 up to budget - buffer, then linear down to -1
at the budget, and -1 above it. Set the budget to the limit of a response, so that a response near the limit loses
reward before the limit cuts it. The estimator option `drop_truncated` omits those that the limit has cut.
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

    form: Literal["budget", "linear", "overlong"] = "budget"
    """The formula."""
    budget_tokens: PositiveInt = 256
    """Maximum number of tokens for a reward of 1, with `budget`; least number of tokens for a reward of -1, with
    `overlong`."""
    buffer_tokens: PositiveInt = 64
    """Number of tokens below the budget within which the reward falls from 0 to -1, with `overlong`."""
    scale_tokens: PositiveFloat = 256.0
    """Number of tokens per point, with `linear`."""

    def check_fields(self) -> None:
        if self.form == "overlong" and self.buffer_tokens > self.budget_tokens:
            raise ValueError(
                f"`buffer_tokens` must be <= budget_tokens = {self.budget_tokens}, got {self.buffer_tokens}"
            )


class LengthScorer(Scorer):
    """See the module."""

    Options: ClassVar[type[msgspec.Struct]] = LengthOptions
    version = "1"

    def __init__(self, *, options: LengthOptions) -> None:
        self._options = options

    async def score(self, item: ScoreItem) -> Reward:
        num_tokens, options = item.num_action_tokens, self._options
        if options.form == "budget":
            value = float(num_tokens <= options.budget_tokens)
        elif options.form == "linear":
            value = -num_tokens / options.scale_tokens
        else:
            over = num_tokens - (options.budget_tokens - options.buffer_tokens)
            value = 0.0 - min(max(over / options.buffer_tokens, 0.0), 1.0)
        return Reward(name="", value=value, evidence=f"{num_tokens} tokens")
