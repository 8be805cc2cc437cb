"""A coordinator as a node: bus, runs, fleet and both services behind one gRPC server.

    async with CoordinatorNode(config, folder=..., access=..., bus_url=...) as node:
        node.address                # both CoordinatorService and RunService
        await node.failed()         # raises when it cannot lead on: fenced by another coordinator, or no ledger

Leaving the context stops it. A later node with the same folder and bus resumes its runs.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from rollmesh.services.coordinator.answer_keys import AnswerKeys
from rollmesh.services.coordinator.applications import Applications
from rollmesh.services.coordinator.config import CoordinatorConfig
from rollmesh.services.coordinator.core.fleet import Fleet
from rollmesh.services.coordinator.dead_letters import DeadLetters
from rollmesh.services.coordinator.fleet_keeper import FleetKeeper
from rollmesh.services.coordinator.mesh_description import MeshDescriber, MeshDescription
from rollmesh.services.coordinator.peers import Outgoing
from rollmesh.services.coordinator.run_servicer import RunServicer
from rollmesh.services.coordinator.run_storage import RunStorage
from rollmesh.services.coordinator.runs import Runs
from rollmesh.services.coordinator.servicer import CoordinatorServicer
from rollmesh.shared.bus.bus import Bus
from rollmesh.shared.bus.jetstream_bus import JetStreamBus
from rollmesh.shared.bus.login import BusLogin
from rollmesh.shared.clock import Clock, SystemClock
from rollmesh.shared.domain.ids import IdSource, RandomIds
from rollmesh.shared.errors import Internal, MeshError
from rollmesh.shared.process.fault_points import Hook, noop
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.limits import RECORDED, RECORDED_TEXTS
from rollmesh.shared.rpc.server import RpcServer
from rollmesh.v1 import coordinator_pb2, coordinator_pb2_grpc, run_pb2_grpc

_log = logging.getLogger(__name__)


class CoordinatorNode:
    """One coordinator. Give it a bus, or the URL of one."""

    def __init__(
        self,
        config: CoordinatorConfig,
        *,
        folder: str | Path,
        access: Access,
        bus: Bus | None = None,
        bus_url: str = "",
        clock: Clock | None = None,
        ids: IdSource | None = None,
        offer: MeshDescription | None = None,
        at: Hook = noop,
    ) -> None:
        """`offer` is the description that GetMesh returns. Without it nodes are configured by hand. `at` is awaited at
        each `ArchiveFaultPoint` of each run."""
        self._at = at
        assert (bus is None) != (not bus_url), "a bus or the URL of one"
        self._config = config
        self._folder = Path(folder)
        self._access = access
        self._bus = bus
        self._bus_url = bus_url
        self._clock = clock or SystemClock()
        self._ids = ids or RandomIds()
        self._offer = offer
        self._stack = AsyncExitStack()
        self._server = RpcServer(config.server, access=access)
        self._runs: Runs | None = None
        self._keeper: FleetKeeper | None = None
        self._failure: asyncio.Future[NoReturn] | None = None

    @property
    def address(self) -> str:
        """host:port of CoordinatorService and RunService."""
        return self._server.address

    def now_s(self) -> float:
        """Return the time on the monotonic clock of its runs, in seconds."""
        return self._clock.monotonic_s()

    @property
    def runs(self) -> Runs:
        """The runs it leads, once entered: for a process that holds it."""
        assert self._runs is not None, "not started"
        return self._runs

    def fleet_nodes(self) -> list[coordinator_pb2.FleetNode]:
        """Every node that has joined, once entered."""
        assert self._keeper is not None, "not started"
        return self._keeper.nodes(None)

    async def failed(self) -> NoReturn:
        """Wait until this coordinator can't lead on, and raise why: Fenced or DataLoss. The process should exit
        then."""
        assert self._failure is not None, "not started"
        await asyncio.shield(self._failure)
        raise AssertionError("a failure is an exception")

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await self._start(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _start(self, stack: AsyncExitStack) -> None:
        """Start the server last, because no request may be answered before every run is recovered. Stop in an order in
        which no client waits."""
        self._failure = asyncio.get_running_loop().create_future()
        self._failure.add_done_callback(lambda failure: failure.exception() if not failure.cancelled() else None)
        bus = self._bus
        if bus is None:
            bus = await JetStreamBus.connect(self._bus_url, login=BusLogin.of(self._access))
            stack.push_async_callback(bus.close)
        keeper = self._keeper = self._make_keeper()
        outgoing = Outgoing(keeper, access=self._access, call_s=self._config.run.call_s)
        stack.push_async_callback(outgoing.close)
        stack.push_async_callback(self._server.stop)
        stack.callback(keeper.close)
        self._runs = self._make_runs(bus, outgoing, keeper.fleet)
        stack.push_async_callback(self._runs.close)
        await self._runs.recover_all()
        for loop, name in ((keeper.run(), "fleet"), (self._runs.retire_forever(), "ended runs")):
            task = asyncio.create_task(loop, name=name)
            task.add_done_callback(self._on_loop_ended)
            stack.push_async_callback(_cancel, task)
        self._add_services(self._runs, keeper, outgoing, DeadLetters(bus), AnswerKeys(bus))
        await self._server.start()

    def _make_keeper(self) -> FleetKeeper:
        return FleetKeeper(
            self._config.fleet,
            lambda: self.runs.drivers,
            lambda: self.runs.goals(),
            clock=self._clock,
            coordinator_id=self._ids.new("coordinator"),
            commands_max=self._config.commands_max,
        )

    def _make_runs(self, bus: Bus, outgoing: Outgoing, fleet: Fleet) -> Runs:
        return Runs(
            RunStorage(bus, self._folder / "runs", self._config.streams),
            outgoing,
            fleet,
            clock=self._clock,
            ids=self._ids,
            config=self._config,
            on_failure=self._on_failure,
            at=self._at,
        )

    def _add_services(
        self, runs: Runs, keeper: FleetKeeper, outgoing: Outgoing, dead: DeadLetters, answer_keys: AnswerKeys
    ) -> None:
        limit_s = self._config.server.deadline_s
        mesh = MeshDescriber(self._offer, runs, keeper)
        applications = Applications(self._clock)
        coordinator = CoordinatorServicer(
            runs,
            keeper,
            self._clock,
            deadline_s=limit_s,
            mesh=mesh,
            answer_keys=answer_keys,
            applications=applications,
        )
        add_coordinator = coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server
        self._server.add(add_coordinator, coordinator, limits=RECORDED)
        run = RunServicer(
            runs,
            keeper,
            outgoing,
            dead,
            mesh,
            clock=self._clock,
            ids=self._ids,
            deadline_s=limit_s,
            message_bytes_max=self._config.server.message_bytes_max,
            submitted=self._config.run.submitted,
            samples=self._config.run.samples,
            applications=applications,
        )
        self._server.add(run_pb2_grpc.add_RunServiceServicer_to_server, run, limits=RECORDED_TEXTS)

    def _on_loop_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            name = task.get_name()
            _log.error("the loop `%s` failed", name, exc_info=error)
            self._on_failure("*", Internal(f"the loop `{name}` failed with {type(error).__name__}; see the log"))

    def _on_failure(self, run: str, error: MeshError) -> None:
        _log.error("run %s: %s", run, error)
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
