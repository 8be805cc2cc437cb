"""The moments of a learner's life at which others may look on.

The learner awaits one callable at each of them. A supervisor uses it to show or to log where a learner stands, a chaos test to
end it exactly there: whatever the callable raises ends the learner as a crash would, and while it waits, the learner does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import StrEnum


class Moment(StrEnum):
    """In the order in which they occur for one update."""

    LEASED = "leased"
    """A batch is leased; nothing of it is fetched."""
    MID_FETCH = "mid_fetch"
    """The first episode of the batch is here."""
    STEPPED = "stepped"
    """The weights in memory contain the update, the ledger does not."""
    COMMITTED = "committed"
    """The ledger contains it, too; no checkpoint does."""
    MID_CHECKPOINT = "mid_checkpoint"
    """A checkpoint with it is durable; nobody has been told."""
    CHECKPOINTED = "checkpointed"
    """The checkpoint is reported: its samples are TRAINED."""
    PUBLISHED = "published"
    """A version is announced. Also after every attach."""


AtMoment = Callable[[Moment], Awaitable[None]]
"""Awaited at each moment."""


async def pass_by(moment: Moment) -> None:
    """Nobody looks on."""
