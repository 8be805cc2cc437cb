"""Features of the routers of a mixture-of-experts model, which the load-balancing loss reads."""

from __future__ import annotations

from torch import Tensor

from rollmesh.trainer.features import Feature, FeatureInputs
from rollmesh.trainer.router import RouterLogits


class RouterProbabilities(Feature):
    """Mean probability of each expert over the routers, [m, E], see `RouterLogits.probabilities`."""

    reads_router = True

    def __call__(self, inputs: FeatureInputs) -> Tensor:
        return _router_of(inputs).probabilities()


class RouterLoads(Feature):
    """Mean number of choices of each expert over the routers, [m, E], see `RouterLogits.loads`."""

    reads_router = True

    def __call__(self, inputs: FeatureInputs) -> Tensor:
        return _router_of(inputs).loads()


def _router_of(inputs: FeatureInputs) -> RouterLogits:
    if inputs.router is None:
        raise ValueError("the feature reads router logits, which this pass did not compute; `reads_router` must be set")
    return inputs.router
