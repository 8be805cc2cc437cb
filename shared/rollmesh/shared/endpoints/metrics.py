"""Metrics of the client of endpoints."""

from __future__ import annotations

from rollmesh.shared.telemetry.metrics import counter, histogram

CALLS = counter(
    "rollmesh_endpoint_calls_total",
    "Requests to endpoints by result: ok, replayed, or failed after the last retry.",
    "endpoint",
    "outcome",
    outcome=("ok", "replayed", "failed"),
)
TOKENS = counter(
    "rollmesh_endpoint_tokens_total", "Tokens of answered requests.", "endpoint", "kind", kind=("prompt", "completion")
)
PRICE = counter(
    "rollmesh_endpoint_price_total",
    "Price of all responses, also of those that failed the request, in the currency of the table.",
    "endpoint",
)
SECONDS = histogram("rollmesh_endpoint_seconds", "Time of an answered request with waits and retries.", "endpoint")
METRICS = (CALLS, TOKENS, PRICE, SECONDS)
