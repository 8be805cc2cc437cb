"""Named points in a service at which a hook is awaited, so that a supervisor can log progress and a test can inject a
crash.

An exception that the hook raises has the effect of a crash at that point. While the hook waits, the service waits.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Any


class FaultPoint(StrEnum):
    """Base of the enumerations that list the fault points of one service."""


Hook = Callable[[Any], Awaitable[None]]
"""Awaited with the fault point of the service that has been reached."""


async def noop(point: FaultPoint) -> None:
    """Do nothing. The default hook."""
