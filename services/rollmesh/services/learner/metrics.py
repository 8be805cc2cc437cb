"""Metrics of a learner."""

from __future__ import annotations

from collections.abc import Mapping

from rollmesh.services.learner.progress import PHASES
from rollmesh.shared.telemetry.metrics import counter, gauge

UPDATES = counter(
    "rollmesh_learner_updates_total",
    "Committed updates. Repeated updates after a roll-back count again.",
    "outcome",
    outcome=("applied", "skipped"),
)
TOKENS = counter("rollmesh_learner_tokens_total", "Tokens trained on in committed updates.")
STEP = gauge(
    "rollmesh_learner_step",
    "Last step: committed, in a checkpoint, published (-1 before the first).",
    "state",
    state=("committed", "checkpoint", "published"),
)
INCARNATION = gauge("rollmesh_learner_incarnation", "Number of roll-backs so far.")
PHASE_SECONDS = counter(
    "rollmesh_learner_phase_seconds_total",
    "Seconds by phase. `wait` is the wait for a batch.",
    "phase",
    phase=PHASES,
)
ATTACHED = counter("rollmesh_learner_attached_total", "Attaches. More than one means a restart from a checkpoint.")
ESS = gauge("rollmesh_learner_effective_sample_size_ratio", "Effective sample size of the last update over its tokens.")
LAST_UPDATE = gauge("rollmesh_learner_last_update", "Metrics of the last update as in metrics.jsonl.", "metric")
METRICS = (UPDATES, TOKENS, STEP, INCARNATION, PHASE_SECONDS, ATTACHED, ESS, LAST_UPDATE)


def trained_tokens(metrics: Mapping[str, float]) -> float:
    """Return the trained tokens of an update. The trainer reports them in total or by staleness."""
    by_lag = (num for name, num in metrics.items() if name.startswith("lag/") and name.endswith("/tokens"))
    return metrics["tokens/trained"] if "tokens/trained" in metrics else sum(by_lag)
