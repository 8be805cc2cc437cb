"""A NATS cluster of real servers on this host, whose servers can be killed, stopped, and cut off from clients and from
each other.

Clients and servers reach a server through relays. A relay that is cut transfers nothing and closes nothing, as a
network that drops every packet; what was sent meanwhile arrives when it is joined again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rollmesh.app.nats_files import make_logins
from rollmesh.shared.bus.embedded_server import find_binary
from rollmesh.shared.bus.jetstream_bus import JetStreamBus, JetStreamConfig
from rollmesh.shared.bus.login import BusLogin
from rollmesh.shared.bus.permissions import OPERATOR
from rollmesh.shared.bus.server_config import (
    ClusterMember,
    MeshUsers,
    ServerSettings,
    server_config,
    tls_paths,
    user_of,
)
from rollmesh.shared.net.ports import lasting_ports
from rollmesh.shared.process.process_launch import bound_to_parent
from rollmesh.shared.rpc.access import Tls

HOST = "127.0.0.1"
MESH = "lab"
_READY_S_MAX = 120.0
_CHUNK_BYTES = 1 << 16


class Relay:
    """Transfers bytes between the clients of one port and another port of this host."""

    def __init__(self, target: int) -> None:
        self.port = lasting_ports(1)[0]
        self.target = target
        self._joined = asyncio.Event()
        self._joined.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, HOST, self.port)

    def cut(self) -> None:
        """Transfer nothing more."""
        self._joined.clear()

    def join(self) -> None:
        """Transfer what waits, and continue."""
        self._joined.set()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._joined.wait()
            there, back = await asyncio.open_connection(HOST, self.target)
            pumps = [asyncio.create_task(self._pump(reader, back)), asyncio.create_task(self._pump(there, writer))]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
                back.transport.abort()
        except (OSError, asyncio.CancelledError):
            pass  # the target does not run, or the relay is closed
        finally:
            writer.transport.abort()
            self._tasks.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_CHUNK_BYTES):
            await self._joined.wait()
            writer.write(data)
            await writer.drain()


class Relays:
    """Relays in a separate thread, because the loop of a test may be blocked while the run uses the cluster."""

    def __init__(self, relays: Iterable[Relay]) -> None:
        self._relays = tuple(relays)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relays", daemon=True)

    async def start(self) -> None:
        self._thread.start()
        for relay in self._relays:
            await self._run(relay.start())

    async def each(self, relays: Iterable[Relay], change: Callable[[Relay], None]) -> None:
        async def all_of_them() -> None:
            for relay in relays:
                change(relay)

        await self._run(all_of_them())

    async def close(self) -> None:
        for relay in self._relays:
            await self._run(relay.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)
        self._loop.close()

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


class NatsProcess:
    """One server of the cluster."""

    def __init__(self, name: str, folder: Path, client_port: int, route_port: int) -> None:
        self.name = name
        self.folder = folder
        self.client_port = client_port
        self.route_port = route_port
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None or self._process.poll() is not None else self._process.pid

    def start(self) -> None:
        assert self.pid is None
        with (self.folder / "server.log").open("ab") as log:
            command = bound_to_parent([find_binary(), "-c", str(self.folder / "nats.conf")])
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def signal(self, number: int) -> None:
        if self.pid is not None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it with SIGKILL, and wait until it has exited."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class NatsCluster:
    """Servers `a`, `b`, `c`. One mesh, `lab`, has an account."""

    def __init__(
        self,
        folder: Path,
        *,
        names: Sequence[str] = ("a", "b", "c"),
        tls: Tls | None = None,
        member: bool = True,
        passwords: Mapping[str, str] | None = None,
    ) -> None:
        """`member` false: servers without a cluster. `passwords` are those of another cluster, by role."""
        self.folder = folder
        self.logins = folder / "logins" / MESH
        self.passwords = passwords or make_logins(self.logins, MESH)
        self._tls = tls
        self._member = member
        ports = lasting_ports(2 * len(names))
        self.servers = {
            name: NatsProcess(name, folder / name, ports[2 * n], ports[2 * n + 1]) for n, name in enumerate(names)
        }
        self._clients = {name: Relay(server.client_port) for name, server in self.servers.items()}
        self._routes = {(a, b): Relay(self.servers[b].route_port) for a in names for b in names if a != b}
        self._relays = Relays([*self._clients.values(), *self._routes.values()])

    @property
    def url(self) -> str:
        return self.url_of(*self.servers)

    def url_of(self, *names: str) -> str:
        scheme = "nats" if self._tls is None else "tls"
        return ",".join(f"{scheme}://{HOST}:{self._clients[name].port}" for name in names)

    def login(self, role: str = OPERATOR) -> BusLogin:
        return BusLogin(user=user_of(MESH, role), password=self.passwords[role], tls=self._tls)

    async def connect(self, role: str = OPERATOR, *names: str, config: JetStreamConfig | None = None) -> JetStreamBus:
        return await JetStreamBus.connect(self.url_of(*(names or self.servers)), login=self.login(role), config=config)

    async def connect_patiently(self, role: str) -> JetStreamBus:
        """Connect to servers that have just been started."""
        return await self.connect(role, config=JetStreamConfig(connect_s=_READY_S_MAX))

    def name_at(self, address: str) -> str:
        """Return the server behind an address of its relay."""
        return next(name for name, relay in self._clients.items() if address == f"{HOST}:{relay.port}")

    async def cut(self, name: str) -> None:
        """Cut a server off from clients and from the other servers."""
        await self._relays.each(self._relays_of(name), Relay.cut)

    async def cut_routes(self, name: str) -> None:
        """Cut a server off from the other servers only."""
        await self._relays.each([relay for pair, relay in self._routes.items() if name in pair], Relay.cut)

    async def join(self, name: str) -> None:
        """End `cut` or `cut_routes`."""
        await self._relays.each(self._relays_of(name), Relay.join)

    def _relays_of(self, name: str) -> list[Relay]:
        return [self._clients[name], *(relay for pair, relay in self._routes.items() if name in pair)]

    async def __aenter__(self) -> Self:
        await self._relays.start()
        for server in self.servers.values():
            self._write(server)
            server.start()
        await self.ready()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in self.servers.values():
            server.signal(signal.SIGCONT)
            server.kill()
        await self._relays.close()

    async def ready(self) -> None:
        """Wait until every server answers, and the cluster has a leader."""
        async with asyncio.timeout(_READY_S_MAX):
            for name in self.servers:
                while True:
                    with suppress(OSError):
                        _, writer = await asyncio.open_connection(HOST, self.servers[name].client_port)
                        writer.close()
                        break
                    await asyncio.sleep(0.05)
            bus = await self.connect(
                config=JetStreamConfig(connect_s=_READY_S_MAX, deadline_s=_READY_S_MAX, attempt_s=0.5)
            )
            try:
                await bus.names()
            finally:
                await bus.close()

    async def until_current(self, name: str, *, limit_s: float) -> None:
        """Wait until a server has every record of every stream, so that the loss of another server leaves a
        majority."""
        async with asyncio.timeout(limit_s):
            bus = await self.connect(*(OPERATOR, *(one for one in self.servers if one != name)))
            try:
                while not await _has_all(bus, name):  # noqa: ASYNC110 (the servers report nothing)
                    await asyncio.sleep(0.1)
            finally:
                await bus.close()

    def _write(self, server: NatsProcess) -> None:
        server.folder.mkdir(parents=True, exist_ok=True)
        tls = self._tls
        member = ClusterMember(
            cluster=f"lab-{self.folder.name}",
            server=server.name,
            route_password="route-password",
            routes=[f"{HOST}:{relay.port}" for (a, _), relay in self._routes.items() if a == server.name],
            route_port=server.route_port,
        )
        text = server_config(
            ServerSettings(
                host=HOST,
                port=server.client_port,
                store=str(server.folder),
                payload_bytes_max=8 << 20,
                store_bytes_max=16 << 30,
                sync_always=False,
                meshes=[MeshUsers(mesh=MESH, passwords=self.passwords)],
                member=member if self._member else None,
                tls=None if tls is None else tls_paths(tls.ca, tls.certificate, tls.key),
            )
        )
        (server.folder / "nats.conf").write_text(text)


async def _has_all(bus: JetStreamBus, server: str) -> bool:
    return all([(await bus.copies(stream)).get(server, False) for stream in await bus.names()])
