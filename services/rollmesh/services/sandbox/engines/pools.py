"""Ready sessions: made and contained before somebody asks for them, as many as demand has lately called for, one pool per profile.

A ready session has run nothing but the making of its jail; taken, it is the opener's fresh session. It has its profile's own limits, so
an open that narrows them is made as ever; so is a session with egress, whose way out is named after it and handed over at the fork.

Live sessions come first: ready ones are made when nobody waits for a turn to start and places are left over, a few at a time, and give
their places up when an open finds none free. made = taken + dropped + ready, at every moment.
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
    """Those of a node, and the end of zygotes that nobody uses. Between `start` and `close` a task tends them every `reap_every_s`."""

    def __init__(self, config: SandboxConfig, forks: Forks, zygotes: Zygotes, starts: Starts, clock: Clock) -> None:
        self._config = config
        self._forks = forks
        self._zygotes = zygotes
        self._starts = starts
        self._clock = clock
        self._pools = _pools(config)
        self._opened_s = dict.fromkeys(config.profiles, clock.monotonic_s())
        self._held: set[LiveSession] = set()
        """Ours, from their fork until they are taken or nothing of them is left."""
        self._maintenance: asyncio.Task[None] | None = None
        self._making: dict[asyncio.Task[None], None] = {}
        """The oldest first."""
        self._making_max = min(config.pools.making_max, max(1, config.starts_inflight_max - 1))
        self._planned = False
        self._made = self._taken = self._missed = self._dropped = 0

    def start(self) -> None:
        """Begin to tend."""
        self._maintenance = asyncio.create_task(self._maintain(), name="sandbox pools")
        self._maintenance.add_done_callback(_log_failure)

    async def close(self) -> None:
        """Nothing is ready or being made when this returns, and nothing will be."""
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
        """Since the start."""
        ready = {profile: len(pool.ready) for profile, pool in self._pools.items()}
        return PoolCounts(ready=ready, made=self._made, taken=self._taken, missed=self._missed, dropped=self._dropped)

    async def take(self, profile: str, limits: Limits) -> LiveSession | None:
        """A ready session, the caller's own from now on, if there is one that will do; or one that is just being made, which is there
        sooner than another that would have to share the cores with it."""
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
        """A free place; where there is none a ready session gives up its own. Raises Overloaded, SandboxFailed."""
        while True:
            try:
                return self._forks.slots.acquire()
            except Overloaded:
                if not await self._evict_and_wait():
                    raise

    def refill(self) -> None:
        """Somebody took a session or gave back a place: see whether sessions should be made, as soon as what is under way has gone on."""
        if self._maintenance is not None and not self._planned:
            self._planned = True
            asyncio.get_running_loop().call_soon(self._refill)

    # Making -------------------------------------------------------------------------------------------------------

    def _refill(self) -> None:
        self._planned = False
        while self._maintenance is not None and (profile := self._next()) is not None:
            try:
                self._make(self._pools[profile])
            except SandboxFailed as error:  # an open that meets the same tells its user
                _cannot_keep(profile, error)
                return

    def _next(self) -> str | None:
        """The profile that lacks most, if one more can be made now: it has a zygote, a turn is free, and places are left over."""
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
        """Fork one and see to it that it becomes ready. Raises SandboxFailed."""
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
        """Raises SandboxFailed."""
        began_s = self._clock.monotonic_s()
        await self._forks.ready(live)
        self._made += 1
        pool.made(live)
        pool.demand.made(self._clock.monotonic_s() - began_s)

    def _record_result(self, task: asyncio.Task[None], pool: ReadyPool, live: LiveSession) -> None:
        """It is ready, or was cancelled, before its first step perhaps, or failed."""
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

    # Ending -------------------------------------------------------------------------------------------------------

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
        """Whether its zygote should end, if nothing lives in it."""
        idle_s = self._config.pools.zygote_idle_s
        unused_s = self._clock.monotonic_s() - self._opened_s[profile]
        return 0 < idle_s <= unused_s and profile not in self._config.warm

    async def _evict_and_wait(self) -> bool:
        """Wait until a session of ours is gone; whether one is."""
        if not self._evict_one():
            going_on = [task for task in self._making if not task.done() and not task.cancelling()]
            for task in going_on[-1:]:
                task.cancel()
        if not self._held:
            return False
        endings = [live.ended for live in self._held]
        done, _ = await asyncio.wait(endings, timeout=self._config.start_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)

    def _evict_one(self) -> bool:
        """End one ready session; False if there is none."""
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
        """It has ended, if not as somebody's: asked to, or with its zygote."""
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
        """Slots beyond those left free for the sessions that may be asked for at once."""
        return self._forks.slots.num_free - self._config.starts_inflight_max


def _cannot_keep(profile: str, error: SandboxFailed) -> None:
    _log.warning("profile %r: no session can be kept ready: %s", profile, error)


def _log_failure(task: asyncio.Task[None]) -> None:
    """Opens do without ready sessions then."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("%s failed", task.get_name(), exc_info=error)


def _pools(config: SandboxConfig) -> dict[str, ReadyPool]:
    pools = {}
    for name, profile in config.profiles.items():
        most = config.pools.by_profile.get(name, config.pools.ready_max)
        if most and not profile.egress:
            pools[name] = ReadyPool(name, profile.resolved_limits(), most, config.pools.halflife_s)
    return pools
