"""Metrics of an inference node."""

from __future__ import annotations

from rollmesh.shared.telemetry.metrics import counter, gauge, histogram

TOKENS = counter(
    "rollmesh_inference_tokens_total",
    "Tokens sampled, computed as prefix, or found in the cache.",
    "work",
    work=("generated", "prefilled", "prefix_hit"),
)
REQUESTS = gauge("rollmesh_inference_requests", "Requests at the engine.", "state", state=("running", "waiting"))
SLOTS = gauge("rollmesh_inference_slots", "Requests that can run at once.")
KV_TOKENS = gauge(
    "rollmesh_inference_kv_tokens",
    "Tokens in the key-value cache (used), and its size (max).",
    "part",
    part=("used", "max"),
)
STEPS = counter("rollmesh_inference_steps_total", "Engine steps.")
STEP_SECONDS = counter(
    "rollmesh_inference_step_seconds_total", "Seconds in engine steps; over steps it is the mean step time."
)
HELD_SECONDS = counter(
    "rollmesh_inference_held_seconds_total",
    "Seconds that engine steps waited for further requests while few were live.",
)
QUEUE_SECONDS = histogram("rollmesh_inference_queue_seconds", "Time that a request waits for a slot, in seconds.")
VERSION = gauge(
    "rollmesh_inference_version_step", "Step of the active weights; -1 before the first. Nodes of endpoints have none."
)
INCARNATION = gauge(
    "rollmesh_inference_version_incarnation", "Incarnation of the active weights. Nodes of endpoints have none."
)
METRICS = (TOKENS, REQUESTS, SLOTS, KV_TOKENS, STEPS, STEP_SECONDS, HELD_SECONDS, QUEUE_SECONDS, VERSION, INCARNATION)
