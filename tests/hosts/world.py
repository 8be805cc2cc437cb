"""A mesh over several hosts with TLS: `rollmesh up` on one, and nodes that join it from the others."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rollmesh.app.certificates import make_certificates
from rollmesh.mesh.config import CountsConfig, MeshConfig
from rollmesh.mesh.security import SecurityConfig, open_access
from rollmesh.services.coordinator.audit_report import AuditReport
from rollmesh.shared.config.loader import to_yaml
from rollmesh.shared.errors import MeshError
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.v1 import coordinator_pb2 as pb
from rollmesh.v1 import coordinator_pb2_grpc, run_pb2, run_pb2_grpc

from ..chaos.world import ROOT, mesh_config, save_model_folder
from .network import OBSERVER, Host, Network

COMMAND = (sys.executable, "-m", "rollmesh.cli")
POLL_S = 0.1
END_S = 120.0
MAIN, NODES, TRAINER = "a", "b", "c"
"""Hosts: the services of `rollmesh up`, the nodes that join, and the learner."""


@dataclass
class HostsWorld:
    """A mesh on host `a`. Nodes are added on the others."""

    network: Network
    folder: Path
    config: MeshConfig
    access: Access
    gateway: str
    mesh: asyncio.subprocess.Process
    nodes: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)

    async def join(self, kind: str, host: str, *overrides: str, prefix: tuple[str, ...] = ()) -> str:
        """Start a node on a host and return its id. `prefix` is a command that runs the node's command."""
        place = self.network.host(host)
        name = kind if kind in ("learner", "depot") else f"{kind}-{host}"
        files = (
            f"security.{key}={value}" for key, value in tls_files(self.folder, host).items() if key != "token_file"
        )
        self.nodes[name] = await place.start(
            *prefix, *COMMAND, "serve", kind, "--join", self.gateway, "--token-file", str(token_file(self.folder)),
            "--name", name, "--dir", str(self.folder / "nodes" / name), f"network.host={place.address}", *files, *overrides,
            log=self.folder / f"{name}.log", cwd=ROOT, env=environment(),
        )  # fmt: skip
        return name

    async def state(self) -> run_pb2.RunState | None:
        """Return the state of the run; None if the gateway does not respond or has no run."""
        async with open_channel(self.gateway, access=self.access) as channel:
            stub: Any = run_pb2_grpc.RunServiceStub(channel)
            try:
                with typed_errors():
                    found: run_pb2.RunState = (
                        await stub.GetRun(run_pb2.GetRunRequest(run=self.config.run.name), timeout=5.0)
                    ).state
                    return found
            except MeshError:
                return None

    async def fleet(self) -> Mapping[str, pb.FleetNode]:
        async with open_channel(self.gateway, access=self.access) as channel:
            stub: Any = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
            response = await stub.GetFleet(pb.GetFleetRequest(), timeout=10.0, wait_for_ready=True)
            return {node.node_id: node for node in response.nodes}

    async def until_state(self, what: str, condition: Callable[[run_pb2.RunState], bool]) -> run_pb2.RunState:
        deadline_s = time.monotonic() + END_S
        while (state := await self.state()) is None or not condition(state):
            assert time.monotonic() < deadline_s, f"not within {END_S:g} s: {what}\n{state}\n{self.logs()}"
            await asyncio.sleep(POLL_S)
        return state

    async def until_update(self, update: int) -> int:
        """Wait until `update` is applied, and return the newest."""
        state = await self.until_state(f"update {update}", lambda s: s.policies[0].applied_step >= update)
        return state.policies[0].applied_step

    async def newest_update(self) -> int:
        return (await self.until_state("its state", lambda s: True)).policies[0].applied_step

    async def until_fleet(self, what: str, condition: Callable[[Mapping[str, pb.FleetNode]], bool]) -> None:
        deadline_s = time.monotonic() + END_S
        while not condition(nodes := await self.fleet()):
            assert time.monotonic() < deadline_s, f"not within {END_S:g} s: {what}\n{nodes}\n{self.logs()}"
            await asyncio.sleep(POLL_S)

    async def until_ready(self, *names: str) -> None:
        def ready(nodes: Mapping[str, pb.FleetNode]) -> bool:
            return all(name in nodes and nodes[name].state == pb.NODE_STATE_READY for name in names)

        await self.until_fleet(f"{', '.join(names)} are READY", ready)

    async def until_gone(self, *names: str) -> None:
        """Wait until the coordinator has noticed that nodes do not respond."""

        def gone(nodes: Mapping[str, pb.FleetNode]) -> bool:
            return all(name not in nodes or nodes[name].state == pb.NODE_STATE_DEAD for name in names)

        await self.until_fleet(f"{', '.join(names)} are DEAD", gone)

    async def settle(self) -> AuditReport:
        """Stop the run and the mesh, and return the audit, which holds with the newest checkpoint."""
        code, said = await self.command("stop", self.config.run.name, str(self.folder / "run"))
        assert code == 0, said
        async with asyncio.timeout(END_S):
            assert await self.nodes["learner"].wait() == 0, self.logs()
        await self.until_state("nothing is live", lambda s: bool(s.ended) and s.samples.live == 0)
        for name, process in self.nodes.items():
            assert name == "learner" or process.returncode is None, f"{name} has exited\n{self.logs()}"
        self.mesh.send_signal(signal.SIGTERM)
        async with asyncio.timeout(END_S):
            assert await self.mesh.wait() == 0, self.logs()
        checkpoints = self.folder / "nodes" / "learner" / "checkpoints"
        code, said = await self.command(
            "audit",
            str(self.folder / "run"),
            "--run-name",
            self.config.run.name,
            "--json",
            "--checkpoint",
            str(checkpoints),
        )
        assert code == 0, said
        report = msgspec.json.decode(said, type=AuditReport)
        assert report.holds, report.to_text()
        assert report.checkpoint is not None
        assert report.checkpoint.updates == report.updates
        return report

    async def command(self, *arguments: str) -> tuple[int | None, str]:
        """Run `rollmesh ...` on the host of the services, and return exit code and output."""
        process = await asyncio.create_subprocess_exec(
            *self.network.host(MAIN).command(*COMMAND, *arguments), stdout=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(END_S):
            said, _ = await process.communicate()
        return process.returncode, said.decode()

    def logs(self, lines: int = 15) -> str:
        """Return the end of each log, for a failure."""
        paths = [*self.folder.glob("*.log"), *(self.folder / "run" / "logs").glob("*.log")]
        tails = [(path, path.read_text(errors="replace").splitlines()[-lines:]) for path in sorted(paths)]
        return "\n".join("\n".join([f"--- {path.name}", *tail]) for path, tail in tails)


def tls_files(folder: Path, host: str) -> dict[str, str]:
    secrets = folder / "secrets" / host
    return {
        "ca": str(secrets / "ca.pem"),
        "certificate": str(secrets / "rollmesh.pem"),
        "key": str(secrets / "rollmesh.key"),
        "token_file": str(token_file(folder)),
    }


def token_file(folder: Path) -> Path:
    return folder / "secrets" / MAIN / "token"


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


@asynccontextmanager
async def hosts_world(network: Network, folder: Path, **run: Any) -> AsyncIterator[HostsWorld]:
    """Start the mesh on its host, with certificates for every host."""
    main: Host = network.host(MAIN)
    secrets = folder / "secrets"
    make_certificates(secrets / MAIN, hosts=[main.address], ca_dir=None, valid_days=2)
    for name in (NODES, TRAINER, OBSERVER):
        make_certificates(secrets / name, hosts=[network.host(name).address], ca_dir=secrets / MAIN, valid_days=2)
    config = mesh_config(save_model_folder(folder / "model"), **run)
    config = msgspec.structs.replace(
        config,
        counts=CountsConfig(inference=1, rollout=1, sandbox=1),
        network=msgspec.structs.replace(config.network, host=main.address),
        security=SecurityConfig(**tls_files(folder, MAIN)),
    )
    (folder / "mesh.yaml").write_text(to_yaml(config))
    arguments = (str(folder / "mesh.yaml"), "--out", str(folder / "run"))
    log = folder / "up.log"
    mesh = await main.start(*COMMAND, "up", *arguments, log=log, cwd=ROOT, env=environment())
    async with asyncio.timeout(END_S):
        while not (found := [line for line in log.read_text().splitlines() if line.startswith("gateway")]):
            assert mesh.returncode is None, log.read_text()
            await asyncio.sleep(POLL_S)
    access = open_access(SecurityConfig(**tls_files(folder, OBSERVER)), base_dir=folder, run_token=token_file(folder))
    yield HostsWorld(network, folder, config, access, found[0].split()[1], mesh)
