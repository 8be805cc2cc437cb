"""A client of a running mesh for `status`, `drain`, `stop` and `delete`, at the folder of a run on this host or at an
address.

It only reads, except for Drain, StopRun and DeleteRun. Collaborators: `run_folder` (the address of a run),
`mesh.security` (TLS files from `security.*` overrides), `status_view` (shows the result).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from rollmesh.app.run_folder import RunFolder, open_folder
from rollmesh.mesh.joining import own_security, refuse_without_tls
from rollmesh.mesh.run_layout import open_layout
from rollmesh.mesh.run_lock import still_starting
from rollmesh.mesh.security import open_access
from rollmesh.shared.clock import Clock
from rollmesh.shared.errors import (
    ConfigError,
    DeadlineExceeded,
    MeshError,
    Unavailable,
    Unimplemented,
    UnknownNode,
    UnknownRun,
)
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import ChannelConfig, open_channel
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.v1 import coordinator_pb2, coordinator_pb2_grpc, run_pb2, run_pb2_grpc

T = TypeVar("T")

REMEDY = "name the folder of a run on this host, or --join HOST:PORT and --token-file FILE"
CALL_S_MAX = 5.0
DELETE_S_MAX = 60.0
POLL_S = 0.5
GONE = coordinator_pb2.NODE_STATE_DEAD


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAddress:
    """A public address of a mesh, with the credentials of the caller."""

    address: str
    access: Access
    run: Path | None = None
    """The folder of the run, if the user named one."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Add the remedy to Unavailable, if no mesh runs at the address. Raises ConfigError if it accepts only TLS."""
        try:
            yield
        except Unavailable as err:
            if self.run is None:
                asyncio.run(refuse_without_tls(self.address, self.access, option="--set "))
                raise Unavailable(
                    f"no mesh responds at {self.address}: {err}; check the address, and that the mesh is running",
                    address=self.address,
                ) from err
            if starting := still_starting(self.run):
                raise starting from err
            if RunFolder(self.run).read_origin().is_mesh:
                raise Unavailable(
                    f"the mesh in {self.run} is not running: nothing responds at {self.address}; `rollmesh up "
                    f"{self.run}` restarts it",
                    address=self.address,
                ) from err
            raise Unavailable(
                f"the run in {self.run} is not running: nothing responds at {self.address}; `rollmesh train "
                f"{self.run}` resumes it, `rollmesh audit {self.run}` and `rollmesh show {self.run}` read its files",
                address=self.address,
            ) from err


def find_mesh(run: Path | None, join: str, token_file: Path | None, overrides: Sequence[str]) -> MeshAddress:
    """Return the address of a mesh, named by a run folder or by `join` and `token_file`. Raises ConfigError for any
    other combination."""
    if run is not None and not join and token_file is None:
        folder, config, base_dir = open_folder(run, [])
        layout = open_layout(config, run_dir=folder.root, base_dir=base_dir)
        return MeshAddress(address=layout.gateway, access=layout.access, run=run)
    if run is None and join and token_file is not None:
        access = open_access(own_security(overrides), base_dir=Path.cwd(), run_token=token_file)
        return MeshAddress(address=join, access=access)
    raise ConfigError(f"which mesh? {REMEDY}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshStatus:
    """The state of a mesh."""

    nodes: list[coordinator_pb2.FleetNode]
    runs: list[run_pb2.RunState]
    payloads: str = ""
    """Where workers of the mesh's host store payloads; empty for a coordinator without a mesh."""
    nodes_omitted: int = 0
    """Number of nodes that did not fit into the response."""


class FleetClient:
    """Calls to a gateway or a coordinator. Use it as an async context manager."""

    def __init__(self, mesh: MeshAddress) -> None:
        config = ChannelConfig(deadline_s=CALL_S_MAX)
        self._channel = open_channel(mesh.address, access=mesh.access, config=config)
        self._coordinator: Any = coordinator_pb2_grpc.CoordinatorServiceStub(self._channel)
        self._runs: Any = run_pb2_grpc.RunServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def status(self, run: str = "") -> MeshStatus:
        """Return the fleet and the runs (`run`: only this one). Raises MeshError if no server responds."""
        with typed_errors():
            fleet = await self._coordinator.GetFleet(coordinator_pb2.GetFleetRequest())
        mesh = await self._mesh()
        names = [run] if run else [entry.run for entry in mesh.runs]
        states = await asyncio.gather(*(self._state(name) for name in names))
        return MeshStatus(
            nodes=list(fleet.nodes),
            runs=[state for state in states if state is not None],
            payloads=mesh.payloads,
            nodes_omitted=fleet.num_omitted,
        )

    async def drain(self, node_id: str) -> None:
        """Drain a node. Raises UnknownNode."""
        try:
            with typed_errors():
                await self._coordinator.Drain(coordinator_pb2.DrainRequest(node_id=node_id))
        except UnknownNode as err:
            raise UnknownNode(
                f"there is no node {node_id!r}; `rollmesh status` lists the nodes", node_id=node_id
            ) from err

    async def stop(self, run: str, reason: str = "") -> str:
        """End a run and return the reason of its end, which is an earlier one if it had ended. Raises UnknownRun."""
        async with self._listing_runs(run):
            await self._runs.StopRun(run_pb2.StopRunRequest(run=run, reason=reason))
            ended: str = (await self._runs.GetRun(run_pb2.GetRunRequest(run=run))).state.ended
        return ended

    async def delete(self, run: str) -> None:
        """Delete a run that has ended. Raises UnknownRun, RunLive."""
        async with self._listing_runs(run):
            await self._runs.DeleteRun(run_pb2.DeleteRunRequest(run=run), timeout=DELETE_S_MAX)

    async def until_gone(self, node_id: str, *, limit_s: float, clock: Clock) -> None:
        """Wait until the node has left. An unavailable coordinator is retried. Raises DeadlineExceeded."""
        end_s = clock.monotonic_s() + limit_s
        while clock.monotonic_s() < end_s:
            try:
                nodes = (await self.status("")).nodes
                if all(node.node_id != node_id or node.state == GONE for node in nodes):
                    return
            except MeshError as err:
                if not err.retryable:
                    raise
            await clock.sleep(POLL_S)
        raise DeadlineExceeded(f"node {node_id} has not left within {limit_s:.0f} s; `rollmesh status` shows its work")

    @asynccontextmanager
    async def _listing_runs(self, run: str) -> AsyncIterator[None]:
        """Raise errors of a call as MeshError. An UnknownRun lists the runs of the mesh."""
        try:
            with typed_errors():
                yield
        except UnknownRun as err:
            names = ", ".join(sorted(entry.run for entry in (await self._mesh()).runs)) or "none"
            raise UnknownRun(f"there is no run {run!r}; runs of this mesh: {names}", run=run) from err

    async def _mesh(self) -> coordinator_pb2.GetMeshResponse:
        try:
            with typed_errors():
                mesh: coordinator_pb2.GetMeshResponse = await self._coordinator.GetMesh(
                    coordinator_pb2.GetMeshRequest()
                )
                return mesh
        except Unimplemented:  # a coordinator without a mesh
            return coordinator_pb2.GetMeshResponse()

    async def _state(self, run: str) -> run_pb2.RunState | None:
        try:
            with typed_errors():
                state: run_pb2.RunState = (await self._runs.GetRun(run_pb2.GetRunRequest(run=run))).state
                return state
        except UnknownRun:  # another process is creating the run: its streams are still empty
            return None


def call_mesh(mesh: MeshAddress, call: Callable[[FleetClient], Awaitable[T]]) -> T:
    """Run one call against a mesh. Raises MeshError."""

    async def run() -> T:
        async with FleetClient(mesh) as client:
            return await call(client)

    with mesh.running():
        return asyncio.run(run())
