"""What the nodes of a run should serve, read from its core."""

from __future__ import annotations

from rollmesh.services.coordinator.core.core import Core
from rollmesh.services.coordinator.core.fleet import WeightGoal
from rollmesh.shared.versions import oldest_admissible


def weight_goal(core: Core) -> WeightGoal:
    """Announced versions that were not refused, pinned evaluations, and the oldest step the next update could still use."""
    clock = core.state.the_clock
    return WeightGoal(
        versions=[version for version in clock.versions if version not in clock.quarantined],
        pins=core.pinned(),
        step_min=oldest_admissible(update=clock.applied + 1, eta=core.state.the_spec.max_staleness),
        incarnation=clock.incarnation,
        ended=bool(core.state.ended),
    )
