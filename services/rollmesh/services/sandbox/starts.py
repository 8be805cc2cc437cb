"""Permits to start sessions: a bounded number per node, a bounded queue, and round-robin between tenants.

Many simultaneous starts would take the CPU that live sessions need, and one tenant that opens a thousand sessions must
not delay the single start of another. Within a tenant the order is first come, first served.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from rollmesh.services.sandbox.metrics import START_WAIT_SECONDS
from rollmesh.shared.clock import Clock
from rollmesh.shared.errors import Overloaded
from rollmesh.shared.telemetry.metrics import observe


class Starts:
    """At most `inflight_max` permits in use and at most `queued_max` waiting starts."""

    def __init__(self, *, inflight_max: int, queued_max: int, retry_after_s: float, clock: Clock) -> None:
        self._inflight_max = inflight_max
        self._queued_max = queued_max
        self._retry_after_s = retry_after_s
        self._clock = clock
        self._num_inflight = 0
        self._queues: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @property
    def num_queued(self) -> int:
        """Number of waiting starts."""
        return sum(map(len, self._queues.values()))

    @property
    def idle(self) -> bool:
        """Whether a permit is free and no start waits. Ready sessions use such permits."""
        return self._num_inflight < self._inflight_max and not self._queues

    @asynccontextmanager
    async def permit(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a permit and hold it. Raises Overloaded if too many starts wait."""
        began_s = self._clock.monotonic_s()
        await self._take(tenant)
        observe(START_WAIT_SECONDS, self._clock.monotonic_s() - began_s)
        try:
            yield
        finally:
            self.release()

    def take_idle_permit(self) -> None:
        """Hold a free permit until `release`. Call only while `idle`."""
        assert self.idle
        self._num_inflight += 1

    async def _take(self, tenant: str) -> None:
        if self.idle:
            self._num_inflight += 1
            return
        if self.num_queued >= self._queued_max:
            raise Overloaded(
                f"{self._queued_max} sessions already wait for a start on this sandbox node; wait, use another node, "
                "or raise sandbox.starts_queued_max",
                retry_after_s=self._retry_after_s,
                tenant=tenant,
            )
        permit: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(tenant, deque()).append(permit)
        try:
            await permit
        except asyncio.CancelledError:
            self._abandon(tenant, permit)
            raise

    def _abandon(self, tenant: str, permit: asyncio.Future[None]) -> None:
        """Handle a cancelled wait. A permit that was granted at the same moment passes to the next start."""
        if permit.done() and not permit.cancelled():
            self.release()
            return
        queue = self._queues.get(tenant, deque())
        with suppress(ValueError):  # a release meanwhile removed it
            queue.remove(permit)
        if not queue:
            self._queues.pop(tenant, None)

    def release(self) -> None:
        """Return a permit and grant it to the longest-waiting start of the next tenant."""
        self._num_inflight -= 1
        while self._queues and self._num_inflight < self._inflight_max:
            tenant, queue = self._queues.popitem(last=False)
            permit = queue.popleft()
            if queue:
                self._queues[tenant] = queue  # behind the others
            if not permit.done():
                permit.set_result(None)
                self._num_inflight += 1
