"""Read the current values of the metrics of a data node from its state."""

from __future__ import annotations

from rollmesh.services.data.metrics import POSITION
from rollmesh.services.data.node import DataNode
from rollmesh.shared.telemetry.metrics import Reading


async def read(node: DataNode) -> list[Reading]:
    """Return the last folded ledger record of each run."""
    return [Reading(POSITION, position, (run,)) for run, position in node.engine.positions().items()]
