"""`BusLogin`: as whom a process speaks to NATS.

The embedded server's password is derived from the run's token, so that one secret is handed out and NATS, whose config file holds
the password in the clear, never holds the token itself.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from rollmesh.shared.errors import ConfigError
from rollmesh.shared.rpc.access import Access, Tls

USER = "rollmesh"
_PURPOSE = b"rollmesh nats password v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class BusLogin:
    """User, password, and TLS where the connection leaves the machine."""

    user: str
    password: str = field(repr=False)
    tls: Tls | None = None

    @classmethod
    def of(cls, access: Access) -> Self:
        """The login that every holder of `access` knows."""
        password = hmac.new(access.token.encode(), _PURPOSE, hashlib.sha256).hexdigest()
        return cls(user=USER, password=password, tls=access.tls)

    @classmethod
    def read(cls, path: Path, tls: Tls | None = None) -> Self:
        """From a file of one line, USER:PASSWORD. Raises ConfigError."""
        try:
            user, colon, password = path.read_text(encoding="utf-8").strip().partition(":")
        except OSError as err:
            raise ConfigError(f"{path}: cannot read the login of NATS: {err.strerror}", path=str(path)) from err
        if not (user and colon and password):
            raise ConfigError(f"{path}: the login of NATS is one line, USER:PASSWORD", path=str(path))
        return cls(user=user, password=password, tls=tls)
