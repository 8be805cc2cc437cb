"""The error of a group of tasks, for callers that catch an error by its type."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def first_error() -> AsyncIterator[None]:
    """Raise the first error of an ExceptionGroup in its place: callers catch `DiskFull`, not groups."""
    try:
        yield
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
