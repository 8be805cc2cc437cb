"""The configuration of a nats-server: of the embedded one, and of each server of a cluster.

A cluster has one account per mesh, so that a mesh cannot use the streams of another one, and one user per kind of
service in it (`permissions`). Users that must not choose where answers go have a separate account. Servers connect to
each other with a separate login, and with TLS if it is configured. The embedded server has a single login in the
default account, because every process of its run can read the token from which that login is derived.

nats-server reads JSON, with one key per line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollmesh.shared.bus.permissions import OUTSIDE, PUBLISH, inbox_of
from rollmesh.shared.rpc.addresses import join_host_port

CLIENT_PORT, ROUTE_PORT, MONITOR_PORT = 4222, 6222, 8222
"""Usual ports of a server: for clients, for the other servers, and for probes (HTTP)."""
SYSTEM_ACCOUNT = "SYS"
_MEMORY_BYTES_MAX = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsPaths:
    """PEM files as the server names them. They need not exist where the configuration is written."""

    ca: str
    certificate: str
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshUsers:
    """The account of one mesh: its name, and the password of each user by role."""

    mesh: str
    passwords: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterMember:
    """What makes a server part of a cluster."""

    cluster: str
    server: str
    """Name of this server, unique in the cluster."""
    route_password: str = field(repr=False)
    routes: Sequence[str]
    """host:port at which the servers accept each other. A server ignores its own."""
    route_port: int = ROUTE_PORT


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Everything that one nats-server is configured with."""

    host: str
    port: int
    store: str
    """Folder of the streams."""
    payload_bytes_max: int
    store_bytes_max: int
    sync_always: bool
    log_file: str = ""
    """Empty: stderr."""
    login: tuple[str, str] | None = field(default=None, repr=False)
    """User and password of a server without accounts."""
    meshes: Sequence[MeshUsers] = ()
    member: ClusterMember | None = None
    tls: TlsPaths | None = None
    """None: without TLS."""
    monitor: str = ""
    """host:port of the HTTP endpoints for probes; empty: none."""


def server_config(settings: ServerSettings) -> str:
    """Return the text of the configuration. It contains passwords."""
    tree: dict[str, Any] = {
        "host": settings.host,
        "port": settings.port,
        "max_payload": settings.payload_bytes_max,
        "jetstream": {
            "store_dir": settings.store,
            "max_file_store": settings.store_bytes_max,
            "max_memory_store": _MEMORY_BYTES_MAX,
            "sync_interval": "always" if settings.sync_always else "2m",
        },
    }
    if settings.log_file:
        tree |= {"log_file": settings.log_file, "logfile_size_limit": 16777216, "logfile_max_num": 2}
    if settings.monitor:
        tree["http"] = settings.monitor
    if settings.login is not None:
        tree["authorization"] = dict(zip(("user", "password"), settings.login, strict=True))
    if settings.meshes:
        tree["accounts"] = {SYSTEM_ACCOUNT: {}}
        for users in settings.meshes:
            tree["accounts"] |= _accounts(users)
        tree["system_account"] = SYSTEM_ACCOUNT
    if settings.tls is not None:
        tree["tls"] = _tls(settings.tls)
    if settings.member is not None:
        tree |= _cluster(settings.member, settings.host, settings.tls)
    return json.dumps(tree, indent=2) + "\n"


def user_of(mesh: str, role: str) -> str:
    """Return the name of a user. Names are unique in a cluster, because a client does not name its account."""
    return f"{mesh}-{role}"


def _accounts(users: MeshUsers) -> dict[str, Any]:
    """Return the account with the streams of a mesh, and one for each user that is outside of it."""
    inside = [_user(users, role) for role in PUBLISH if role not in OUTSIDE]
    exports, outside = [], {}
    for role in OUTSIDE:
        name = user_of(users.mesh, role)
        exports += [{"service": subject, "accounts": [name]} for subject in PUBLISH[role]]
        imports = [{"service": {"account": users.mesh, "subject": subject}} for subject in PUBLISH[role]]
        outside[name] = {"imports": imports, "users": [_user(users, role)]}
    return {users.mesh: {"jetstream": "enabled", "exports": exports, "users": inside}} | outside


def _user(users: MeshUsers, role: str) -> dict[str, Any]:
    name = user_of(users.mesh, role)
    permissions = {"publish": {"allow": list(PUBLISH[role])}, "subscribe": {"allow": [f"{inbox_of(name)}.>"]}}
    return {"user": name, "password": users.passwords[role], "permissions": permissions}


def _cluster(member: ClusterMember, host: str, tls: TlsPaths | None) -> dict[str, Any]:
    scheme = "tls" if tls is not None else "nats"
    found: dict[str, Any] = {
        "name": member.cluster,
        "listen": join_host_port(host, member.route_port),
        "authorization": {"user": "route", "password": member.route_password},
        "routes": [f"{scheme}://route:{member.route_password}@{address}" for address in member.routes],
        "no_advertise": True,  # clients and servers are configured with every address
    }
    # Shorter than the grace period of 60 s in deploy/; the default is 2 minutes.
    lame_duck = {"lame_duck_grace_period": "5s", "lame_duck_duration": "30s"}
    if tls is not None:
        found["tls"] = _tls(tls)
    return {"server_name": member.server, "cluster": found, **lame_duck}


def _tls(tls: TlsPaths) -> dict[str, Any]:
    return {"cert_file": tls.certificate, "key_file": tls.key, "ca_file": tls.ca, "verify": True}


def tls_paths(ca: Path, certificate: Path, key: Path) -> TlsPaths:
    """Return the paths of existing files."""
    return TlsPaths(ca=str(ca), certificate=str(certificate), key=str(key))
