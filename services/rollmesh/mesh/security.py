"""Who may talk to a run's services, and from where: the sections `security` and `network` of a run's configuration.

By default services listen on loopback and want a token that is made for the run. Beyond loopback both are the user's: a token file
and certificates. The configuration names files and holds no secret, so it can be stored, shown and sent.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path

import msgspec

from rollmesh.shared.errors import ConfigError
from rollmesh.shared.rpc.access import Access, Tls
from rollmesh.shared.rpc.addresses import host_of, is_loopback, is_wildcard, join_host_port
from rollmesh.shared.rpc.server import ServerConfig
from rollmesh.shared.settings import Settings

TOKEN_CHARS_MIN = 16
_FREE_LOOPBACK_PORT = ServerConfig().address


class SecurityConfig(Settings):
    """Files, relative to the config file. With certificates all services speak mutual TLS to each other, on loopback too."""

    ca: str = ""
    """PEM certificates of the authority that signs every party's certificate. `rollmesh certs` makes one for development."""
    certificate: str = ""
    """PEM certificate of this host's services; its SANs hold the host that others are told."""
    key: str = ""
    """PEM private key to it, readable by its owner only."""
    token_file: str = ""
    """File that holds the token, readable by its owner only. Empty: a random one per run, in `token` of the run folder."""

    def check_fields(self) -> None:
        files = {"ca": self.ca, "certificate": self.certificate, "key": self.key}
        missing = [name for name, path in files.items() if not path]
        if missing and len(missing) < len(files):
            raise ValueError(f"`{missing[0]}` must name a file, because TLS needs ca, certificate and key together")

    @property
    def has_tls(self) -> bool:
        return bool(self.ca)


class NetworkConfig(Settings):
    """Where this host's services listen, unless a service's own `server.address` says otherwise."""

    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs `security` with certificates and a token file."""
    advertise: str = ""
    """Host that others are told to call; empty means `host`. Needed where that is 0.0.0.0 or ::."""

    def check_fields(self) -> None:
        if is_wildcard(self.host) and not self.advertise:
            raise ValueError(
                f"`advertise` must name the host by which other machines reach this one, because host is {self.host}"
            )

    def listening(self, server: ServerConfig) -> ServerConfig:
        """A service's server, moved to this host's address if it has none of its own."""
        if server.address == _FREE_LOOPBACK_PORT:
            address = join_host_port(self.host, 0)
            return msgspec.structs.replace(server, address=address, advertise=server.advertise or self.advertise)
        if server.advertise or is_loopback(host_of(server.address)):
            return server
        return msgspec.structs.replace(server, advertise=self.advertise)


def check_exposure(security: SecurityConfig, servers: Mapping[str, ServerConfig]) -> None:
    """Raises ValueError if one of `servers` (by key of the configuration) is open to other machines unprotected."""
    exposed = [key for key, server in servers.items() if not _is_local(server)]
    missing = [
        *([] if security.has_tls else ["ca, certificate, key"]),
        *([] if security.token_file else ["token_file"]),
    ]
    if exposed and missing:
        raise ValueError(
            f"security must name {' and '.join(missing)}: {exposed[0]} listens beyond this machine "
            f"({servers[exposed[0]].address}); `rollmesh certs --out DIR --host NAME` makes all of them, or use 127.0.0.1"
        )


def open_access(security: SecurityConfig, *, base_dir: Path, run_token: Path) -> Access:
    """The access that `security` describes; without a token file the token is read from `run_token`. Raises ConfigError."""
    token = read_token(base_dir / security.token_file if security.token_file else run_token)
    return Access(token, open_tls(security, base_dir=base_dir))


def open_tls(security: SecurityConfig, *, base_dir: Path) -> Tls | None:
    """The certificates that `security` names; None if it names none. Raises ConfigError."""
    if not security.has_tls:
        return None
    paths = {name: (base_dir / getattr(security, name)).resolve() for name in ("ca", "certificate", "key")}
    _require_private(paths["key"])
    tls = Tls(**paths)
    tls.ssl_context()  # files that do not belong together are found here, not in a failing handshake
    return tls


def read_token(path: Path) -> str:
    """The token in `path`. ConfigError if it cannot be read, is short, or is open to other users of the machine."""
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
    try:
        mode = path.stat().st_mode
    except OSError as err:
        raise ConfigError(f"{path}: cannot read this secret: {err.strerror}", path=str(path)) from err
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            f"{path}: other users of this machine can read this secret (mode {stat.S_IMODE(mode):03o}); "
            f"make it yours alone: chmod 600 {path}",
            path=str(path),
        )
