"""A run as processes, one for each service. They are restarted after a crash and stopped together.

    async with Supervisor(config, run_dir=Path("runs/mine"), base_dir=Path(".")) as mesh:
        channel = open_channel(mesh.layout.gateway, ...)     # any RunService client
        await mesh.finished()                               # until the learner is done; raises the error that stopped the mesh

Each process is `python -m rollmesh.mesh --services NAME` (for inference nodes, with the interpreter `inference.python`)
over the run folder, with its log in RUN/logs/NAME.log. All start at once and find each other in any order, also after a
restart. On exit, clients stop before the servers that they call: learner, rollout workers, the other services,
coordinator, nats; each within `stop_s`. An unusable configuration, or a process that fails too often, stops the mesh,
and `finished` raises the cause.

Enter it in a thread that runs as long as the mesh, preferably the main thread. When that thread ends, the kernel kills
every process and the processes that they started (nats-server, sandboxes, workers). So no process is left after kill -9
of this one. Collaborators: `child` (one process), `run_layout`, `run_lock`, `host` (what runs in each process).
"""  # noqa: E501, W505

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

import msgspec

from rollmesh.mesh.child import Child
from rollmesh.mesh.child_log import ChildLog
from rollmesh.mesh.config import CountsConfig, MeshConfig
from rollmesh.mesh.mesh import create_run
from rollmesh.mesh.mesh_services import NATS, is_inference, refuse_shared_port, service_names
from rollmesh.mesh.process_events import FILE, ProcessEvent, ProcessLog
from rollmesh.mesh.run_layout import RunLayout, open_layout
from rollmesh.mesh.run_lock import owned
from rollmesh.mesh.scaling import SCALABLE, NotScalable, ScaleAnswer, answer_requests
from rollmesh.services.inference.interpreter import check_interpreter, interpreter_of, is_this
from rollmesh.services.sandbox.engines.cleanup import clean_up_after
from rollmesh.shared.bus.embedded_server import find_binary
from rollmesh.shared.bus.jetstream_bus import check_servers
from rollmesh.shared.clock import Clock, SystemClock
from rollmesh.shared.config.loader import to_yaml
from rollmesh.shared.errors import AddressTaken, MeshError
from rollmesh.shared.net.ports import is_taken, owner_of
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.shared.store.private_files import private_opener
from rollmesh.v1 import coordinator_pb2, coordinator_pb2_grpc

HOST = (sys.executable, "-m", "rollmesh.mesh")
CONFIG_FILE = "mesh.yaml"
"""File in the run folder with the configuration that the processes read."""
LOGS = "logs"
_LEFTOVER_S_MAX = 5.0
"""Longest time until the processes of a killed supervisor have exited, in seconds."""
_POLL_S = 0.1
_DRAIN_CALL_S_MAX = 5.0
_log = logging.getLogger(__name__)
_ANSWERING = 2
_STAGES = {"learner": 0, "rollout": 1, "coordinator": 3, NATS: 4}
"""Order of the stop by kind. The other kinds stop together in between."""


class Supervisor:
    """The processes of a run. Implements `running_mesh.RunningMesh`."""

    def __init__(
        self,
        config: MeshConfig,
        *,
        run_dir: Path,
        base_dir: Path = Path(),
        services: Sequence[str] | None = None,
        hosts: Mapping[str, Sequence[str]] | None = None,
        command: Sequence[str] = HOST,
        environment: Mapping[str, str] | None = None,
        on_event: Callable[[ProcessEvent], None] = lambda _: None,
        clock: Clock | None = None,
        holds_lock: bool = False,
    ) -> None:
        """`services` limits the run to these services (default: all and nats). `hosts` names processes with several
        services instead.

        `holds_lock`: the caller holds `run_lock.owned` of the run folder, because it writes there before the mesh
        starts.
        """
        self.layout: RunLayout = open_layout(config, run_dir=run_dir, base_dir=base_dir)
        if hosts is None:
            refuse_shared_port(config, all_services(config) if services is None else services)
        self._hosts: dict[str, Sequence[str]] = dict(
            hosts or {service: (service,) for service in (all_services(config) if services is None else services)}
        )
        self._command = command
        self._environment = {**os.environ, "PYTHONFAULTHANDLER": "1", **(environment or {})}
        self._pythons = self._other_interpreters() if self._command == HOST else {}
        self._on_event = on_event
        self._clock = clock or SystemClock()
        self._holds_lock = holds_lock
        self._children: dict[str, Child] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._departures: dict[str, asyncio.Task[None]] = {}
        """Nodes that a lower count drains, by name."""
        self._changes: set[asyncio.Task[None]] = set()
        """Records of changed counts in the ledger, in progress."""
        self._stack = AsyncExitStack()
        self._done = asyncio.Event()
        self.failure: BaseException | None = None
        """The error that stopped the mesh; None while it runs."""
        self._failed = asyncio.Event()

    @property
    def pids(self) -> dict[str, int]:
        """Return the running processes, by name."""
        return {name: child.pid for name, child in self._children.items() if child.pid is not None}

    def kill(self, name: str) -> None:
        """Kill a process with SIGKILL. It is restarted, as after a crash."""
        self._children[name].kill()

    async def finished(self) -> None:
        """Wait until the learner is done or, without one, until an error. Raises the error: ConfigError, DiskFull,
        ProcessGaveUp."""
        await self._unless_failed(self._done.wait())

    async def stop_learner(self) -> None:
        """Let the learner exit cleanly within `stop_s`. The other services continue."""
        await self._stop([name for name, services in self._hosts.items() if "learner" in services])

    async def scale(self, counts: CountsConfig) -> ScaleAnswer:
        """Start and drain nodes until this host runs `counts`. Does not wait for them. Raises NotScalable.

        A node that is to leave is drained. If it has not left when its limits have passed, it is stopped. A node of
        these counts that has left, because a command drained it, is started again.
        """
        config = msgspec.structs.replace(self.layout.config, counts=counts)
        before, after = set(service_names(self.layout.config)), service_names(config)
        started = [name for name in after if name not in before or self._has_left(name)]
        leaving = sorted(before.difference(after))
        if shared := [name for name in leaving if self._hosts.get(name) != (name,)]:
            raise NotScalable(
                f"{', '.join(shared)} cannot leave: the service shares a process with others; stop the run, and resume "
                "it with processes.enabled=true"
            )
        self.layout = dataclasses.replace(self.layout, config=config)
        self._write_config()
        for name in started:
            if name not in self._departures:  # else it starts again once it has left
                self._add(name)
        for name in set(leaving).difference(self._departures):
            self._departures[name] = asyncio.create_task(self._depart(name), name=f"{name} leaves")
        if any("learner" in services for services in self._hosts.values()):
            self._record_counts()
        return ScaleAnswer(id="", started=tuple(started), draining=tuple(leaving))

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            if not self._holds_lock:
                stack.enter_context(owned(self.layout.run_dir))
            await self._until_addresses_are_free()
            await self._reach_bus()
            self._write_config()
            self._events = ProcessLog(self.layout.run_dir / FILE, clock=self._clock, on_event=self._on_event)
            stack.push_async_callback(self._stop_all)
            for name in self._hosts:
                self._start(name)
            if any("learner" in services for services in self._hosts.values()):
                await self._unless_failed(create_run(self.layout, limit_s=self.layout.config.processes.start_s))
            answering = asyncio.create_task(answer_requests(self.layout.run_dir, self.scale, self._clock), name="scale")
            stack.push_async_callback(_cancel, answering)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, kind: object, err: object, trace: object, /) -> None:
        await self._stack.aclose()

    # Starting ---------------------------------------------------------------------------------------------------------

    def _other_interpreters(self) -> dict[str, str]:
        """Return the interpreters of the processes that do not run with this one. Raises ConfigError."""
        config = self.layout.config.inference
        names = [name for name, services in self._hosts.items() if any(map(is_inference, services))]
        python = interpreter_of(config, self.layout.base_dir) if names else sys.executable
        if is_this(python):
            return {}
        check_interpreter(python, config)
        return dict.fromkeys(names, python)

    async def _until_addresses_are_free(self) -> None:
        """Wait until the processes of an earlier start have exited. AddressTaken if another process has an address."""
        layout, deadline_s = self.layout, self._clock.monotonic_s() + _LEFTOVER_S_MAX
        for name, address in fixed_addresses(layout).items():
            host, _, port = address.rpartition(":")
            while is_taken(host, int(port)):
                if self._clock.monotonic_s() > deadline_s:
                    raise AddressTaken(
                        f"{name} cannot listen on {address}: {owner_of(int(port))} has the port; stop it, or remove "
                        f"{layout.run_dir / ('nats/port' if name == NATS else 'addresses.json')} to take another port",
                        address=address,
                    )
                await self._clock.sleep(_POLL_S)

    async def _reach_bus(self) -> None:
        """Raise BusUnavailable or ConfigError now, and not after all restarts, if the servers at `bus.url` cannot be
        used, or without them the nats-server of this host."""
        if url := self.layout.config.bus.url:
            await check_servers(url, self.layout.bus_login())
        elif NATS in self._hosts:
            find_binary()

    def _write_config(self) -> None:
        """Write the configuration that the hosts read, without the keys of the command line."""
        config = self.layout.config
        plain = MeshConfig(**{name: getattr(config, name) for name in MeshConfig.__struct_fields__})
        path = self.layout.run_dir / CONFIG_FILE
        with open(path, "w", encoding="utf-8", opener=private_opener) as file:
            file.write(to_yaml(plain))

    def _start(self, name: str) -> None:
        config, run_dir = self.layout.config.processes, self.layout.run_dir
        child = self._children[name] = Child(
            name,
            [
                self._pythons.get(name, self._command[0]),
                *self._command[1:],
                *("--run-dir", str(run_dir), "--config", str(run_dir / CONFIG_FILE)),
                *("--base-dir", str(self.layout.base_dir), "--stop-s", str(config.stop_s)),
                *("--services", ",".join(self._hosts[name])),
            ],
            environment=self._environment,
            config=config,
            log=ChildLog(run_dir / LOGS / f"{name}.log", bytes_max=config.log_bytes_max),
            events=self._events,
            clock=self._clock,
        )
        task = self._tasks[name] = asyncio.create_task(child.run(), name=f"child {name}")
        task.add_done_callback(lambda task: self._on_end(name, task))

    def _on_end(self, name: str, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        if (err := task.exception()) is not None:
            self.failure = self.failure or err
            self._failed.set()
        elif "learner" in self._hosts[name]:
            self._done.set()

    async def _unless_failed(self, work: Awaitable[object]) -> None:
        tasks = [asyncio.ensure_future(work), asyncio.create_task(self._failed.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if self.failure is not None:
                raise self.failure
            tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    # Scaling ----------------------------------------------------------------------------------------------------------

    def _has_left(self, name: str) -> bool:
        """Return whether a node with a separate process has been drained by another command."""
        scalable = name.partition("-")[0] in SCALABLE and self._hosts.get(name) == (name,)
        return scalable and name not in self._departures and self._tasks[name].done()

    def _add(self, name: str) -> None:
        """Start a node that the counts have added."""
        if is_inference(name) and self._command == HOST:
            python = interpreter_of(self.layout.config.inference, self.layout.base_dir)
            if not is_this(python):
                self._pythons[name] = python
        self._hosts[name] = (name,)
        self._start(name)

    async def _depart(self, name: str) -> None:
        """Drain a node, stop it if it does not leave in time, and restart it if the counts contain it again."""
        limits, kind = self.layout.config, name.partition("-")[0]
        drain_s = {
            "inference": limits.inference.drain_s,
            "rollout": limits.rollout.worker.finish_s_max,
            "sandbox": limits.sandbox.drain_s,
        }
        try:
            await self._drain(name)
            limit_s = drain_s.get(kind, 0.0) + limits.processes.stop_s
            await asyncio.wait([self._tasks[name]], timeout=limit_s)
        except MeshError as error:  # it has not joined, or the coordinator is away
            _log.warning("%s is stopped without a drain: %s", name, error)
        if not self._tasks[name].done():
            await self._stop([name])
        del self._departures[name], self._children[name], self._tasks[name], self._hosts[name]
        if name in service_names(self.layout.config):
            self._add(name)

    async def _drain(self, name: str) -> None:
        async with open_channel(self.layout.coordinator, access=self.layout.access) as channel:
            stub: Any = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
            with typed_errors():
                await stub.Drain(coordinator_pb2.DrainRequest(node_id=name), timeout=_DRAIN_CALL_S_MAX)

    def _record_counts(self) -> None:
        """Record the changed counts in the ledger, in the background. If that fails, the next resume records them."""

        async def record() -> None:
            try:
                await create_run(self.layout)
            except MeshError as error:
                _log.warning("the changed counts are not in the ledger yet: %s", error)

        task = asyncio.create_task(record(), name="record counts")
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)

    # Stopping ---------------------------------------------------------------------------------------------------------

    async def _stop_all(self) -> None:
        """Stop clients before the servers that they call. If cancelled, kill the remaining processes."""
        await _cancel(*self._departures.values(), *self._changes)
        try:
            for _, names in itertools.groupby(sorted(self._tasks, key=self._stage), key=self._stage):
                await self._stop(list(names))
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            await asyncio.to_thread(self._clean_up_sandboxes)

    def _clean_up_sandboxes(self) -> None:
        """Remove what killed sandbox services have left. Their next start would do so, but a stop may precede it."""
        for folder in sorted(self.layout.run_dir.glob("sandbox-*")):
            try:
                clean_up_after(folder)
            except (MeshError, OSError) as error:
                _log.warning("cannot clean up after %s: %s", folder.name, error)

    def _stage(self, name: str) -> int:
        """Return the position of a process in the stop order, that of its last service."""
        return max(_STAGES.get(service.partition("-")[0], _ANSWERING) for service in self._hosts[name])

    async def _stop(self, names: Sequence[str]) -> None:
        for name in names:
            self._children[name].stop()
        if names:
            await asyncio.wait([self._tasks[name] for name in names])


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def fixed_addresses(layout: RunLayout) -> dict[str, str]:
    """Return host:port of the services that keep it over restarts."""
    found = {"coordinator": layout.coordinator, "gateway": layout.gateway, "depot": layout.depot}
    nats = layout.bus_server().known_url() if not layout.config.bus.url else ""
    return {**found, **({NATS: nats.partition("://")[2]} if nats else {})}


def needs_processes(config: MeshConfig, base_dir: Path) -> bool:
    """Return whether the inference nodes of this host need another interpreter than this process. Raises
    ConfigError."""
    return config.counts.inference > 0 and not is_this(interpreter_of(config.inference, base_dir))


def hosts_in_one_process(config: MeshConfig, base_dir: Path) -> dict[str, Sequence[str]] | None:
    """Return the hosts of a run whose services share a process where they can, or None if all of them can. Raises
    ConfigError.

    With `max_staleness` > 0 the learner has a separate process, because it trains while the engine generates. In one
    process both wait for the same interpreter lock after every tensor operation (`python -m benchmarks race` has the
    figures). Inference nodes that need another interpreter have separate processes. So has the learner then, because a
    host exits when its learner is done, and the last evaluation follows.
    """
    others = needs_processes(config, base_dir)
    if not others and config.run.max_staleness == 0:
        return None
    names = all_services(config)
    apart = [name for name in names if name == "learner" or (others and is_inference(name))]
    return {"services": [name for name in names if name not in apart], **{name: (name,) for name in apart}}


def all_services(config: MeshConfig) -> list[str]:
    """Return every service in the order of start, including the embedded nats-server."""
    return [*([] if config.bus.url else [NATS]), *service_names(config)]
