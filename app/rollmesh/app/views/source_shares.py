"""The share of each source of a mixture in a run: what the weights requested, and what was trained.

Requested shares are those of the selector `mixture`, a mean over the groups that were reserved. Trained ones are a mean
over the updates (`source/NAME/groups_share` in metrics.jsonl).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from rollmesh.services.data.mixture_pool import SOURCE_LABEL
from rollmesh.services.data.selector import SELECTORS
from rollmesh.services.data.selectors.mixture import MixtureSelectorOptions
from rollmesh.services.data.selectors.shares import Shares
from rollmesh.services.learner.metrics_log import MetricsLine
from rollmesh.shared.config.registry import Extension

_METRIC = re.compile("source/(.+)/groups_share")


class SourceShares(msgspec.Struct, frozen=True, kw_only=True):
    """The shares of one source."""

    source: str
    requested: float | None
    """Mean share of the draws; null unless the selector gives the source a weight."""
    trained: float | None
    """Mean share of the groups of an update; null if the learner has not measured it."""


def source_shares(selector: Extension, metrics: Mapping[int, MetricsLine], *, num_draws: int) -> list[SourceShares]:
    """Return the shares of the sources that have a weight or trained groups, in this order. `metrics` are the learner's
    by update."""
    requested = _requested(selector, num_draws)
    updates = [_trained(line) for line in metrics.values() if line.outcome == "APPLIED"]
    names = dict.fromkeys([*requested, *sorted({name for update in updates for name in update})])
    return [
        SourceShares(
            source=name,
            requested=requested.get(name),
            trained=sum(update.get(name, 0.0) for update in updates) / len(updates) if any(updates) else None,
        )
        for name in names
    ]


def _requested(selector: Extension, num_draws: int) -> dict[str, float]:
    options = SELECTORS.options(selector) if selector.name == "mixture" else None
    if not isinstance(options, MixtureSelectorOptions) or options.label != SOURCE_LABEL:
        return {}
    shares = Shares(options.weights, options.floor, options.ceiling)
    return dict(zip(shares.names, shares.mean(num_draws).tolist(), strict=True))


def _trained(line: MetricsLine) -> dict[str, float]:
    found = {_METRIC.fullmatch(name): value for name, value in line.metrics.items()}
    return {match[1]: value for match, value in found.items() if match is not None and value is not None}
