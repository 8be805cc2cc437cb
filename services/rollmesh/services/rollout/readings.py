"""Read the current values of the metrics of a rollout node from its state."""

from __future__ import annotations

from collections.abc import Mapping

from rollmesh.services.rollout.metrics import EPISODES, FAILURES, LEASES, STAGE_EPISODES, STAGE_SECONDS, TOKENS, TURNS
from rollmesh.services.rollout.node import RolloutNode
from rollmesh.shared.telemetry.metrics import Reading


async def read(node: RolloutNode) -> list[Reading]:
    """Return the readings of the worker's counters."""
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
    """Sum failures by boundary. `scorer exact@1` counts as `scorer`, because names of scorers must not become
    labels."""
    found: dict[str, int] = {}
    for where, num in failures.items():
        boundary = where.partition(" ")[0]
        found[boundary] = found.get(boundary, 0) + num
    return found
