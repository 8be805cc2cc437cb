"""Load-balancing loss of the routers of a mixture-of-experts model.

    loss = E * sum over experts e of f_e P_e

f_e is the mean number of choices of expert e, per token and router, and P_e is its mean router probability (Fedus et
al., arXiv:2101.03961, equations 4 to 6, in the form of transformers' `load_balancing_loss_func`). Only P_e has a
gradient. The means are over the tokens of the term in the optimizer step: the positions from which trained tokens are
predicted, each with equal weight, whatever the normalization of the other terms. transformers takes them over one
forward, so that its value depends on the split into micro-batches. Means over a whole step leave experts free to
specialize by text (Qiu et al., arXiv:2501.11873), and need f_e in advance, which costs one more forward per optimizer
step.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from rollmesh.trainer.features import FeatureRequest
from rollmesh.trainer.losses.base import LossInputs, LossTerm, TokenStats
from rollmesh.trainer.router_features import RouterLoads, RouterProbabilities


class RouterBalance(LossTerm):
    """The term. It has no options; its weight is the coefficient, `router_aux_loss_coef` in the configuration of a
    model."""

    needs = ()
    needs_behavior = False
    features = {
        "router_loads": FeatureRequest(RouterLoads(), "step"),
        "router_probabilities": FeatureRequest(RouterProbabilities(), "current", grad=True),
    }

    def prepare(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return E f_e / M [M, E], the factors of the probabilities of a token, and the share of the busiest expert."""
        loads = columns["router_loads"]
        mean = loads.mean(0)
        busiest = mean.max() / mean.sum()
        return {
            "router/factors": (loads.shape[1] / len(loads) * mean).expand_as(loads),
            "router/busiest": busiest.expand(len(loads)),
        }

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, TokenStats]:
        """Return the scalar loss, and the statistic `busiest`, which is 1 / E for even loads."""
        loss = (inputs["router/factors"] * inputs["router_probabilities"]).sum()
        return loss, {"busiest": inputs["router/busiest"]}
