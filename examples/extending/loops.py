"""A finalizer: drop the members whose text ends in a loop, before a trainer leases them."""

import msgspec

from rollmesh.services.reward.finalizer import Finalizer, FinalizerDecision, Verdict


class LoopsOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    period_max: int = 40
    repeats: int = 4


class Loops(Finalizer):
    Options = LoopsOptions

    def __init__(self, *, options):
        self.options = options

    def decide(self, group):
        dropped = {member.sample_id: "LOOP" for member in group.members if self.is_loop(member.summary.text)}
        return Verdict(decision=FinalizerDecision.KEEP, dropped=dropped)

    def is_loop(self, text):
        periods = range(1, min(self.options.period_max, len(text)) + 1)
        return any(text.endswith(text[-period:] * self.options.repeats) for period in periods)
