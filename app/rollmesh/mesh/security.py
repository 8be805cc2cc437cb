"""The sections `security` and `network` of a run's configuration: which clients may call a run's services, and from
where.

By default services listen on loopback and require a token that is generated for the run. On other addresses the user
must provide a token file and certificates. The configuration names files and contains no secret, so it can be stored,
displayed and sent.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from rollmesh.shared.config.settings import Settings
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.rpc.access import Access, Tls
from rollmesh.shared.rpc.addresses import host_of, is_loopback, is_wildcard, join_host_port
from rollmesh.shared.rpc.server import ServerConfig

TOKEN_CHARS_MIN = 16
_FREE_LOOPBACK_PORT = ServerConfig().address


class SecurityConfig(Settings):
    """Files, relative to the config file. With certificates all services use mutual TLS, on loopback too."""

    ca: str = ""
    """PEM certificates of the authority that signs every party's certificate. `rollmesh certs` makes one for
    development."""
    certificate: str = ""
    """PEM certificate of this host's services; its SANs contain the advertised host."""
    key: str = ""
    """PEM private key of the certificate, readable by its owner only."""
    token_file: str = ""
    """File that holds the token, readable by its owner only. Empty: a random token per run, in `token` of the run
    folder."""

    def check_fields(self) -> None:
        files = {"ca": self.ca, "certificate": self.certificate, "key": self.key}
        missing = [name for name, path in files.items() if not path]
        if missing and len(missing) < len(files):
            raise ValueError(f"`{missing[0]}` must name a file, because TLS needs ca, certificate and key together")

    @property
    def has_tls(self) -> bool:
        return bool(self.ca)


class NetworkConfig(Settings):
    """Where this host's services listen, unless `server.address` of a service names another address."""

    host: str = "127.0.0.1"
    """Address to listen on. Any address except loopback needs `security` with certificates and a token file."""
    advertise: str = ""
    """Host that is advertised to other nodes; empty means `host`. Required if `host` is 0.0.0.0 or ::."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """Port of a service whose `server.address` names none, for a process that runs one service, as in a container. 0:
    any free port."""
    probes: str = ""
    """IP:PORT of a second server without TLS and token that has the gRPC health service alone, for probes of a
    scheduler that cannot present a certificate. Check(``) is SERVING while the process runs, Check(`ready`) while it
    takes work. Empty: none."""
    removed = {"direct": "every call uses gRPC"}

    def check_fields(self) -> None:
        if is_wildcard(self.host) and not self.advertise:
            raise ValueError(
                f"`advertise` must name the host by which other machines reach this one, because host is {self.host}"
            )
        if self.probes and not re.fullmatch(r".+:[1-9][0-9]{0,4}", self.probes):
            raise ValueError(f"`probes` must be IP:PORT with a fixed port, got {self.probes!r}")

    def listening(self, server: ServerConfig) -> ServerConfig:
        """Return the server of a service, on this host's address unless it names another."""
        if server.address == _FREE_LOOPBACK_PORT:
            address = join_host_port(self.host, self.port)
            return msgspec.structs.replace(server, address=address, advertise=server.advertise or self.advertise)
        if server.advertise or is_loopback(host_of(server.address)):
            return server
        return msgspec.structs.replace(server, advertise=self.advertise)


def check_exposure(security: SecurityConfig, servers: Mapping[str, ServerConfig]) -> None:
    """Raise ValueError if one of `servers` (by key of the configuration) is reachable from other machines without
    protection."""
    exposed = [key for key, server in servers.items() if not _is_local(server)]
    missing = [
        *([] if security.has_tls else ["ca, certificate, key"]),
        *([] if security.token_file else ["token_file"]),
    ]
    if exposed and missing:
        raise ValueError(
            f"`security` must name {' and '.join(missing)}: {exposed[0]} is reachable from other machines "
            f"({servers[exposed[0]].address}); `rollmesh certs --out DIR --host NAME` makes all of them, or use "
            "127.0.0.1"
        )


def open_access(security: SecurityConfig, *, base_dir: Path, run_token: Path) -> Access:
    """Return the access that `security` describes. Without a token file the token is read from `run_token`. Raises
    ConfigError."""
    token = read_token(base_dir / security.token_file if security.token_file else run_token)
    return Access(token, open_tls(security, base_dir=base_dir))


def open_tls(security: SecurityConfig, *, base_dir: Path) -> Tls | None:
    """Return the certificates that `security` names; None if it names no file. Raises ConfigError."""
    if not security.has_tls:
        return None
    paths = {name: (base_dir / getattr(security, name)).resolve() for name in ("ca", "certificate", "key")}
    _require_private(paths["key"])
    tls = Tls(**paths)
    tls.check()  # here, not in a failed handshake of each call
    return tls


def read_token(path: Path) -> str:
    """Return the token in `path`. ConfigError if it cannot be read, is short, or is readable by other users of the
    machine."""
    _require_private(path)
    token = path.read_text(encoding="utf-8").strip()
    if len(token) < TOKEN_CHARS_MIN or not token.isascii() or not token.isprintable():
        raise ConfigError(
            f"{path}: a token is one line of at least {TOKEN_CHARS_MIN} ASCII characters, this one has {len(token)}; "
            "`rollmesh certs` makes one",
            path=str(path),
        )
    return token


def _is_local(server: ServerConfig) -> bool:
    return server.address.startswith("unix:") or is_loopback(host_of(server.address))


def _require_private(path: Path) -> None:
    """Raise ConfigError unless only the owner may read the file. The group may also read a file that root owns, because
    that is how a scheduler gives a secret to a process of another user."""
    try:
        found = path.stat()
    except OSError as err:
        raise ConfigError(f"{path}: cannot read this secret: {err.strerror}", path=str(path)) from err
    shared = stat.S_IRWXO | (stat.S_IRWXG & ~stat.S_IRGRP if found.st_uid == 0 and os.geteuid() != 0 else stat.S_IRWXG)
    if found.st_mode & shared:
        raise ConfigError(
            f"{path}: other users of this machine can read this secret (mode {stat.S_IMODE(found.st_mode):03o}); "
            f"make it yours alone: chmod 600 {path}",
            path=str(path),
        )
