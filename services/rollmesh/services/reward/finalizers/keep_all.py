"""Keeps every group: for evaluation, exports, and advantages that do not compare within a group."""

from __future__ import annotations

from rollmesh.services.reward.finalizer import Finalizer, FinalizerDecision, Group, Verdict


class KeepAllFinalizer(Finalizer):
    """See the module."""

    def decide(self, group: Group) -> Verdict:
        return Verdict(decision=FinalizerDecision.KEEP)
