"""Metrics of a reward node."""

from __future__ import annotations

from rollmesh.shared.telemetry.metrics import counter, gauge

SCORES = counter(
    "rollmesh_reward_scores_total",
    "Samples scored, by scorer; failed ones got no value and fail their episode.",
    "scorer",
    "outcome",
)
GROUPS = counter("rollmesh_reward_groups_total", "Groups decided on, by decision: keep, filter, extend.", "decision")
QUEUED = gauge("rollmesh_reward_samples_queued", "Samples waiting for their scores, or being scored.")
METRICS = (SCORES, GROUPS, QUEUED)
