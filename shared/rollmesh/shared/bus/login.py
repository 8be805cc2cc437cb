"""`BusLogin`: as whom a process speaks to NATS.

The embedded server's password is derived from the run's token, so that one secret is handed out and NATS, whose config
file holds the password in the clear, never holds the token itself. Logins of a cluster are random and stored in files.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from rollmesh.shared.bus.permissions import OPERATOR, inbox_of
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

    @property
    def inbox(self) -> str:
        """Prefix of the subjects on which this user gets answers."""
        return inbox_of(self.user)

    @classmethod
    def read(cls, path: Path, tls: Tls | None = None, *, role: str = OPERATOR) -> Self:
        """Read a file with lines USER:PASSWORD: one for every role, or one per role whose user ends in `-ROLE`. Raises
        ConfigError."""
        try:
            lines = path.read_text(encoding="utf-8").split()
        except OSError as err:
            raise ConfigError(f"{path}: cannot read the login of NATS: {err.strerror}", path=str(path)) from err
        logins = [line.partition(":") for line in lines]
        if not logins or not all(user and colon and password for user, colon, password in logins):
            raise ConfigError(f"{path}: the login of NATS is one line, USER:PASSWORD, for each user", path=str(path))
        found = [(user, password) for user, _, password in logins if len(logins) == 1 or user.endswith(f"-{role}")]
        if len(found) != 1:
            users = ", ".join(user for user, _, _ in logins)
            raise ConfigError(
                f"{path}: must contain one user that ends in -{role} for this process, got {users}; `rollmesh "
                "nats-config` writes the file `logins` with all users, and one file for each",
                path=str(path),
            )
        return cls(user=found[0][0], password=found[0][1], tls=tls)
