"""The critic of the estimator `riql`: heads Q(s, a) and one head V(s) of implicit Q-learning.

`estimators/riql.py` states the formula. The buffer, the draws and the optimizer are those of `turn_critic.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollmesh.trainer.regression import regression_loss
from rollmesh.trainer.turn_critic import CriticPair, TrainingPlan, Turns, weighted_mean

EPSILON = 1e-3
"""What the standard deviation of a state is increased by before it divides, as in the code of RIQL."""


class ImplicitPair(CriticPair):
    """`num_q` heads of Q, one of V, and the statistics of states with which both are normalized. The target of V is not
    used."""

    def __init__(self, size: int, num_q: int, *, quantile: float, expectile: float, normalize: bool) -> None:
        super().__init__(size, num_q, 1)
        self._quantile, self._expectile, self._normalize = quantile, expectile, normalize
        for name in ("state", "action"):
            self.register_buffer(f"{name}_mean", torch.zeros(size))
            self.register_buffer(f"{name}_scale", torch.ones(size))

    @torch.no_grad()
    def observe(self, turns: Turns) -> None:
        """Store the mean and the standard deviation of each dimension of s, and of (s, a), over the buffer."""
        if not self._normalize:
            return
        for name in ("state", "action"):
            scale, mean = torch.std_mean(turns[name], dim=0, correction=0)
            self.get_buffer(f"{name}_mean").copy_(mean)
            self.get_buffer(f"{name}_scale").copy_(scale + EPSILON)

    def estimates(self, states: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Return [n] the quantile of Q'(s, a), and [n] V(s)."""
        state = self._normalized("state", states)
        return self._low_q(state, self._normalized("action", actions)), self.critic.v(state).squeeze(-1)

    def loss(self, turns: Turns, plan: TrainingPlan) -> Tensor:
        """Return the loss of the heads on drawn turns. The targets of Q are of V before the step."""
        state, after = self._normalized("state", turns["state"]), self._normalized("state", turns["next"])
        action = self._normalized("action", turns["action"])
        with torch.no_grad():
            next_v = self.critic.v(after).squeeze(-1) * (1 - turns["done"])
            of_action = turns["reward"] + plan.discount * next_v
            of_state = self._low_q(state, action)
        with torch.enable_grad():
            of_q = regression_loss(self.critic.q(state, action) - of_action[:, None], plan.huber).mean(-1)
            below = of_state - self.critic.v(state).squeeze(-1)
            of_v = torch.where(below < 0, 1 - self._expectile, self._expectile) * below.square()
            return weighted_mean(of_q, turns["q"]) + weighted_mean(of_v, turns["v"])

    def _low_q(self, state: Tensor, action: Tensor) -> Tensor:
        """Return [n] the quantile of Q' over the heads, interpolated between two heads."""
        return self.target.q(state, action).quantile(self._quantile, dim=-1)

    def _normalized(self, name: str, values: Tensor) -> Tensor:
        return (values - self.get_buffer(f"{name}_mean")) / self.get_buffer(f"{name}_scale")
