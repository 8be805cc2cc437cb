"""Metrics of a data node."""

from __future__ import annotations

from rollmesh.shared.telemetry.metrics import counter, gauge

TASKS = counter(
    "rollmesh_data_tasks_total", "Tasks returned, by purpose.", "purpose", purpose=("train", "eval", "export")
)
POSITION = gauge("rollmesh_data_ledger_position", "Last ledger record that the draws have folded.", "run")
METRICS = (TASKS, POSITION)
