"""Where a run is stored on this host: its folder, its secret, and addresses that stay the same over restarts.

runs/<name>/
  config.yaml  token  addresses.json
  nats/  payloads/  archive/  coordinator/  depot/  inference-0/  sandbox-0/  checkpoints/
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
from rollmesh.services.gateway.page.config import ANY_LOOPBACK_PORT, PageConfig
from rollmesh.shared.bus.archive_bus import ArchiveBus
from rollmesh.shared.bus.bus import Bus
from rollmesh.shared.bus.embedded_server import EmbeddedServer
from rollmesh.shared.bus.login import BusLogin
from rollmesh.shared.bus.payload_bus import PayloadBus
from rollmesh.shared.bus.permissions import OPERATOR
from rollmesh.shared.domain.ids import new_secret
from rollmesh.shared.net.ports import lasting_ports
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.addresses import advertised, host_of, join_host_port, port_of
from rollmesh.shared.rpc.server import ServerConfig
from rollmesh.shared.store.private_files import private_folder
from rollmesh.shared.weights.model_folder import find_model

PAYLOADS, ARCHIVE = "payloads", "archive"
"""Folders of the payload files, and of the archive segments of ledgers, in the run folder."""
_FIXED = ("coordinator", "gateway", "depot")
"""Services whose address stays the same over restarts."""
_PAGE = "page"
"""Name of the address of the gateway's page. Folders of earlier versions store it in a separate file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLayout:
    """One run on one host. Create it with `open_layout`."""

    config: MeshConfig
    run_dir: Path
    base_dir: Path
    """Folder in which files that the config names are looked up."""
    access: Access
    """The run's token and TLS. A generated token is in `run_dir/token`, readable by its owner only."""
    coordinator: str
    """host:port of the coordinator; of a joined node all addresses that the mesh returned."""
    gateway: str
    """host:port of the gateway."""
    depot: str
    """host:port of the depot. A learner receives it once, when it attaches."""
    page: str = ANY_LOOPBACK_PORT
    """host:port on which the gateway serves its page."""

    @property
    def run(self) -> str:
        return self.config.run.name

    @property
    def coordinators(self) -> str:
        """Address of the coordinator for clients, with those at which it may be started later (`open_channel`)."""
        return ",".join(dict.fromkeys([*self.coordinator.split(","), *self.config.coordinator.standby]))

    def folder(self, name: str) -> Path:
        """Return the folder of a service, which only its owner can enter. It is created if it does not exist."""
        return private_folder(self.run_dir / name)

    def model_dir(self) -> Path:
        """Return the folder of the initial model. ConfigError if it does not exist."""
        return find_model(self.config.model, self.base_dir)

    def served_at(self, address: str, config: ServerConfig) -> ServerConfig:
        """Return `config` with the port of `address`, the address that is advertised, unless that port is 0."""
        server = self.config.network.listening(config)
        port = port_of(address) or port_of(server.address)
        return msgspec.structs.replace(server, address=join_host_port(host_of(server.address), port))

    def served(self, config: ServerConfig | None = None) -> ServerConfig:
        """Return `config` on this host's network."""
        return self.config.network.listening(config or ServerConfig())

    def bus_login(self, role: str = OPERATOR) -> BusLogin:
        """Return the login of a process with this role (`permissions`) at NATS. Raises ConfigError."""
        if self.config.bus.url and self.config.bus.login_file:
            return BusLogin.read(self.base_dir / self.config.bus.login_file, self.access.tls, role=role)
        return BusLogin.of(self.access)

    @property
    def payloads(self) -> Path | None:
        """The folder of the payload files; None on a host without it."""
        folder = self.run_dir / PAYLOADS
        return folder if not self.config.bus.url or folder.is_dir() else None

    @property
    def archive(self) -> Path | None:
        """The folder of the archive segments; None on a host without it."""
        folder = self.run_dir / ARCHIVE
        return folder if self.config.archives_ledgers or not self.config.bus.url or folder.is_dir() else None

    def with_payloads(self, bus: Bus) -> PayloadBus:
        """Return `bus` with the payload files and the archive segments of this run folder. A node that joined from
        another host has none."""
        limit = self.config.coordinator.streams.samples_bytes_max
        archived = ArchiveBus(bus, self.archive, writes=self.config.archives_ledgers)
        return PayloadBus(archived, self.payloads, write=self.config.payloads_in_files, bytes_max=limit)

    def bus_server(self) -> EmbeddedServer:
        """Return the embedded nats-server of this run. It is not started."""
        network = self.config.network
        return EmbeddedServer(
            self.folder("nats"),
            login=BusLogin.of(self.access),
            config=self.config.bus.embedded,
            host=network.host,
            advertise=network.advertise,
        )


def open_layout(config: MeshConfig, *, run_dir: Path, base_dir: Path) -> RunLayout:
    """Return the layout of the run, created on first use. Addresses are chosen once and stored, so that peers find a
    restarted service."""
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
        page=_page_address(run_dir, config.gateway.page),
    )


def _access(security: SecurityConfig, run_token: Path, base_dir: Path) -> Access:
    if not security.token_file and not run_token.exists():
        _write_once(run_token, new_secret())
    return open_access(security, base_dir=base_dir, run_token=run_token)


def _addresses(path: Path, config: MeshConfig) -> dict[str, str]:
    """Return the advertised addresses. The ports are chosen once. The hosts are those of the configuration, which may
    change."""
    servers = {name: config.network.listening(getattr(config, name).server) for name in _FIXED}
    if not path.exists():
        *ports, page = lasting_ports(len(servers) + 1)
        chosen = dict(zip(servers, ports, strict=True))
        fixed = {name: _advertised(server, chosen[name]) for name, server in servers.items()}
        _write_once(path, json.dumps({**fixed, _PAGE: f"127.0.0.1:{page}"}))
    known: dict[str, str] = json.loads(path.read_text())
    return {name: _advertised(server, port_of(known[name])) for name, server in servers.items()}


def _page_address(run_dir: Path, config: PageConfig) -> str:
    """Return where the page listens. A port that the configuration does not name is chosen once."""
    if port_of(config.address):
        return config.address
    known: dict[str, str] = json.loads((run_dir / "addresses.json").read_text())
    if _PAGE not in known:
        path = run_dir / "page.json"
        if not path.exists():
            _write_once(path, json.dumps({_PAGE: f"127.0.0.1:{lasting_ports(1)[0]}"}))
        known = json.loads(path.read_text())
    return join_host_port(host_of(config.address), port_of(known[_PAGE]))


def _advertised(server: ServerConfig, port: int) -> str:
    """Return the advertised address of `server`, which listens on `port` unless it names a port."""
    return advertised(server.address, server.advertise, port_of(server.address) or port)


def _write_once(path: Path, text: str) -> None:
    """Write the file atomically. The first writer wins, because processes of one run may start together."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # readable by its owner only
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        os.unlink(temporary)
