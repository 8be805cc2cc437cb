"""Metrics of a gateway; its calls are among those of rpc."""

from __future__ import annotations

from rollmesh.shared.telemetry.metrics import counter

EPISODES = counter("rollmesh_gateway_episodes_total", "Episodes read for trainers.")
BYTES = counter("rollmesh_gateway_payload_bytes_total", "Bytes of them, as stored.")
METRICS = (EPISODES, BYTES)
