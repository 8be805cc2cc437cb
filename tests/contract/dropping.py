"""The finalizer of the meshes: it drops the members whose reward has an answer, and the answer is the reason.

So the player, which writes the rewards, decides which samples are never leased.
"""

from __future__ import annotations

from rollmesh.services.reward.finalizer import Finalizer, FinalizerDecision, Group, Verdict

NAME = f"{__name__}:DropAnswered"
REASONS = ("LOOP", "LATE", "LOOP.long/2")
MALFORMED = "mean 0.5"
"""A reason that no coordinator records: the group ends as failed."""


class DropAnswered(Finalizer):
    """See the module."""

    def decide(self, group: Group) -> Verdict:
        dropped = {member.sample_id: member.answer for member in group.members if member.answer}
        return Verdict(decision=FinalizerDecision.KEEP, dropped=dropped)
