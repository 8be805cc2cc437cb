"""Fault points of an episode at a rollout worker. An exception raised by the hook is an infra failure of the
episode."""

from __future__ import annotations

from rollmesh.shared.process.fault_points import FaultPoint


class RolloutFaultPoint(FaultPoint):
    """Points in the order in which one episode reaches them."""

    LEASED = "leased"
    """The episode is leased; no work has started."""
    GENERATING = "generating"
    """The first tokens of a turn have arrived. Reached once per turn."""
    STORED = "stored"
    """The payload is in the sample stream; the coordinator has not been notified."""
