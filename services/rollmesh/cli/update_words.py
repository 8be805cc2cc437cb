"""The health of the newest update in a line, from the learner's metrics.jsonl."""

from __future__ import annotations

from pathlib import Path

from rollmesh.services.learner.metrics_log import newest_metrics

_LEARNER = (
    ("kl", "kl"),
    ("entropy", "entropy"),
    ("gradient norm", "grad_norm"),
    ("ess", "ess"),
    ("length", "length/used_mean"),
    ("lr", "lr"),
)
"""Metrics of an update that are always in view, with their labels."""


def learner_words(path: Path) -> str:
    """The health of the newest update: drift, spread, step size, length of the answers; what is not measured is left out."""
    metrics = newest_metrics(path)
    shown = ((label, metrics.get(name)) for label, name in _LEARNER)
    return "  ".join(f"{label} {value:.3g}" for label, value in shown if value is not None)
