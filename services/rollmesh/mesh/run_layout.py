"""Where a run lives on this host: its folder, secret, and addresses that stay the same over restarts.

runs/<name>/
  config.yaml  token  addresses.json
  nats/  coordinator/  depot/  inference-0/  sandbox-0/  checkpoints/
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rollmesh.mesh.config import MeshConfig
from rollmesh.mesh.security import SecurityConfig, open_access
from rollmesh.shared.bus.embedded_server import EmbeddedServer
from rollmesh.shared.bus.login import BusLogin
from rollmesh.shared.ids import new_secret
from rollmesh.shared.model_folder import find_model
from rollmesh.shared.ports import lasting_ports
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.addresses import advertised, host_of, join_host_port, port_of
from rollmesh.shared.rpc.server import ServerConfig

_FIXED = ("coordinator", "gateway", "depot")
"""Parts whose address stays the same over restarts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLayout:
    """One run on one host. Make it with `open_place`."""

    config: MeshConfig
    run_dir: Path
    base_dir: Path
    """Where files that the config names are looked up."""
    access: Access
    """The run's token and TLS. A token that is not the user's is in `run_dir/token`, readable by its owner only."""
    coordinator: str
    """host:port of the coordinator."""
    gateway: str
    """host:port of the gateway."""
    depot: str
    """host:port of the depot: a learner is told once, when it attaches."""

    @property
    def run(self) -> str:
        return self.config.run.name

    def folder(self, name: str) -> Path:
        """A part's own folder, made if missing."""
        path = self.run_dir / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def model_dir(self) -> Path:
        """The initial model. ConfigError if it is not there."""
        return find_model(self.config.model, self.base_dir)

    def served_at(self, address: str, config: ServerConfig) -> ServerConfig:
        """`config` on the port of `address`, which is what others are told."""
        server = self.config.network.listening(config)
        return msgspec.structs.replace(server, address=join_host_port(host_of(server.address), port_of(address)))

    def served(self, config: ServerConfig | None = None) -> ServerConfig:
        """`config` on this host's network."""
        return self.config.network.listening(config or ServerConfig())

    def bus_login(self) -> BusLogin:
        """As whom the run speaks to NATS. Raises ConfigError."""
        if self.config.bus.url and self.config.bus.login_file:
            return BusLogin.read(self.base_dir / self.config.bus.login_file, self.access.tls)
        return BusLogin.of(self.access)

    def bus_server(self) -> EmbeddedServer:
        """The embedded nats-server of this run, not started."""
        network = self.config.network
        return EmbeddedServer(
            self.folder("nats"),
            login=BusLogin.of(self.access),
            config=self.config.bus.embedded,
            host=network.host,
            advertise=network.advertise,
        )


def open_place(config: MeshConfig, *, run_dir: Path, base_dir: Path) -> RunLayout:
    """The run's place, made on first use. Addresses are chosen once and kept, so that a restarted part is found again."""
    run_dir = run_dir.resolve()
    run_dir.mkdir(parents=True, exist_ok=True)
    base_dir = base_dir.resolve()
    addresses = _addresses(run_dir / "addresses.json", config)
    return RunLayout(
        config=config,
        run_dir=run_dir,
        base_dir=base_dir,
        access=_access(config.security, run_dir / "token", base_dir),
        coordinator=addresses["coordinator"],
        gateway=addresses["gateway"],
        depot=addresses["depot"],
    )


def _access(security: SecurityConfig, run_token: Path, base_dir: Path) -> Access:
    if not security.token_file and not run_token.exists():
        _write_once(run_token, new_secret())
    return open_access(security, base_dir=base_dir, run_token=run_token)


def _addresses(path: Path, config: MeshConfig) -> dict[str, str]:
    """What others are told. The ports are chosen once; the hosts are those of the configuration, which may change."""
    servers = {name: config.network.listening(getattr(config, name).server) for name in _FIXED}
    if not path.exists():
        chosen = dict(zip(servers, lasting_ports(len(servers)), strict=True))
        _write_once(path, json.dumps({name: _told(server, chosen[name]) for name, server in servers.items()}))
    known: dict[str, str] = json.loads(path.read_text())
    return {name: _told(server, port_of(known[name])) for name, server in servers.items()}


def _told(server: ServerConfig, port: int) -> str:
    """What others are told of `server`, which takes `port` unless it has one of its own."""
    return advertised(server.address, server.advertise, port_of(server.address) or port)


def _write_once(path: Path, text: str) -> None:
    """Whole or not at all, and the first writer wins: processes of one run may start together."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # readable by its owner only
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        os.unlink(temporary)
