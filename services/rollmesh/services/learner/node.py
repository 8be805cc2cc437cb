"""A learner put together: client, compute thread, watcher, loop, as one async context.

    async with LearnerNode(config, RunAddress(address=gateway, access=access, run="r1")) as learner:
        await learner.wait()            # until the run ends; raises what stopped it
        learner.progress                # at any time

It runs no server. Leaving the context ends it where it stands, as a crash would but in order: a later learner over the same folder
goes on from the newest checkpoint. `stop` finishes first: present update, checkpoint, version.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from rollmesh.services.learner.commands import Commands
from rollmesh.services.learner.compute import ComputeThread
from rollmesh.services.learner.config import LearnerConfig
from rollmesh.services.learner.engine import OpenEngine, find_engine
from rollmesh.services.learner.loop import run_learner
from rollmesh.services.learner.metrics_log import MetricsLog
from rollmesh.services.learner.progress import Progress
from rollmesh.services.learner.publisher import Publisher
from rollmesh.services.learner.run_client import RunClient
from rollmesh.services.learner.trainer_session import DataSnapshot, Parts
from rollmesh.shared.clients.trainer import RunAddress
from rollmesh.shared.clock import Clock, SystemClock
from rollmesh.shared.fault_points import Hook, noop
from rollmesh.shared.membership import Membership, PassiveHandler
from rollmesh.v1 import coordinator_pb2

_log = logging.getLogger(__name__)


class LearnerNode:
    """One learner of one run. With a `coordinator` address it also shows itself in the fleet, which nothing depends on."""

    def __init__(
        self,
        config: LearnerConfig,
        where: RunAddress,
        *,
        clock: Clock | None = None,
        at: Hook = noop,
        data_snapshot: DataSnapshot | None = None,
        open_engine: OpenEngine | None = None,
        coordinator: str = "",
        node_id: str = "learner",
        base_dir: str | Path | None = None,
    ) -> None:
        """`at` is awaited at each `LearnerFaultPoint`; `open_engine` replaces the one that `config.engine` names, in `base_dir` if it is a file."""
        self._config = config
        self._where = where
        self._clock = clock or SystemClock()
        self._at = at
        self._data_snapshot = data_snapshot
        self._open_engine = open_engine
        self._coordinator = coordinator
        self._node_id = node_id
        self._base_dir = base_dir
        self._stack = AsyncExitStack()
        self._commands: Commands | None = None
        self._task: asyncio.Task[None] | None = None
        self.progress = Progress(self._clock)

    async def __aenter__(self) -> Self:
        open_engine = self._open_engine or find_engine(self._config.engine, self._base_dir)
        async with AsyncExitStack() as stack:
            parts = await self._parts(stack, open_engine)
            self._commands = parts.commands
            if self._coordinator:
                await stack.enter_async_context(self._membership())
            self._task = asyncio.create_task(run_learner(parts), name=f"learner {self._where.run}")
            self._task.add_done_callback(_log_end)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._task is not None:
                self._task.cancel()
                await asyncio.wait([self._task])
        finally:
            await self._stack.aclose()

    async def wait(self) -> None:
        """Returns once the run has ended, or a stop is done. Raises what stopped the learner before that."""
        assert self._task is not None, "not entered"
        await asyncio.shield(self._task)

    async def stop(self) -> None:
        """Finishes the present update, writes a checkpoint, publishes, and returns; the run goes on without a trainer."""
        assert self._commands is not None, "not entered"
        self._commands.stop.set()
        await self.wait()

    async def _parts(self, stack: AsyncExitStack, open_engine: OpenEngine) -> Parts:
        config, folder = self._config, Path(self._config.directory)
        metrics = MetricsLog(folder, tensorboard=config.tensorboard)
        stack.callback(metrics.close)
        compute = ComputeThread(folder)
        stack.push_async_callback(compute.close, config.stop_s)
        client = await stack.enter_async_context(RunClient(self._where, config.retry, self._clock))
        commands = await stack.enter_async_context(Commands(client, config.retry, self._clock, self.progress))
        return Parts(
            config=config,
            client=client,
            compute=compute,
            commands=commands,
            publisher=Publisher(client, compute, config.publish, folder / "publishing"),
            metrics=metrics,
            progress=self.progress,
            clock=self._clock,
            at=self._at,
            open_engine=open_engine,
            data_snapshot=self._data_snapshot,
        )

    def _membership(self) -> Membership:
        hello = coordinator_pb2.NodeHello(
            node_id=self._node_id, kind=coordinator_pb2.NODE_KIND_LEARNER, capacity=1, runs=[self._where.run]
        )
        assert self._commands is not None
        handler = _Visible(hello, self.progress, self._commands)
        return Membership(self._coordinator, access=self._where.access, handler=handler, clock=self._clock)


class _Visible(PassiveHandler):
    """A node that says what it waits for, and stops after the present update when it is drained."""

    def __init__(self, hello: coordinator_pb2.NodeHello, progress: Progress, commands: Commands) -> None:
        super().__init__(hello)
        self._progress = progress
        self._commands = commands

    async def on_drain(self) -> None:
        self._commands.stop.set()

    def report(self) -> coordinator_pb2.NodeReport:
        return coordinator_pb2.NodeReport(waiting_for=self._progress.waiting_for, doing=self._progress.doing)


def _log_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (err := task.exception()) is not None:
        _log.error("%s stopped: %s: %s", task.get_name(), type(err).__name__, err)
