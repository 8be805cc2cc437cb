"""Ready sessions: created and contained before they are requested, in a number that follows recent demand, one pool per
profile.

A ready session has executed only the creation of its jail. When it is taken, it is the fresh session of the caller. It
has the limits of its profile, so an open with lower limits creates a session as usual. The same holds for a profile
with egress, because the proxy connection is bound to the session at its fork.

Live sessions have priority. Ready sessions are created only while no start waits and slots are left over, a few at a
time, and they are evicted when an open finds no free slot. At every moment made = taken + dropped + ready.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Mapping

from rollmesh.sandbox_runtime.limits import Limits
from rollmesh.services.sandbox.config import SandboxConfig
from rollmesh.services.sandbox.engine import PoolCounts
from rollmesh.services.sandbox.engines.demand import shares
from rollmesh.services.sandbox.engines.forks import Forks, LiveSession
from rollmesh.services.sandbox.engines.ready_pool import ReadyPool
from rollmesh.services.sandbox.engines.slots import SessionSlot
from rollmesh.services.sandbox.engines.zygotes import Zygotes
from rollmesh.services.sandbox.starts import Starts
from rollmesh.shared.clock import Clock
from rollmesh.shared.errors import Overloaded, SandboxFailed

_log = logging.getLogger(__name__)


class Pools:
    """The pools of a node, and the shutdown of idle zygotes. Between `start` and `close` a task maintains them every
    `reap_every_s`."""

    def __init__(self, config: SandboxConfig, forks: Forks, zygotes: Zygotes, starts: Starts, clock: Clock) -> None:
        self._config = config
        self._forks = forks
        self._zygotes = zygotes
        self._starts = starts
        self._clock = clock
        self._pools = _pools(config)
        self._opened_s = dict.fromkeys(config.profiles, clock.monotonic_s())
        self._held: set[LiveSession] = set()
        """Sessions of the pools, from their fork until they are taken or have ended."""
        self._maintenance: asyncio.Task[None] | None = None
        self._making: dict[asyncio.Task[None], None] = {}
        """Sessions being created, the oldest first."""
        self._making_max = min(config.pools.making_max, max(1, config.starts_inflight_max - 1))
        self._planned = False
        self._made = self._taken = self._missed = self._dropped = 0

    def start(self) -> None:
        """Start the maintenance task."""
        self._maintenance = asyncio.create_task(self._maintain(), name="sandbox pools")
        self._maintenance.add_done_callback(_log_failure)

    async def close(self) -> None:
        """Stop the maintenance and end all ready sessions, including those being created. No new ones follow."""
        tending, self._maintenance = self._maintenance, None
        tasks = [*self._making, *([tending] if tending is not None else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for pool in self._pools.values():
            self._shrink(pool, 0)
        await asyncio.gather(*(self._forks.gone(live) for live in list(self._held)))

    def counts(self) -> PoolCounts:
        """Return the counters since the start."""
        ready = {profile: len(pool.ready) for profile, pool in self._pools.items()}
        return PoolCounts(ready=ready, made=self._made, taken=self._taken, missed=self._missed, dropped=self._dropped)

    async def take(self, profile: str, limits: Limits) -> LiveSession | None:
        """Return a ready session, which the caller then owns, or None. If one is being created, wait for it: that is
        faster than a second creation on the same cores."""
        now_s = self._clock.monotonic_s()
        self._opened_s[profile] = now_s
        pool = self._pools.get(profile)
        if pool is None or limits != pool.limits:
            return None
        pool.demand.opened(now_s)
        live = self._pop(pool) if pool.has_unreserved else None
        if live is None and pool.num_free > 0 and await pool.next_made():
            live = self._pop(pool)
        if live is None:
            self._missed += 1
        return live

    def _pop(self, pool: ReadyPool) -> LiveSession | None:
        while pool.ready:
            live = pool.ready.pop()
            if live.quiet:
                self._held.discard(live)
                self._taken += 1
                return live
            self._drop(live)
        return None

    async def acquire_slot(self) -> SessionSlot:
        """Acquire a slot. If none is free, evict a ready session and take its slot. Raises Overloaded,
        SandboxFailed."""
        while True:
            try:
                return self._forks.slots.acquire()
            except Overloaded:
                if not await self._evict_and_wait():
                    raise

    def refill(self) -> None:
        """Schedule a check whether sessions should be created, after the current callbacks."""
        if self._maintenance is not None and not self._planned:
            self._planned = True
            asyncio.get_running_loop().call_soon(self._refill)

    # Create -------------------------------------------------------------------------------------------------------

    def _refill(self) -> None:
        self._planned = False
        while self._maintenance is not None and (profile := self._next()) is not None:
            try:
                self._make(self._pools[profile])
            except SandboxFailed as error:  # an open with the same error reports it to its caller
                _cannot_keep(profile, error)
                return

    def _next(self) -> str | None:
        """Return the profile that lacks the most sessions, if one more can be created now: it has a zygote, a permit is
        free, and slots are left over."""
        if len(self._making) >= self._making_max or len(self._held) >= self._config.pools.ready_max:
            return None
        if not self._starts.idle or self._spare_slots() <= 0:
            return None
        lacking = {
            profile: lack
            for profile, num in self._wanted().items()
            if (lack := num - self._pools[profile].num_free) > 0
            and self._zygotes.running(profile) is not None
            and not self._unused(profile)
        }
        return max(lacking, key=lacking.__getitem__, default=None)

    def _make(self, pool: ReadyPool) -> None:
        """Fork a session and wait in the background until it is ready. Raises SandboxFailed."""
        zygote = self._zygotes.running(pool.profile)
        assert zygote is not None
        slot = self._forks.slots.acquire()
        try:
            live = self._forks.fork(zygote, slot, pool.limits)
        except BaseException:
            self._forks.slots.release(slot)
            raise
        self._held.add(live)
        live.ended.add_done_callback(lambda _: self._forget(pool, live))
        self._starts.take_idle_permit()
        task = asyncio.create_task(self._await_ready(pool, live), name=f"sandbox pool of {pool.profile}")
        task.add_done_callback(lambda task: self._record_result(task, pool, live))
        self._making[task] = None
        pool.num_making += 1

    async def _await_ready(self, pool: ReadyPool, live: LiveSession) -> None:
        """Wait until a session is ready and add it to its pool. Raises SandboxFailed."""
        began_s = self._clock.monotonic_s()
        await self._forks.ready(live)
        self._made += 1
        pool.made(live)
        pool.demand.made(self._clock.monotonic_s() - began_s)

    def _record_result(self, task: asyncio.Task[None], pool: ReadyPool, live: LiveSession) -> None:
        """Handle the end of a creation: the session is ready, or it failed or was cancelled, perhaps before its first
        step."""
        del self._making[task]
        self._starts.release()
        if task.cancelled() or task.exception() is not None:
            pool.not_made()
        if task.cancelled():
            live.kill()
        elif isinstance(error := task.exception(), SandboxFailed):
            _cannot_keep(pool.profile, error)
        elif error is not None:
            _log_failure(task)
        else:
            self.refill()

    # End ----------------------------------------------------------------------------------------------------------

    async def _maintain(self) -> None:
        while True:
            await self._clock.sleep(self._config.reap_every_s)
            for profile, num in self._wanted().items():
                self._shrink(self._pools[profile], num)
            for _ in range(-self._spare_slots()):
                self._evict_one()
            await self._end_idle_zygotes()
            self.refill()

    async def _end_idle_zygotes(self) -> None:
        for profile in filter(self._unused, self._config.profiles):
            if (pool := self._pools.get(profile)) is not None:
                self._shrink(pool, 0)
            zygote = self._zygotes.running(profile)
            dying = [live for live in self._held if live.closing and live.zygote is zygote]
            await asyncio.gather(*(self._forks.gone(live) for live in dying))
            await self._zygotes.end_if(profile, functools.partial(self._unused, profile))

    def _unused(self, profile: str) -> bool:
        """Return whether the zygote of a profile should end once it has no sessions."""
        idle_s = self._config.pools.zygote_idle_s
        unused_s = self._clock.monotonic_s() - self._opened_s[profile]
        return 0 < idle_s <= unused_s and profile not in self._config.warm

    async def _evict_and_wait(self) -> bool:
        """Evict a ready session and wait until one of the pools has ended. Return whether one has."""
        if not self._evict_one():
            running = [task for task in self._making if not task.done() and not task.cancelling()]
            for task in running[-1:]:
                task.cancel()
        if not self._held:
            return False
        endings = [live.ended for live in self._held]
        done, _ = await asyncio.wait(endings, timeout=self._config.start_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)

    def _evict_one(self) -> bool:
        """End a ready session of the largest pool. Return False if there is none."""
        largest = max(self._pools.values(), key=lambda pool: len(pool.ready), default=None)
        if largest is None or not largest.ready:
            return False
        self._shrink(largest, len(largest.ready) - 1)
        return True

    def _shrink(self, pool: ReadyPool, num: int) -> None:
        while len(pool.ready) > num:
            self._drop(pool.ready.popleft())

    def _drop(self, live: LiveSession) -> None:
        self._dropped += 1
        live.kill()

    def _forget(self, pool: ReadyPool, live: LiveSession) -> None:
        """Handle the end of a pooled session that no client acquired."""
        self._held.discard(live)
        if live in pool.ready:
            pool.ready.remove(live)
            self._dropped += 1

    # ---------------------------------------------------------------------------------------------------------------

    def _wanted(self) -> Mapping[str, int]:
        now_s = self._clock.monotonic_s()
        asked = {profile: min(pool.most, pool.demand.wanted(now_s)) for profile, pool in self._pools.items()}
        return shares(asked, self._config.pools.ready_max)

    def _spare_slots(self) -> int:
        """Return the number of free slots beyond those reserved for sessions that may be requested at once."""
        return self._forks.slots.num_free - self._config.starts_inflight_max


def _cannot_keep(profile: str, error: SandboxFailed) -> None:
    _log.warning("profile %r: cannot create a ready session: %s", profile, error)


def _log_failure(task: asyncio.Task[None]) -> None:
    """Log an unexpected error. Opens then work without ready sessions."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("%s failed", task.get_name(), exc_info=error)


def _pools(config: SandboxConfig) -> dict[str, ReadyPool]:
    pools = {}
    for name, profile in config.profiles.items():
        most = config.pools.by_profile.get(name, config.pools.ready_max)
        if most and not profile.egress:
            pools[name] = ReadyPool(name, profile.resolved_limits(), most, config.pools.halflife_s)
    return pools
