"""Metrics of a reward node."""

from __future__ import annotations

from rollmesh.services.reward.finalizer import FinalizerDecision
from rollmesh.shared.telemetry.metrics import counter, gauge

SCORES = counter(
    "rollmesh_reward_scores_total",
    "Samples scored, by scorer and outcome. A failed one has no value and fails its episode.",
    "scorer",
    "outcome",
    outcome=("ok", "failed"),
)
GROUPS = counter(
    "rollmesh_reward_groups_total",
    "Groups decided, by decision.",
    "decision",
    decision=[decision.name.lower() for decision in FinalizerDecision],
)
QUEUED = gauge("rollmesh_reward_samples_queued", "Samples that wait or are scored.")
METRICS = (SCORES, GROUPS, QUEUED)
