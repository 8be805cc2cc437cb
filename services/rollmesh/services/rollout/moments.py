"""The moments of an episode at which others may look on.

The worker awaits one callable at each of them. A supervisor uses it to show where episodes stand, a chaos test to end the process
exactly there. While it waits, the episode does; what it raises is an infra failure of the episode.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import StrEnum


class Moment(StrEnum):
    """In the order in which they occur for one episode."""

    LEASED = "leased"
    """The episode is leased; nothing is done for it."""
    GENERATING = "generating"
    """The first tokens of a turn are here. Once per turn."""
    STORED = "stored"
    """The payload is in the sample stream; nobody has been told."""


AtMoment = Callable[[Moment], Awaitable[None]]
"""Awaited at each moment."""


async def pass_by(moment: Moment) -> None:
    """Nobody looks on."""
