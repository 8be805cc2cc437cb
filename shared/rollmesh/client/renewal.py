"""Renews one batch lease while its batch is fetched, trained and committed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from rollmesh.shared.clock import Clock
from rollmesh.shared.errors import MeshError

TERM_SHARE = 1 / 3
"""Renewals are sent every third of the term, so that two may be lost."""


class Renewal:
    """Renew the lease inside `async with`. If it is lost, `check` raises the cause.

    A successful commit overrides a lost lease, because the commit ends the lease while a renewal may be in progress.
    """

    def __init__(
        self, renew: Callable[[str], Awaitable[float]], lease_id: str, *, lease_s: float, clock: Clock
    ) -> None:
        """`renew` takes the lease id and returns the seconds until the renewed lease expires."""
        self._renew_lease = renew
        self._lease_id = lease_id
        self._lease_s = lease_s
        self._clock = clock
        self._lost: MeshError | None = None
        self._task: asyncio.Task[None] | None = None

    def check(self) -> None:
        """Raise the cause if the lease is lost; an update trained on it does not count then."""
        if self._lost is not None:
            raise self._lost

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._renew(), name=f"renew {self._lease_id}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None, "not entered"
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()

    async def _renew(self) -> None:
        lease_s = self._lease_s
        while True:
            await self._clock.sleep(lease_s * TERM_SHARE)
            try:
                lease_s = await self._renew_lease(self._lease_id)
            except MeshError as err:
                self._lost = err
                return
