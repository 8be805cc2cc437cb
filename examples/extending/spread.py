"""A finalizer: drop a group if its rewards are too close to each other."""

import msgspec

from rollmesh.services.reward.finalizer import Finalizer, FinalizerDecision, Verdict


class SpreadOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    least: float = 0.5


class Spread(Finalizer):
    Options = SpreadOptions

    def __init__(self, *, options):
        self.least = options.least

    def decide(self, group):
        found = [reward.value for member in group.members for reward in member.rewards if reward.name == "correct"]
        if not found or max(found) - min(found) < self.least:
            return Verdict(decision=FinalizerDecision.FILTER, reason="SPREAD_TOO_SMALL")
        return Verdict(decision=FinalizerDecision.KEEP)
