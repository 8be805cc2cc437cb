"""Fault points of an episode at a rollout worker. An exception of the hook is an infra failure of the episode."""

from __future__ import annotations

from rollmesh.shared.fault_points import FaultPoint


class RolloutFaultPoint(FaultPoint):
    """In the order in which they occur for one episode."""

    LEASED = "leased"
    """The episode is leased; nothing is done for it."""
    GENERATING = "generating"
    """The first tokens of a turn are here. Once per turn."""
    STORED = "stored"
    """The payload is in the sample stream; the coordinator has not been notified."""
