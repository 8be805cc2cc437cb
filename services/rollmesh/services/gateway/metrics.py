"""Metrics of a gateway. The metrics of rpc count its calls."""

from __future__ import annotations

from rollmesh.shared.telemetry.metrics import counter

EPISODES = counter("rollmesh_gateway_episodes_total", "Episodes read for trainers.")
BYTES = counter("rollmesh_gateway_payload_bytes_total", "Stored bytes of episodes read for trainers.")
PAGE_REQUESTS = counter("rollmesh_gateway_page_requests_total", "Requests of browsers to the live page.", "status")
METRICS = (EPISODES, BYTES, PAGE_REQUESTS)
