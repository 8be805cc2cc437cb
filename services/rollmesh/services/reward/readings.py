"""Read the current values of the metrics of a reward node from its state."""

from __future__ import annotations

from rollmesh.services.reward.metrics import QUEUED
from rollmesh.services.reward.node import RewardNode
from rollmesh.shared.telemetry.metrics import Reading


async def read(node: RewardNode) -> list[Reading]:
    """Return the length of the queue."""
    return [Reading(QUEUED, node.engine.num_queued)]
