"""Read the current values of the metrics of a data node from its state."""

from __future__ import annotations

from rollmesh.services.data.metrics import POSITION, SOURCE_SHARE
from rollmesh.services.data.node import DataNode
from rollmesh.shared.telemetry.metrics import Reading


async def read(node: DataNode) -> list[Reading]:
    """Return the last folded ledger record of each run, and the shares of its sources."""
    shares = [
        Reading(SOURCE_SHARE, getattr(share, state), (run, share.source, state))
        for run, of_run in node.engine.source_shares().items()
        for share in of_run
        for state in SOURCE_SHARE.values["state"]
    ]
    return [*(Reading(POSITION, position, (run,)) for run, position in node.engine.positions().items()), *shares]
