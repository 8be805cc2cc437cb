"""A loss term: the KL divergence from the policy that sampled the tokens, by the estimate r - 1 - log r (Schulman
2020)."""

import msgspec

from rollmesh.trainer.losses import LossTerm


class KlOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    log_ratio_max: float = 10.0


class KlToBehavior(LossTerm):
    Options = KlOptions
    needs = ()  # columns beside those that every update has, e.g. ("proximal",) or an output of the engine

    def __init__(self, *, options):
        self.limit = options.log_ratio_max

    def __call__(self, inputs):
        log_ratio = (inputs.logprobs - inputs["behavior"]).clamp(-self.limit, self.limit)
        kl = log_ratio.exp() - 1 - log_ratio
        return (inputs["token_weight"] * kl).sum(), {"kl": kl.detach()}
