"""A loss term: policy gradient on the tokens at which the engine was in doubt between its two most likely tokens."""

import msgspec

from rollmesh.trainer.losses import LossTerm


class DoubtfulOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    gap_max: float = 1.0


class Doubtful(LossTerm):
    Options = DoubtfulOptions
    needs = ("top_k_logprobs", "margin")  # an array of the engine, and a feature of `learner.features`

    def __init__(self, *, options):
        self.options = options

    def __call__(self, inputs):
        top = inputs["top_k_logprobs"]  # [m, k], the most likely token first
        chosen = (top[:, 0] - top[:, 1] < self.options.gap_max).float()
        loss = -(inputs["token_weight"] * chosen * inputs["advantages"] * inputs.logprobs).sum()
        return loss, {"doubtful": chosen, "margin": inputs["margin"]}
