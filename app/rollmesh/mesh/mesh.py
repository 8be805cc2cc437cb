"""Every service in one event loop, with gRPC on free ports and a real nats-server. For demos, tests and laptops.

    config = load_config(MeshConfig, "run.yaml", ["run.max_staleness=1"])
    async with Mesh(config, run_dir=Path("runs/mine"), base_dir=Path(".")) as mesh:
        channel = open_channel(mesh.gateway_address, access=mesh.access)     # any RunService client, the built-in learner is one
        await mesh.finished()                                              # until the learner is done

The servicers, the calls, the bus and the engines are those of a cluster. Only the number of processes differs. Model
compute runs in separate threads, so that a busy engine does not expire a lease. On entry the services start in the
order of `service_names`, and the run is created or resumed. On exit they stop in reverse order. Entry also sets the
interpreter's switch interval and collector thresholds for the whole process (`shared.process.interpreter_tuning`).

| service | waits for | unblocked by |
| --- | --- | --- |
| learner | a batch | the coordinator: READY groups |
| rollout | episode leases | the coordinator: admission under the published step |
| inference | weights | the learner's first publication, through depot and Join |
| coordinator | tasks, group decisions | data, reward |
"""  # noqa: E501, W505

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rollmesh.mesh.changes import change_id, diff, note_recorded, recorded, settings_of
from rollmesh.mesh.config import MeshConfig
from rollmesh.mesh.joined_nodes import keep_joined
from rollmesh.mesh.mesh_services import MeshService, build_service, refuse_shared_port, service_names
from rollmesh.mesh.observe import source_of
from rollmesh.mesh.probes import ProbeServer
from rollmesh.mesh.run_layout import RunLayout, open_layout
from rollmesh.services.coordinator.fact_codec import encode
from rollmesh.shared.bus.bus import Bus
from rollmesh.shared.bus.embedded_server import EmbeddedServer
from rollmesh.shared.bus.jetstream_bus import JetStreamBus
from rollmesh.shared.bus.permissions import role_of
from rollmesh.shared.config.extras import libraries_needed
from rollmesh.shared.process.interpreter_tuning import tune_process
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.shared.telemetry import Telemetry, log_context
from rollmesh.v1 import events_pb2, run_pb2, run_pb2_grpc

CREATE_S_MAX = 30.0


class Mesh:
    """All services of a run, or those that `services` names."""

    def __init__(
        self,
        config: MeshConfig,
        *,
        run_dir: Path,
        base_dir: Path = Path(),
        services: Sequence[str] | None = None,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        layout: RunLayout | None = None,
        bus_url: str = "",
    ) -> None:
        """`options` are keyword arguments for the nodes of single services, e.g. {"learner": {"at": hook}}. `layout` is
        the known layout of a mesh on another host. `bus_url` is the embedded server that another process of the run
        hosts. Raises ConfigError."""
        self.layout: RunLayout = layout or open_layout(config, run_dir=run_dir, base_dir=base_dir)
        self.nats: EmbeddedServer | None = None
        """The embedded server; None if the configuration names a cluster."""
        self._names = list(service_names(config)) if services is None else list(services)
        refuse_shared_port(config, self._names)
        self._options = options or {}
        self._services: dict[str, tuple[MeshService, Any]] = {}
        process = "mesh" if services is None else "+".join(services) or "nats"
        self.telemetry = Telemetry(config.telemetry, folder=self.layout.run_dir, process=process)
        """Traces and metrics, while the mesh is entered."""
        self._joined: asyncio.Task[None] | None = None
        """Writes the list of joined nodes, in the coordinator's process."""
        self._stack = AsyncExitStack()
        self.entered = False
        """Whether all services have started."""
        self._bus: Bus | None = None
        self._bus_url = bus_url or self.layout.config.bus.url

    @property
    def run(self) -> str:
        return self.layout.run

    @property
    def access(self) -> Access:
        """The credentials of a client."""
        return self.layout.access

    @property
    def gateway_address(self) -> str:
        """host:port of RunService."""
        return self.layout.gateway

    @property
    def running(self) -> tuple[str, ...]:
        """Return the names of the services that run here, in the order of their start."""
        return tuple(self._services)

    def service(self, name: str) -> Any:
        """Return a running service, e.g. `inference-0`."""
        return self._services[name][1]

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.telemetry)
            if self.layout.config.network.probes:
                await stack.enter_async_context(
                    ProbeServer(self.layout.config.network.probes, ready=lambda: self._takes_work)
                )
            self._bus = await self._connect(stack)
            stack.push_async_callback(self._stop_all)
            for name in self._names:
                if name == "learner":
                    await create_run(self.layout)
                await self.start(name)
            self._stack = stack.pop_all()
        tune_process()
        self.entered = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _connect(self, stack: AsyncExitStack) -> Bus | None:
        """Return the bus; None if no service here uses it."""
        url, role = self._bus_url, role_of(self._names)
        if not url:
            self.nats = self.layout.bus_server()
            await stack.enter_async_context(self.nats)
            url = self.nats.url
        if not role:
            return None
        bus = await JetStreamBus.connect(url, login=self.layout.bus_login(role))
        payloads = self.layout.with_payloads(bus)
        stack.push_async_callback(payloads.close)
        return payloads

    async def start(self, name: str) -> Any:
        """Start a service, also after `stop`."""
        assert name not in self._services, f"{name} runs already"
        assert self._bus is not None or not role_of([name]), "enter the mesh first"
        trained = {"run": self.run} if name == "learner" else {}  # other services may serve runs of other names
        # The tasks that the service starts inherit the context.
        with log_context(node=name, **trained), libraries_needed(name):
            service = build_service(name, self.layout, self._bus, **self._options.get(name, {}))
            self._services[name] = (service, await service.__aenter__())
        node = self._services[name][1]
        self.telemetry.add_source(name, source_of(name, node, self.layout.run_dir, self.access.tls))
        if name == "coordinator" and self.telemetry.is_on:
            self._joined = asyncio.create_task(keep_joined(node.fleet_nodes, self.layout.run_dir), name="joined nodes")
        return node

    async def stop(self, name: str) -> None:
        """Stop a service cleanly."""
        service, _ = self._services.pop(name)
        self.telemetry.remove_source(name)
        if name == "coordinator" and self._joined is not None:
            self._joined.cancel()
            await asyncio.gather(self._joined, return_exceptions=True)
        await service.__aexit__(None, None, None)

    @property
    def drainable(self) -> list[Any]:
        """Return the running nodes that can drain: all but the coordinator."""
        return [node for name, (_, node) in self._services.items() if name != "coordinator"]

    async def drain(self) -> None:
        """Drain every node here. `finished` returns when they are done."""
        await asyncio.gather(*(node.drain() for node in self.drainable))

    @property
    def _takes_work(self) -> bool:
        """Whether every service here takes work. The coordinator does from its start on."""
        return self.entered and bool(self._services) and all(node.takes_work for node in self.drainable)

    async def stop_learner(self) -> None:
        """Let the learner finish its update, write a checkpoint, publish and exit. The other services continue."""
        await self.service("learner").stop()

    async def restart(self, name: str) -> Any:
        """Restart a service. Its address stays, or its peers receive the new one."""
        await self.stop(name)
        return await self.start(name)

    async def _stop_all(self) -> None:
        """Stop the services in reverse order. A service that fails to stop does not prevent the others from
        stopping."""
        failures = []
        for name in reversed(list(self._services)):
            try:
                await self.stop(name)
            except (OSError, RuntimeError, TimeoutError) as failure:
                failures.append(failure)
        if failures:
            raise ExceptionGroup("services did not stop cleanly", failures)

    async def finished(self) -> None:
        """Wait until the learner is done or, without one here, until every service here has drained. Raises the error
        that ended a service earlier.

        A service that has drained is stopped immediately. A service that is stopped or restarted meanwhile is no longer
        watched.
        """
        watches = {asyncio.create_task(end, name=f"watch {name}"): name for name, end in self._ends()}
        disk = {asyncio.create_task(self.nats.watch_disk(), name="watch the disk")} if self.nats is not None else set()
        try:
            while watches:
                done, _ = await asyncio.wait({*watches, *disk}, return_when=asyncio.FIRST_COMPLETED)
                for task in done & disk:
                    task.result()  # it ends only with an error
                for task in done:
                    name = watches.pop(task)
                    if not task.cancelled():
                        task.result()
                        if name == "learner":
                            return
                        await self.stop(name)
        finally:
            for task in (*watches, *disk):
                task.cancel()
            await asyncio.gather(*watches, *disk, return_exceptions=True)

    def _ends(self) -> Iterator[tuple[str, Coroutine[Any, Any, None]]]:
        """Yield a wait for the end of each service. All can be drained except the coordinator, which ends only with an
        error."""
        for name, (_, service) in self._services.items():
            yield name, service.failed() if name == "coordinator" else service.wait()


async def create_run(layout: RunLayout, *, limit_s: float = CREATE_S_MAX) -> None:
    """Create the run at the coordinator, or resume it. Changed settings are recorded in the ledger.

    Raises InvalidInput, RunExists, ChangeRefused; DeadlineExceeded if the coordinator does not answer within `limit_s`.
    """
    settings = settings_of(layout.config, layout.run_dir)
    known = recorded(layout.run_dir)
    changes = diff(known, settings) if known is not None else ()
    spec = encode(layout.config.run.spec(), events_pb2.RunSpec)
    async with open_channel(layout.coordinators, access=layout.access) as channel:
        stub: Any = run_pb2_grpc.RunServiceStub(channel)
        with typed_errors():
            if changes:
                encoded = [encode(change, events_pb2.ConfigChange) for change in changes]
                change = run_pb2.ChangeRunRequest(spec=spec, changes=encoded, change_id=change_id(changes))
                await stub.ChangeRun(change, timeout=limit_s, wait_for_ready=True)
            else:
                await stub.CreateRun(run_pb2.CreateRunRequest(spec=spec), timeout=limit_s, wait_for_ready=True)
    if changes or known is None:
        note_recorded(layout.run_dir, settings)
