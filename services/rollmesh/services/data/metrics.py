"""Metrics of a data node."""

from __future__ import annotations

from rollmesh.shared.telemetry.metrics import counter, gauge

TASKS = counter("rollmesh_data_tasks_total", "Tasks given out, by purpose: train, eval, export.", "purpose")
POSITION = gauge("rollmesh_data_ledger_position", "Ledger record up to which the draws have been folded.", "run")
METRICS = (TASKS, POSITION)
