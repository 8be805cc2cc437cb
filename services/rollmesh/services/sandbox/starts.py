"""Turns to start a session: a bounded number at a time on a node, a bounded queue behind it, tenants served in turn.

A storm of starts costs CPU that the calls of live sessions need; and a tenant that opens a thousand sessions at once must not put another
tenant's one start behind them. Within a tenant the order is that of asking.
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
    """At most `inflight_max` holders of a turn, at most `queued_max` who wait for one."""

    def __init__(self, *, inflight_max: int, queued_max: int, retry_after_s: float, clock: Clock) -> None:
        self._inflight_max = inflight_max
        self._queued_max = queued_max
        self._retry_after_s = retry_after_s
        self._clock = clock
        self._num_inflight = 0
        self._queues: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @property
    def num_queued(self) -> int:
        """Who waits."""
        return sum(map(len, self._queues.values()))

    @property
    def idle(self) -> bool:
        """Whether a turn is free and nobody waits: what is done ahead of demand may use it then."""
        return self._num_inflight < self._inflight_max and not self._queues

    @asynccontextmanager
    async def permit(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a turn and hold it. Raises Overloaded if too many wait already."""
        began_s = self._clock.monotonic_s()
        await self._take(tenant)
        observe(START_WAIT_SECONDS, self._clock.monotonic_s() - began_s)
        try:
            yield
        finally:
            self.release()

    def take_idle_permit(self) -> None:
        """Hold a turn that nobody waits for, until `release`; only while `idle`."""
        assert self.idle
        self._num_inflight += 1

    async def _take(self, tenant: str) -> None:
        if self.idle:
            self._num_inflight += 1
            return
        if self.num_queued >= self._queued_max:
            raise Overloaded(
                f"{self._queued_max} starts of sessions wait on this sandbox node already; wait, go to another node, or raise "
                "sandbox.starts_queued_max",
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
        """Cancelled while it waited, or in the moment in which the turn came: then it is the next one's."""
        if permit.done() and not permit.cancelled():
            self.release()
            return
        queue = self._queues.get(tenant, deque())
        with suppress(ValueError):  # a turn that was given back meanwhile passed it by
            queue.remove(permit)
        if not queue:
            self._queues.pop(tenant, None)

    def release(self) -> None:
        """The end of a turn; the next is for who waits longest, tenant by tenant."""
        self._num_inflight -= 1
        while self._queues and self._num_inflight < self._inflight_max:
            tenant, queue = self._queues.popitem(last=False)
            permit = queue.popleft()
            if queue:
                self._queues[tenant] = queue  # behind the others
            if not permit.done():
                permit.set_result(None)
                self._num_inflight += 1
