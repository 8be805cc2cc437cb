"""`rollmesh nats-config`: the configuration of each server of a NATS cluster, and the logins of the meshes that use it.

    OUT/servers/NAME.conf        for `nats-server -c`; it contains every password
    OUT/logins/MESH/all          for a host with several kinds of services, and for commands on a run
    OUT/logins/MESH/ROLE         for one kind of service: coordinator, rollout, data, gateway, operator
    OUT/route                    password of the servers among themselves

Passwords are random. A repeated call keeps those that exist and writes the configurations again, so that meshes and
servers can be added.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rollmesh.app.certificates import CA, CERTIFICATE, KEY
from rollmesh.shared.bus.embedded_server import EmbeddedServerConfig
from rollmesh.shared.bus.permissions import PUBLISH
from rollmesh.shared.bus.server_config import (
    CLIENT_PORT,
    MONITOR_PORT,
    ROUTE_PORT,
    SYSTEM_ACCOUNT,
    ClusterMember,
    MeshUsers,
    ServerSettings,
    TlsPaths,
    server_config,
    user_of,
)
from rollmesh.shared.domain.ids import new_secret
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.rpc.addresses import is_loopback, join_host_port

ALL = "all"
"""Name of the file with the logins of every role."""
SIZES = (1, 3, 5)
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,62}[A-Za-z0-9_])?")


class NatsPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to write."""

    out: Path
    servers: tuple[str, ...]
    """HOST or NAME=HOST of each server. Without NAME it is the first label of a host name."""
    meshes: tuple[str, ...] = ("mesh",)
    """Name of the account of each mesh."""
    tls: str = ""
    """Folder on the servers with the files of `rollmesh certs`; empty: without TLS, on loopback only."""
    store: str = "/data/jetstream"
    store_bytes_max: int = EmbeddedServerConfig().store_bytes_max
    payload_bytes_max: int = EmbeddedServerConfig().payload_bytes_max
    sync_always: bool = False
    monitor: str = join_host_port("127.0.0.1", MONITOR_PORT)


class NatsFiles(msgspec.Struct, frozen=True, kw_only=True):
    """The written files, and the settings of a mesh that uses the cluster."""

    servers: list[str]
    logins: dict[str, str]
    """File with all logins, by mesh."""
    url: str
    num_replicas: int


def write_nats_files(plan: NatsPlan) -> NatsFiles:
    """Write the files, readable by their owner only. Raises ConfigError."""
    hosts = _hosts(plan)
    users = [MeshUsers(mesh=mesh, passwords=make_logins(plan.out / "logins" / mesh, mesh)) for mesh in _meshes(plan)]
    route = _secret(plan.out / "route")
    tls = _tls(plan.tls) if plan.tls else None
    written = []
    for name, host in hosts.items():
        member = ClusterMember(
            cluster="rollmesh",
            server=name,
            route_password=route,
            routes=[join_host_port(one, ROUTE_PORT) for one in hosts.values()],
        )
        text = server_config(
            ServerSettings(
                host="0.0.0.0" if tls is not None else host,
                port=CLIENT_PORT,
                store=plan.store,
                payload_bytes_max=plan.payload_bytes_max,
                store_bytes_max=plan.store_bytes_max,
                sync_always=plan.sync_always,
                meshes=users,
                member=member if len(hosts) > 1 else None,
                tls=tls,
                monitor=plan.monitor,
            )
        )
        path = plan.out / "servers" / f"{name}.conf"
        _write_private(path, text)
        written.append(str(path))
    scheme = "tls" if tls is not None else "nats"
    return NatsFiles(
        servers=written,
        logins={mesh: str((plan.out / "logins" / mesh / ALL).resolve()) for mesh in plan.meshes},
        url=",".join(f"{scheme}://{join_host_port(host, CLIENT_PORT)}" for host in hosts.values()),
        num_replicas=len(hosts),
    )


def make_logins(folder: Path, mesh: str) -> dict[str, str]:
    """Return the password of each role. Files that exist are read, the others are written."""
    passwords = {role: _secret(folder / role, f"{user_of(mesh, role)}:") for role in PUBLISH}
    lines = [f"{user_of(mesh, role)}:{password}\n" for role, password in passwords.items()]
    _write_private(folder / ALL, "".join(lines))
    return passwords


def _secret(path: Path, before: str = "") -> str:
    """Return the secret after `before` in a file of one line. Create the file if it does not exist."""
    try:
        text = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        text = before + new_secret()
        _write_private(path, text + "\n")
    except OSError as err:
        raise ConfigError(f"{path}: cannot read this secret: {err.strerror}", path=str(path)) from err
    if not text.startswith(before) or len(text) == len(before):
        raise ConfigError(
            f"{path}: must be one line {before or ''}PASSWORD; remove the file to make a new password", path=str(path)
        )
    return text.removeprefix(before)


def _write_private(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        path.chmod(0o600)
        path.write_text(text, encoding="utf-8")
    except OSError as err:
        raise ConfigError(f"{path}: cannot be written: {err.strerror}; choose another --out", path=str(path)) from err


def _hosts(plan: NatsPlan) -> dict[str, str]:
    """Return the host of each server by name."""
    if len(plan.servers) not in SIZES:
        raise ConfigError(
            f"--server must be given 1, 3 or 5 times, got {len(plan.servers)}: a cluster needs a majority of its "
            "servers to store a record, so an even number tolerates no more losses than the odd number below it"
        )
    found: dict[str, str] = {}
    for one in plan.servers:
        name, equals, host = one.rpartition("=")
        name = name if equals else host.partition(".")[0]
        if not _NAME.fullmatch(name) or not re.fullmatch(r"[A-Za-z0-9_.-]{1,253}", host):
            raise ConfigError(f"--server must be HOST or NAME=HOST without port, got {one!r}; an address needs a NAME")
        if not plan.tls and not is_loopback(host):
            raise ConfigError(
                f"--tls must name the folder with the certificates on the servers, because {host} is not a loopback "
                "address: samples and "
                "passwords would cross the network unencrypted; `rollmesh certs` makes certificates"
            )
        if name in found or host in found.values():
            what = f"name {name}; use NAME=HOST" if name in found else f"host {host}; each server needs one"
            raise ConfigError(f"--server: two servers have the {what}")
        found[name] = host
    return found


def _meshes(plan: NatsPlan) -> Sequence[str]:
    for mesh in plan.meshes:
        if not _NAME.fullmatch(mesh) or mesh == SYSTEM_ACCOUNT:
            raise ConfigError(
                f"--mesh must be 1 to 64 letters, digits, dashes and underscores, other than {SYSTEM_ACCOUNT}, got "
                f"{mesh!r}"
            )
    return sorted(set(plan.meshes))


def _tls(folder: str) -> TlsPaths:
    base = folder.rstrip("/")
    return TlsPaths(ca=f"{base}/{CA}", certificate=f"{base}/{CERTIFICATE}", key=f"{base}/{KEY}")
