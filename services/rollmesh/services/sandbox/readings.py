"""Read the current values of the metrics of a sandbox node from its state."""

from __future__ import annotations

from rollmesh.services.sandbox.engine import PoolCounts
from rollmesh.services.sandbox.metrics import (
    CREATED,
    ENDED,
    LIVE,
    POOL_DROPPED,
    POOL_MADE,
    POOL_OPENS,
    QUEUED,
    READY,
    SHARED_PENDING,
)
from rollmesh.services.sandbox.node import SandboxNode
from rollmesh.shared.telemetry.metrics import Reading


async def read(node: SandboxNode) -> list[Reading]:
    """Read the session counters: created = live + the sum of ends."""
    counts = node.core.sessions.counts()
    return [
        Reading(CREATED, counts.created),
        Reading(LIVE, counts.live),
        Reading(QUEUED, node.core.num_queued),
        Reading(SHARED_PENDING, node.core.stateless.num_calls),
        *_pools(node.core.pool_counts()),
        *(Reading(ENDED, num, (end.value,)) for end, num in counts.ended.items()),
    ]


def _pools(counts: PoolCounts) -> list[Reading]:
    return [
        *(Reading(READY, num, (profile,)) for profile, num in counts.ready.items()),
        Reading(POOL_OPENS, counts.taken, ("hit",)),
        Reading(POOL_OPENS, counts.missed, ("miss",)),
        Reading(POOL_MADE, counts.made),
        Reading(POOL_DROPPED, counts.dropped),
    ]
