"""Carries out the effects of stored decisions, and submits the results as inputs.

Every request of the core gets a result: a failing service is retried with growing back-off, and an empty result waits
one back-off, so that the core may repeat the request at once without a hot loop. Concurrent work is bounded. Closing
cancels it; recovery repeats it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, Protocol

import msgspec

from rollmesh.services.coordinator.config import RunLimits
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core.core import Core
from rollmesh.services.coordinator.core.decision_context import (
    CancelEpisodes,
    DeadLetter,
    DrawTasks,
    Effect,
    FinalizeGroup,
)
from rollmesh.services.coordinator.core.facts import GroupDecision, Purpose, Task
from rollmesh.services.coordinator.core.records import RunSpec
from rollmesh.services.coordinator.translate import (
    dead_letter,
    finalize_request,
    group_decided,
    next_tasks_request,
    tasks_drawn,
)
from rollmesh.shared.bus.bus import StreamLog
from rollmesh.shared.clock import Clock
from rollmesh.shared.domain.ids import IdSource
from rollmesh.shared.errors import GroupCodeFailed, InfraFailure, MeshError, OutOfRange
from rollmesh.shared.net.retry import pause_after
from rollmesh.v1 import data_pb2, reward_pb2

PAGE_TASKS = 1024
"""Most tasks that the data service returns at once."""
EVAL_BYTES_MAX = 6 * 1024 * 1024
"""Maximum size of the tasks of an evaluation, bytes, because one ledger record reserves all of them."""
_TASK_BYTES = 256
"""Size of a reserved group without its task, bytes, rounded up."""
_log = logging.getLogger(__name__)


class Outside(Protocol):
    """The services and nodes that the coordinator of a run calls. Calls raise MeshError."""

    async def next_tasks(self, request: data_pb2.NextTasksRequest) -> data_pb2.NextTasksResponse: ...

    async def finalize_group(self, request: reward_pb2.FinalizeGroupRequest) -> reward_pb2.FinalizeGroupResponse: ...

    def cancel_episodes(self, run: str, command: CancelEpisodes) -> None: ...


class Inbox(Protocol):
    """Receives results: the driver."""

    async def enqueue(self, request: i.Input) -> None: ...

    def recover_from(self, error: BaseException) -> None: ...


class Effects:
    """The effects of one run."""

    def __init__(
        self,
        core: Core,
        inbox: Inbox,
        outside: Outside,
        dead: StreamLog,
        *,
        clock: Clock,
        ids: IdSource,
        limits: RunLimits,
    ) -> None:
        self._core = core
        self._inbox = inbox
        self._outside = outside
        self._dead = dead
        self._clock = clock
        self._ids = ids
        self._limits = limits
        self._places = asyncio.Semaphore(limits.calls_max)
        self._tasks: set[asyncio.Task[None]] = set()
        self._draws_failed = 0
        self.last_error = ""
        """The last error of a finalization; empty after a success."""

    def perform(self, effect: Effect, position: int) -> None:
        """Start `effect`. `position` is the ledger record with its facts."""
        if isinstance(effect, CancelEpisodes):
            self._outside.cancel_episodes(self._spec.run, effect)
        elif isinstance(effect, DrawTasks):
            self._spawn(self._draw_eval(effect) if effect.purpose is Purpose.EVAL else self._draw(effect, position))
        elif isinstance(effect, FinalizeGroup):
            self._spawn(self._finalize(effect))
        elif isinstance(effect, DeadLetter):
            self._spawn(self._dead_letter(effect))

    def cancel(self) -> None:
        """Cancel all work."""
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Cancel all work, and wait until it has ended."""
        self.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def _spec(self) -> RunSpec:
        return self._core.state.the_spec

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._inbox.recover_from(error)

    async def _draw(self, effect: DrawTasks, position: int) -> None:
        """Request training tasks once. The core repeats the request after an empty result."""
        try:
            answer = await self._outside.next_tasks(next_tasks_request(self._spec, effect, position))
            drawn = tasks_drawn(self._spec, effect, answer)
        except MeshError as error:
            await self._pause(self._draws_failed)
            self._draws_failed += 1
            exhausted = isinstance(error, OutOfRange)
            await self._inbox.enqueue(i.DrawFailed(purpose=effect.purpose, cause=str(error), exhausted=exhausted))
            return
        if not drawn.tasks:
            await self._pause(self._draws_failed)
        self._draws_failed = 0 if drawn.tasks else self._draws_failed + 1
        await self._inbox.enqueue(drawn)

    async def _draw_eval(self, effect: DrawTasks) -> None:
        """Request evaluation tasks, page by page, until the time of the evaluation is over."""
        give_up_at = self._clock.monotonic_s() + self._spec.eval_s_max
        num_failed = num_bytes = 0
        tasks: list[tuple[int, Task]] = []
        cause = ""
        while not cause:
            page = replace(
                effect, first_draw=effect.first_draw + len(tasks), num=min(PAGE_TASKS, effect.num - len(tasks))
            )
            try:
                answer = await self._outside.next_tasks(next_tasks_request(self._spec, page, 0))
                drawn = tasks_drawn(self._spec, page, answer).tasks
                error = "the split has no tasks"
            except OutOfRange as err:
                drawn, error = (), str(err)
            except MeshError as err:
                drawn, error = None, str(err)
            tasks += drawn or ()
            num_bytes += sum(len(msgspec.json.encode(task)) + _TASK_BYTES for _, task in drawn or ())
            if num_bytes > EVAL_BYTES_MAX:
                cause = (
                    f"the first {len(tasks)} tasks have more than {EVAL_BYTES_MAX} bytes, which fit into no ledger "
                    f"record: lower `run.eval_tasks` (now {effect.num})"
                )
            elif tasks and (drawn == () or len(tasks) >= effect.num):
                await self._inbox.enqueue(
                    i.TasksDrawn(
                        purpose=effect.purpose, tasks=tuple(tasks), step=effect.step, incarnation=effect.incarnation
                    )
                )
                return
            elif not drawn:
                cause = error if self._clock.monotonic_s() >= give_up_at else ""
                await self._pause(num_failed)
                num_failed += 1
        _log.warning("run %s: no evaluation of step %d: %s", self._spec.run, effect.step, cause)
        await self._inbox.enqueue(
            i.DrawFailed(purpose=effect.purpose, cause=cause, step=effect.step, incarnation=effect.incarnation)
        )

    async def _finalize(self, effect: FinalizeGroup) -> None:
        """Request a decision on a group. An unavailable reward service is retried without limit, an error about this
        group and a connection that is lost during the call `finalize_tries_max` times, and an error of the user's pure
        code not at all."""
        num_failed = num_rejected = 0
        while True:
            request = finalize_request(self._core.state, effect)
            if request is None:  # cancelled meanwhile: the core only needs to know that the request is done
                await self._inbox.enqueue(i.GroupDecided(group=effect.group, decision=GroupDecision.KEEP))
                return
            try:
                async with self._places:
                    answer = await self._outside.finalize_group(request)
                self.last_error = ""
                await self._inbox.enqueue(group_decided(effect.group, answer))
                return
            except MeshError as error:
                self.last_error = str(error)
                level = logging.WARNING if num_failed % 10 == 9 else logging.DEBUG
                _log.log(level, "group not finalized yet: group=%s: %s", effect.group, error)
                num_rejected += isinstance(error, InfraFailure) or not error.retryable
                if isinstance(error, GroupCodeFailed):
                    cause, _, frames = str(error).partition("\n")
                    await self._inbox.enqueue(i.FinalizeFailed(group=effect.group, cause=cause, traceback=frames))
                    return
                if num_rejected >= self._limits.finalize_tries_max:
                    await self._inbox.enqueue(i.FinalizeFailed(group=effect.group, cause=f"scorer: {error}"))
                    return
            await self._pause(num_failed)
            num_failed += 1

    async def _dead_letter(self, letter: DeadLetter) -> None:
        """Write a dead letter, for operators. A failure after the bus's timeout only loses the letter."""
        payload = dead_letter(letter, self._clock.wall_s()).SerializeToString()
        try:
            await self._dead.append(payload, msg_id=self._ids.new("dead"))
        except MeshError as error:
            _log.warning(
                "run %s: %s failed (%s), and its dead letter could not be stored: %s",
                self._spec.run,
                letter.episode,
                letter.cause,
                error,
            )

    async def _pause(self, num_failed: int) -> None:
        await self._clock.sleep(pause_after(num_failed + 1, self._limits.backoff_s, self._limits.backoff_s_max))
