"""Read the current values of the metrics of a learner node from its state."""

from __future__ import annotations

import math

from rollmesh.services.learner.metrics import ATTACHED, ESS, INCARNATION, LAST_UPDATE, PHASE_SECONDS, STEP
from rollmesh.services.learner.node import LearnerNode
from rollmesh.shared.telemetry.metrics import Reading


async def read(node: LearnerNode) -> list[Reading]:
    """Return the readings of the learner's progress."""
    progress = node.progress
    last = {name: value for name, value in progress.metrics.items() if math.isfinite(value)}
    return [
        Reading(STEP, progress.update, ("committed",)),
        Reading(STEP, progress.checkpoint_update, ("checkpoint",)),
        Reading(STEP, progress.published_step, ("published",)),
        Reading(INCARNATION, progress.incarnation),
        Reading(ATTACHED, progress.num_attached),
        *(Reading(PHASE_SECONDS, seconds, (phase,)) for phase, seconds in progress.seconds.items()),
        *(Reading(LAST_UPDATE, value, (name,)) for name, value in last.items()),
        *([Reading(ESS, last["ess"])] if "ess" in last else []),
    ]
