"""Record that old records of the ledger are in archive segments. Nothing else depends on where a record is stored."""

from __future__ import annotations

from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core.decision_context import DecisionContext
from rollmesh.shared.errors import FailedPrecondition


def seal(ctx: DecisionContext, request: i.SealArchive) -> None:
    """Record a segment that follows the last one. Raises FailedPrecondition for any other."""
    state, segment = ctx.state, request.segment
    expected = (state.num_segments + 1, state.archived + 1)
    if (segment.number, segment.first) != expected or segment.last < segment.first:
        raise FailedPrecondition(
            f"archive segment {segment.number} has records {segment.first} to {segment.last}, expected segment "
            f"{expected[0]} from record {expected[1]} on; write it again"
        )
    ctx.emit(segment)
    ctx.reply(request, segment)
