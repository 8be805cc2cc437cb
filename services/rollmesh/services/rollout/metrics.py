"""Metrics of a rollout worker."""

from __future__ import annotations

from rollmesh.services.rollout.stages import Stage
from rollmesh.shared.telemetry.metrics import counter, gauge

EPISODES = counter(
    "rollmesh_rollout_episodes_total",
    "Episodes by outcome: completed, failed (infrastructure), cancelled (released), lost (lease gone).",
    "outcome",
    outcome=("completed", "failed", "cancelled", "lost"),
)
LEASES = gauge("rollmesh_rollout_leases", "Episode leases held.")
STAGE_SECONDS = counter(
    "rollmesh_rollout_stage_seconds_total",
    "Seconds of completed episodes by stage; generate and tool are parts of run.",
    "stage",
    stage=("queue", "init", "run", "score", "generate", "tool"),
)
STAGE_EPISODES = gauge(
    "rollmesh_rollout_stage_episodes",
    "Episodes inside a stage or waiting for it.",
    "stage",
    "place",
    stage=list(Stage),
    place=("inside", "waiting"),
)
TURNS = counter("rollmesh_rollout_turns_total", "Generations of completed episodes.")
TOKENS = counter("rollmesh_rollout_tokens_total", "Sampled tokens of completed episodes.")
FAILURES = counter("rollmesh_rollout_failures_total", "Infrastructure failures by boundary.", "boundary")
TOOL_CALLS = counter(
    "rollmesh_rollout_tool_calls_total",
    "Tool calls, by whether the tool succeeded.",
    "outcome",
    outcome=("ok", "error"),
)
SCORE_CALLS = counter("rollmesh_rollout_score_calls_total", "Calls of env.score, by which agents ask for rewards.")
OPENAI_REQUESTS = counter(
    "rollmesh_openai_requests_total", "Requests of programs to the model, by HTTP status.", "status"
)
OPENAI_CHAINS = counter(
    "rollmesh_openai_chains_total",
    "Conversations of programs that were encoded from the beginning, by cause: first (of the episode), other (without "
    "turns of the model),"
    " history (turns that were changed or are not of the episode), tools (known turns with other tools).",
    "why",
    why=("first", "other", "history", "tools"),
)
OPENAI_REENCODED = counter(
    "rollmesh_openai_reencoded_tokens_total",
    "Prompt tokens of conversations that contain turns of the model and could not continue the recorded tokens.",
)
OPENAI_ABANDONED = counter(
    "rollmesh_openai_abandoned_turns_total",
    "Turns that no client got, because it disconnected or the request failed. They do not become samples,"
    " unless a limit ended the episode and it has no other turn.",
)
METRICS = (
    EPISODES,
    LEASES,
    STAGE_SECONDS,
    STAGE_EPISODES,
    TURNS,
    TOKENS,
    FAILURES,
    TOOL_CALLS,
    SCORE_CALLS,
    OPENAI_REQUESTS,
    OPENAI_CHAINS,
    OPENAI_REENCODED,
    OPENAI_ABANDONED,
)
