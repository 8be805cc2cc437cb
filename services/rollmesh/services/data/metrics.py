"""Metrics of a data node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollmesh.shared.telemetry.metrics import Reading, counter, gauge

if TYPE_CHECKING:
    from rollmesh.services.data.node import DataNode

TASKS = counter("rollmesh_data_tasks_total", "Tasks given out, by purpose: train, eval, export.", "purpose")
POSITION = gauge("rollmesh_data_ledger_position", "Ledger record up to which the draws have been folded.", "run")
METRICS = (TASKS, POSITION)


async def read(node: DataNode) -> list[Reading]:
    """How far each run's ledger is followed."""
    return [Reading(POSITION, position, (run,)) for run, position in node.engine.positions().items()]
