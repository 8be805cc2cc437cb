"""Metrics of a data node."""

from __future__ import annotations

from rollmesh.shared.telemetry.metrics import counter, gauge

TASKS = counter(
    "rollmesh_data_tasks_total", "Tasks returned, by purpose.", "purpose", purpose=("train", "eval", "export")
)
POSITION = gauge("rollmesh_data_ledger_position", "Last ledger record that the draws have folded.", "run")
DROPPED = counter(
    "rollmesh_data_dropped_records_total",
    "Records of a file that did not become tasks, by reason, counted whenever a source is read.",
    "reason",
)
SOURCE_SHARE = gauge(
    "rollmesh_data_source_share_ratio",
    "Share of each source of a mixture (selector `mixture`): requested for the next draw, and so far of the groups "
    "with a success reward (decided).",
    "run",
    "source",
    "state",
    state=("requested", "decided"),
)
METRICS = (TASKS, POSITION, DROPPED, SOURCE_SHARE)
