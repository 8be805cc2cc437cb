"""Metrics of egress."""

from __future__ import annotations

from rollmesh.shared.telemetry.metrics import counter

REQUESTS = counter(
    "rollmesh_sandbox_egress_requests_total",
    "External requests of sessions, by policy and outcome: answered, cached, or the refusing rule.",
    "policy",
    "outcome",
)
BYTES = counter("rollmesh_sandbox_egress_bytes_total", "Bytes of bodies returned to sessions, by policy.", "policy")
METRICS = (REQUESTS, BYTES)
