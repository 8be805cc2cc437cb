"""The learner node: the client of the run, the compute thread and the loop.

    async with LearnerNode(config, RunAddress(address=gateway, access=access, run="r1")) as learner:
        await learner.wait()            # until the run ends; raises the error that stopped it
        learner.progress                # at any time

The node has no server. Leaving the context interrupts the learner like a crash, but cleanly: a later learner over the
same folder resumes from the newest checkpoint. `stop` finishes first: current update, checkpoint, version.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

from rollmesh.client import Client, RunAddress
from rollmesh.services.learner.commands import Commands
from rollmesh.services.learner.compute import ComputeThread
from rollmesh.services.learner.config import LearnerConfig
from rollmesh.services.learner.engine import OpenEngine, find_engine
from rollmesh.services.learner.loop import run_learner
from rollmesh.services.learner.metrics_log import MetricsLog
from rollmesh.services.learner.progress import LearnerProgress
from rollmesh.services.learner.publisher import Publisher
from rollmesh.services.learner.trainer_session import DataSnapshot, Parts
from rollmesh.shared.clock import Clock
from rollmesh.shared.membership.joined_node import JoinedNode
from rollmesh.shared.process.fault_points import Hook, noop
from rollmesh.shared.store.private_files import private_folder
from rollmesh.v1 import coordinator_pb2


class LearnerNode(JoinedNode):
    """One learner of one run. With a `coordinator` address it also joins the fleet for monitoring; training does not
    need it."""

    kind = coordinator_pb2.NODE_KIND_LEARNER
    serves = False

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
        """`at` is awaited at each `LearnerFaultPoint`. `open_engine` replaces `config.engine`, which may be a file
        relative to `base_dir`."""
        super().__init__(node_id=node_id, access=where.access, coordinator=coordinator, clock=clock)
        self._config = config
        self._where = where
        self._at = at
        self._data_snapshot = data_snapshot
        self._open_engine = open_engine
        self._base_dir = base_dir
        self._parts: Parts | None = None
        self.progress = LearnerProgress(self.clock)

    async def build(self, stack: AsyncExitStack) -> None:
        config, folder = self._config, Path(self._config.directory)
        open_engine = self._open_engine or find_engine(config.engine, self._base_dir)
        metrics = MetricsLog(folder, tensorboard=config.tensorboard)
        stack.callback(metrics.close)
        compute = ComputeThread(folder)
        stack.push_async_callback(compute.close, config.stop_s)
        files = ComputeThread(folder, "learner-publish")
        stack.push_async_callback(files.close, config.stop_s)
        saving = ComputeThread(folder, "learner-checkpoint")
        stack.push_async_callback(saving.close, config.stop_s)
        where = self._where
        client = await stack.enter_async_context(
            Client(
                where.address,
                token=where.access.token,
                tls=where.access.tls,
                retry=config.retry,
                clock=self.clock,
                payloads=where.payloads,
            )
        )
        run = client.run(where.run, policy=where.policy, learner=where.learner)
        commands = await stack.enter_async_context(Commands(run, config.retry, self.clock, self.progress))
        self._parts = Parts(
            config=config,
            run=run,
            holder=where.holder,
            compute=compute,
            saving=saving,
            commands=commands,
            publisher=Publisher(compute, files, config.publish, private_folder(folder / "publishing")),
            metrics=metrics,
            progress=self.progress,
            clock=self.clock,
            at=self._at,
            open_engine=open_engine,
            data_snapshot=self._data_snapshot,
        )

    async def run(self) -> None:
        """Train until the run has ended or a stop has finished."""
        await run_learner(self._entered())

    async def stop(self) -> None:
        """Finish the current update, write a checkpoint and publish. The run continues without a trainer."""
        await self.on_drain()
        await self.wait()

    def hello(self) -> coordinator_pb2.NodeHello:
        hello = super().hello()
        hello.runs.append(self._where.run)
        return hello

    def report(self) -> coordinator_pb2.NodeReport:
        return coordinator_pb2.NodeReport(waiting_for=self.progress.waiting_for, doing=self.progress.doing)

    async def on_drain(self) -> None:
        self._entered().commands.stop.set()

    def _entered(self) -> Parts:
        assert self._parts is not None, "not entered"
        return self._parts
