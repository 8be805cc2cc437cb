"""The group of a draw: the plan of the selector, or the default plan of the run. Pure, and without state."""

from __future__ import annotations

from rollmesh.services.coordinator.core.records import EPISODES_LIVE_MAX, RunSpec
from rollmesh.shared.domain.plans import Plan, Variant

DEFAULT = Plan()
"""The plan of a draw without one."""


def group_of(spec: RunSpec, plan: Plan) -> tuple[int, tuple[Variant, ...]]:
    """Return the number of episodes of a planned group, and their variants."""
    size = plan.size or sum(variant.count for variant in plan.variants) or spec.group_size
    own = spec.variants if size == spec.group_size and not spec.exports else ()
    return size, plan.variants or own


def why_too_large(spec: RunSpec, plan: Plan) -> str:
    """Return what is wrong with a plan that does not fit into a batch of the run; empty if it fits. A group may have
    the episodes of a whole batch, and admission must be able to reserve all batches within the bound with such
    groups."""
    size, _ = group_of(spec, plan)
    most = spec.batch_groups * spec.group_size
    if size > most:
        return f"`size` must be <= {most}, the episodes of a batch (run.batch_groups * run.group_size), got {size}"
    ahead = (spec.max_staleness + 1) * spec.batch_groups
    if size * ahead > EPISODES_LIVE_MAX:
        most = EPISODES_LIVE_MAX // ahead
        return (
            f"`size` must be <= {most}, because (max_staleness + 1) * batch_groups = {ahead} groups of it would have "
            f"more than {EPISODES_LIVE_MAX} episodes, got {size}"
        )
    return ""
