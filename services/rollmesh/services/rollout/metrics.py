"""Metrics of a rollout worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rollmesh.shared.telemetry.metrics import Reading, counter, gauge

if TYPE_CHECKING:
    from rollmesh.services.rollout.node import RolloutNode

EPISODES = counter(
    "rollmesh_rollout_episodes_total",
    "Episodes by outcome: completed, failed (infrastructure), cancelled (given back), lost (lease gone).",
    "outcome",
)
LEASES = gauge("rollmesh_rollout_leases", "Episode leases held.")
STAGE_SECONDS = counter(
    "rollmesh_rollout_stage_seconds_total",
    "Seconds of completed episodes: queue, init, run, score; generate and tool are parts of run.",
    "stage",
)
STAGE_EPISODES = gauge(
    "rollmesh_rollout_stage_episodes", "Episodes inside a stage, or in front of it.", "stage", "place"
)
TURNS = counter("rollmesh_rollout_turns_total", "Generations of completed episodes.")
TOKENS = counter("rollmesh_rollout_tokens_total", "Sampled tokens of completed episodes.")
FAILURES = counter(
    "rollmesh_rollout_failures_total", "Infrastructure failures by the boundary they came over.", "boundary"
)
TOOL_CALLS = counter("rollmesh_rollout_tool_calls_total", "Tool calls, by whether the tool succeeded.", "outcome")
METRICS = (EPISODES, LEASES, STAGE_SECONDS, STAGE_EPISODES, TURNS, TOKENS, FAILURES, TOOL_CALLS)


async def read(node: RolloutNode) -> list[Reading]:
    """What the worker knows anyway."""
    progress, stages = node.progress, node.stages
    outcomes = {
        "completed": progress.num_completed,
        "failed": progress.num_failed,
        "cancelled": progress.num_cancelled,
        "lost": progress.num_lost,
    }
    return [
        Reading(LEASES, node.worker.num_running),
        Reading(TURNS, progress.num_turns),
        Reading(TOKENS, progress.num_tokens),
        *(Reading(EPISODES, num, (outcome,)) for outcome, num in outcomes.items()),
        *(Reading(STAGE_SECONDS, seconds, (stage,)) for stage, seconds in progress.stage_s.items()),
        *(Reading(STAGE_EPISODES, num, (stage, "inside")) for stage, num in stages.num_inside.items()),
        *(Reading(STAGE_EPISODES, num, (stage, "waiting")) for stage, num in stages.num_waiting.items()),
        *(Reading(FAILURES, num, (where,)) for where, num in _by_boundary(progress.failures).items()),
    ]


def _by_boundary(failures: Mapping[str, int]) -> dict[str, int]:
    """`scorer exact@1` counts as `scorer`: names of users' scorers are no label."""
    found: dict[str, int] = {}
    for where, num in failures.items():
        boundary = where.partition(" ")[0]
        found[boundary] = found.get(boundary, 0) + num
    return found
