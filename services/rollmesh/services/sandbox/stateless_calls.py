"""Run calls of stateless functions in live sessions that the episodes of one tenant share.

    submit -> queue of (tenant, profile) -> worker: one shared session, many calls per request -> result of each call

A worker serves the queue as long as it has calls; its session then waits for the next worker, at most `idle_s`. More
workers start while calls wait. A session serves one tenant and one profile, and no other command reaches it. It ends
after `calls_max` calls, after half of the CPU time that its limits allow, and at any fault: a call that reaches a limit
or leaves state, or the end of its process.

If the process ends during several calls, or after earlier ones, the cause is unknown. Each of these calls is then
repeated alone in a fresh session, where a second end is its own result. If the session is lost by an infrastructure
failure, its calls fail with that error, and the client may repeat them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from rollmesh.services.sandbox.config import SandboxConfig
from rollmesh.services.sandbox.engine import CallsDone, FunctionCall, RunOutcome, RunResult
from rollmesh.services.sandbox.metrics import SHARED_CALLS, SHARED_ENDED, START_SECONDS
from rollmesh.services.sandbox.sessions import Sessions, checked_wall_s
from rollmesh.shared.clock import Clock, time_limit
from rollmesh.shared.domain.ids import IdSource
from rollmesh.shared.errors import (
    Draining,
    Internal,
    MeshError,
    Overloaded,
    SandboxFailed,
    UnknownSession,
    field_error,
)
from rollmesh.shared.telemetry.logs import apart
from rollmesh.shared.telemetry.metrics import count, observe

_log = logging.getLogger(__name__)

OnDone = Callable[[RunResult | MeshError], None]
"""Callback with the result of a call. It must not block or raise."""
_TRIES_MAX = 3
"""Sessions that may expire or be closed before they begin a call."""
_MEAN_WEIGHT = 0.1
"""Weight of the last request in the mean duration of a call."""


@dataclass(slots=True, eq=False)
class _Item:
    call: FunctionCall
    on_done: OnDone
    tenant: str
    suspect: bool = False
    """Whether a session ended during this call and others. It then runs alone in a fresh session."""
    num_tries: int = 0
    done: bool = False


@dataclass(slots=True, eq=False)
class _SharedSession:
    session_id: str
    num_calls: int = 0
    cpu_s: float = 0.0


@dataclass(slots=True, kw_only=True, eq=False)
class _Group:
    """Calls and sessions of one tenant and profile."""

    tenant: str
    profile: str
    queue: deque[_Item] = field(default_factory=deque)
    idle: list[_SharedSession] = field(default_factory=list)
    num_workers: int = 0
    mean_s: float = 0.0
    growing: bool = False


class StatelessCalls:
    """The shared sessions of a node."""

    def __init__(self, sessions: Sessions, config: SandboxConfig, *, clock: Clock, ids: IdSource) -> None:
        self._sessions = sessions
        self._config = config
        self._clock = clock
        self._ids = ids
        self._groups: dict[tuple[str, str], _Group] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_calls = 0
        self._draining = self._closed = False

    @property
    def num_calls(self) -> int:
        """Number of calls that wait or run."""
        return self._num_calls

    def submit(
        self, profile: str, tenant: str, function: str, arguments: Sequence[str], wall_s: float, on_done: OnDone
    ) -> None:
        """Run a call; `on_done` gets its result later, exactly once. `wall_s` 0 means the profile's limit.

        Raises InvalidInput, UnknownProfile, Overloaded or Draining before the call begins.
        """
        limits = self._sessions.profile_limits(profile)
        declared = self._config.profiles[profile].stateless
        if function not in declared:
            must = f"be declared stateless in profile {profile!r} (declared: {', '.join(declared) or 'none'})"
            remedy = f"call it in a session, or add it to sandbox.profiles.{profile}.stateless"
            raise field_error("function", must, function, remedy)
        if not tenant:
            must = "not be empty, because only calls of one tenant share sessions"
            raise field_error("tenant", must, tenant, "use the run's name")
        call = FunctionCall(function=function, arguments=arguments, wall_s=checked_wall_s(limits, wall_s))
        if self._draining:
            raise Draining("this sandbox node is draining and accepts no new calls; use another node")
        if self._num_calls >= self._config.shared.queued_max:
            raise Overloaded(
                f"{self._num_calls} stateless calls already wait on this sandbox node; wait, use another node, or "
                "raise sandbox.shared.queued_max",
                retry_after_s=self._config.retry_after_s,
                tenant=tenant,
            )
        self._sessions.tenants.begin_command(tenant)
        self._num_calls += 1
        group = self._group(tenant, profile)
        group.queue.append(_Item(call, on_done, tenant))
        self._staff(group)

    async def drain(self) -> None:
        """Reject new calls, wait for the others at most `drain_s`, and end the shared sessions."""
        self._draining = True
        with suppress(TimeoutError):
            async with time_limit(self._clock, self._config.drain_s):
                while self._tasks:
                    await asyncio.wait(self._tasks)
        for group in self._groups.values():
            while group.idle:
                await self._retire(group.idle.pop(), "drained")

    async def close(self) -> None:
        """Fail all calls and stop. The engine ends the sessions."""
        self._draining = self._closed = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for group in self._groups.values():
            self._finish_all(group.queue, SandboxFailed("the sandbox node stops; retry on another node"))

    # Workers ------------------------------------------------------------------------------------------------------

    def _group(self, tenant: str, profile: str) -> _Group:
        key = (tenant, profile)
        if key not in self._groups:
            for old in [key for key, group in self._groups.items() if self._is_over(group)]:
                del self._groups[old]
            self._groups[key] = _Group(tenant=tenant, profile=profile)
        return self._groups[key]

    def _is_over(self, group: _Group) -> bool:
        alive = any(self._sessions.is_live(shared.session_id) for shared in group.idle)
        return not (alive or group.queue or group.num_workers)

    def _staff(self, group: _Group) -> None:
        """Start the first worker now, and further ones if calls still wait after `slice_s`."""
        if not group.num_workers:
            self._start_worker(group)
        elif not group.growing and group.num_workers < self._config.shared.sessions_max:
            group.growing = True
            self._start(self._grow(group))

    def _start_worker(self, group: _Group) -> None:
        group.num_workers += 1
        self._start(self._work(group))

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work, name="stateless calls", context=apart())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _grow(self, group: _Group) -> None:
        """Add workers while the first call in the queue has waited for `slice_s`, or more calls wait than one request
        takes."""
        shared = self._config.shared
        try:
            while group.queue and group.num_workers < shared.sessions_max:
                first = group.queue[0]
                await self._clock.sleep(shared.slice_s)
                if group.queue and (group.queue[0] is first or len(group.queue) > shared.calls_at_once):
                    self._start_worker(group)
        finally:
            group.growing = False

    async def _work(self, group: _Group) -> None:
        """Serve the queue with one session until it is empty."""
        shared = group.idle.pop() if group.idle else None
        items: list[_Item] = []
        try:
            while group.queue:
                items = self._next_items(group)
                try:
                    shared = await self._session(group, shared, fresh=items[0].suspect)
                    done = await self._sessions.call_all(
                        shared.session_id, [item.call for item in items], self._config.shared.slice_s
                    )
                except MeshError as error:
                    shared = None
                    if isinstance(error, Overloaded) and group.num_workers > 1:  # the other workers serve the queue
                        group.queue.extendleft(reversed(items))
                        items = []
                        return
                    self._failed(group, items, error)
                else:
                    shared = await self._settle(group, shared, items, done)
                items = []
                if group.queue:
                    self._staff(group)
        except Exception:  # noqa: BLE001 - a bug fails the calls of this request and not the node
            _log.exception("stateless calls of profile %r failed", group.profile)
            self._finish_all(items, Internal("the calls failed inside the sandbox service; see its log"))
        finally:
            self._finish_all(items, SandboxFailed("the sandbox node stops; retry on another node"))
            group.num_workers -= 1
            if shared is not None:
                group.idle.append(shared)
            if group.queue and not group.num_workers and not self._closed:
                self._start_worker(group)

    def _next_items(self, group: _Group) -> list[_Item]:
        """Take calls that together are expected to last at most `slice_s`; a suspect one is alone."""
        limits = self._config.shared
        fitting = int(limits.slice_s / group.mean_s) if group.mean_s else limits.calls_at_once
        items = [group.queue.popleft()]
        while group.queue and len(items) < min(fitting, limits.calls_at_once):
            if items[0].suspect or group.queue[0].suspect:
                break
            items.append(group.queue.popleft())
        return items

    async def _session(self, group: _Group, shared: _SharedSession | None, *, fresh: bool) -> _SharedSession:
        """Return the session for the next request: the given one, or a new one. Raises the errors of
        `Sessions.open`."""
        if shared is not None and fresh and shared.num_calls:
            await self._retire(shared, "fault")
            shared = None
        if shared is not None:
            return shared
        made, began_s = _SharedSession(self._ids.new("shared")), self._clock.monotonic_s()
        await self._sessions.open(
            made.session_id,
            profile=group.profile,
            limits={},
            ttl_s=min(self._config.shared.idle_s, self._config.ttl_s_max),
            owner=f"{group.tenant}: stateless calls",
            tenant=group.tenant,
            shared=True,
        )
        observe(START_SECONDS, self._clock.monotonic_s() - began_s)
        return made

    async def _settle(
        self, group: _Group, shared: _SharedSession, items: Sequence[_Item], done: CallsDone
    ) -> _SharedSession | None:
        """Return results and requeue what was not begun. Return the session if it serves further calls."""
        if done.end is not None:
            count(SHARED_ENDED, "fault")
            if len(items) == 1 and not shared.num_calls:
                self._finish(items[0], done.end)
                return None
            for item in items:
                item.suspect = True
            group.queue.extendleft(reversed(items))
            return None
        group.queue.extendleft(reversed(items[len(done.results) :]))
        results = [result for result in done.results if isinstance(result, RunResult)]
        shared.num_calls += len(results)
        shared.cpu_s += sum(result.cpu_s for result in results)
        if results:
            mean_s = sum(result.wall_s for result in results) / len(results)
            group.mean_s += _MEAN_WEIGHT * (mean_s - group.mean_s)
        observe(SHARED_CALLS, len(done.results))
        for item, result in zip(items, done.results, strict=False):
            self._finish(item, result)
        if done.changed:
            call = items[len(done.results) - 1].call
            _log.warning(
                "function %s of profile %r is declared stateless and left state: %s; its session was ended. Fix the "
                "function, or remove it from `stateless`", call.function, group.profile, done.changed,
            )  # fmt: skip
        if reason := self._end_reason(group, shared, done, results):
            await self._retire(shared, reason)
            return None
        return shared

    def _end_reason(self, group: _Group, shared: _SharedSession, done: CallsDone, results: Sequence[RunResult]) -> str:
        """Return why the session must not serve further calls; empty if it may."""
        if done.changed:
            return "changed"
        if any(result.outcome not in (RunOutcome.OK, RunOutcome.ERROR) for result in results):
            return "fault"
        cpu_s_max = self._sessions.profile_limits(group.profile).cpu_total_s / 2
        worn = shared.num_calls >= self._config.shared.calls_max or shared.cpu_s >= cpu_s_max
        return "worn" if worn else ""

    async def _retire(self, shared: _SharedSession, reason: str) -> None:
        count(SHARED_ENDED, reason)
        await self._sessions.close(shared.session_id, shared=True)

    # Results ------------------------------------------------------------------------------------------------------

    def _failed(self, group: _Group, items: Sequence[_Item], error: MeshError) -> None:
        """Requeue calls that were not begun, because their session had expired, or fail them."""
        for item in reversed(items):
            item.num_tries += 1
            if isinstance(error, UnknownSession) and item.num_tries < _TRIES_MAX:
                group.queue.appendleft(item)
            else:
                self._finish(item, error)

    def _finish_all(self, items: Iterable[_Item], error: MeshError) -> None:
        for item in items:
            self._finish(item, error)

    def _finish(self, item: _Item, result: RunResult | MeshError) -> None:
        """Report a result once."""
        if not item.done:
            item.done = True
            self._num_calls -= 1
            self._sessions.tenants.end_command(item.tenant)
            item.on_done(result)
