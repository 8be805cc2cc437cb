"""Weights of whole turns from a critic that withstands wrong rewards and outliers, for weighted imitation.

Robust Implicit Q-Learning (RIQL, Yang et al. 2023, arXiv:2310.12955; code: YangRui2015/RIQL). A turn is one action a in
the state s, as in `archer`. With K heads Q_k and their slowly following targets Q'_k, one head V, r the reward after
the turn and s' the state before the next turn:

    Q'(s, a) = the quantile `quantile` of Q'_1 .. Q'_K (s, a), interpolated between two heads
    loss     = mean over k of h(Q_k(s, a) - r - discount V(s'))  +  |expectile - 1(u < 0)| u^2,  u = Q'(s, a) - V(s)      V(s') = 0 after the last turn
    weight   = min(exp(beta (Q'(s, a) - V(s))), weight_max), times -log pi of the tokens of the turn

h is the Huber loss of `regression.py`: a wrong reward pulls Q by a bounded gradient. A quantile above the minimum costs
an action less on which the heads disagree, as they do where data are corrupted. The expectile lets V follow the better
actions. V and the policy read only actions that were sampled. s and (s, a) are divided by their standard deviations:
dimensions of hidden states have unequal scales, and an outlier of one would otherwise outweigh the others.

The buffer, the steps, the states, the warm-up and new actions are those of `archer.py`, whose options it has. As there,
weights come from the critic before it has seen the batch.

Deviations: RIQL learns continuous control from a fixed data set, here the buffer has the turns of recent policies, and
the statistics of states are those of the buffer at the update. The code normalizes s alone, because its actions are
bounded; (s, a) is a hidden state too. The code clips the targets of Q to [-100, 1000], and trains Q and V with separate
optimizers. Here one clip of the gradient's norm is over both. The code has h divided by 2 `huber`. The loss of the
policy is that of the recipe: a mean over tokens, where the paper has the log-prob of a whole action. The values of
`huber`, `quantile` and K are those of the code for corrupted rewards; it chooses them per environment.
"""  # noqa: E501, W505

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from rollmesh.shared.config.settings import NonNegativeFloat, PositiveFloat, Settings, Share
from rollmesh.trainer.estimators.archer import Archer, ArcherOptions

if TYPE_CHECKING:  # it imports torch
    from rollmesh.trainer.turn_critic import CriticPair


class RiqlOptions(ArcherOptions):
    """Settings of the estimator `riql`, beside those of `archer`."""

    huber: NonNegativeFloat = 1.0
    """Error beyond which the loss of Q is linear, in units of the reward (`regression.py`). 0: squared everywhere."""
    discount: Share = 0.99
    """Factor of the value of the next turn (gamma)."""
    tau: Annotated[float, Meta(gt=0, le=1)] = 0.005
    """Share of the heads of Q that their targets take over after every step."""
    center: bool = False
    """Subtract the mean advantage of the turns of the batch before the weights are computed."""
    heads: Annotated[int, Meta(ge=1, le=64)] = 5
    """Number of heads of Q (K)."""
    quantile: Share = 0.25
    """Quantile over the heads of Q. 0: their minimum."""
    expectile: Annotated[float, Meta(gt=0, lt=1)] = 0.7
    """Expectile of Q that V regresses to. 0.5: the mean."""
    normalize: bool = True
    """Normalize states by the mean and the standard deviation of each dimension over the buffer."""
    beta: NonNegativeFloat = 3.0
    """Inverse temperature of the weights, per unit of the reward."""
    weight_max: PositiveFloat = 100.0
    """Largest weight of a turn."""


class Riql(Archer):
    """See the module."""

    Options: ClassVar[type[Settings]] = RiqlOptions

    def make_pair(self, size: int) -> CriticPair:
        from rollmesh.trainer.implicit_critic import ImplicitPair

        options: RiqlOptions = self.options
        return ImplicitPair(
            size,
            options.heads,
            quantile=options.quantile,
            expectile=options.expectile,
            normalize=options.normalize,
        )

    def policy_weights(
        self, advantages: NDArray[np.float64], used: NDArray[np.bool_]
    ) -> tuple[NDArray[np.float64], dict[str, float]]:
        options: RiqlOptions = self.options
        exponent = np.minimum(options.beta * advantages, np.log(options.weight_max))
        weights = np.exp(exponent)
        own = weights[used]
        capped = exponent[used] == np.log(options.weight_max)
        return weights, {
            "weight_mean": float(own.mean()) if own.size else 0.0,
            "weight_capped_share": float(capped.mean()) if own.size else 0.0,
        }
