"""Metrics of a rollout worker."""

from __future__ import annotations

from rollmesh.shared.telemetry.metrics import counter, gauge

EPISODES = counter(
    "rollmesh_rollout_episodes_total",
    "Episodes by outcome: completed, failed (infrastructure), cancelled (released), lost (lease gone).",
    "outcome",
)
LEASES = gauge("rollmesh_rollout_leases", "Episode leases held.")
STAGE_SECONDS = counter(
    "rollmesh_rollout_stage_seconds_total",
    "Seconds of completed episodes: queue, init, run, score; generate and tool are parts of run.",
    "stage",
)
STAGE_EPISODES = gauge(
    "rollmesh_rollout_stage_episodes", "Episodes inside a stage or waiting for it.", "stage", "place"
)
TURNS = counter("rollmesh_rollout_turns_total", "Generations of completed episodes.")
TOKENS = counter("rollmesh_rollout_tokens_total", "Sampled tokens of completed episodes.")
FAILURES = counter("rollmesh_rollout_failures_total", "Infrastructure failures by boundary.", "boundary")
TOOL_CALLS = counter("rollmesh_rollout_tool_calls_total", "Tool calls, by whether the tool succeeded.", "outcome")
METRICS = (EPISODES, LEASES, STAGE_SECONDS, STAGE_EPISODES, TURNS, TOKENS, FAILURES, TOOL_CALLS)
