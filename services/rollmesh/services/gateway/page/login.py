"""Check who may read the page: holders of the token, of a login link, or of a session cookie.

A link contains a ticket instead of the token. It is valid once and for a limited time. Tickets and sessions are signed
with the token, so that a restarted gateway, and each gateway of a mesh, accepts the sessions of the others. A new token
invalidates all of them.

    ticket or session = EXPIRY.NONCE.HMAC-SHA256(token, PURPOSE EXPIRY NONCE)
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections import OrderedDict

from rollmesh.shared.clock import Clock
from rollmesh.shared.domain.ids import IdSource, RandomIds
from rollmesh.shared.rpc.auth_interceptor import bearer

TICKET_S = 3600.0
"""Time for which a login link is valid, in seconds."""
USED_MAX = 10_000
"""Number of used tickets that are stored."""
_TICKET = b"rollmesh page ticket v1"
_SESSION = b"rollmesh page session v1"
_COOKIE = b"rollmesh page cookie v1"
_TEXT_CHARS_MAX = 512


class PageLogin:
    """Checks the credentials of requests, and opens sessions. All comparisons take constant time."""

    def __init__(self, token: str, *, session_s: float, clock: Clock, ids: IdSource | None = None) -> None:
        self._token = token
        self._expected = bearer(token)[1].encode()
        self._session_s = session_s
        self._clock = clock
        self._ids = ids or RandomIds()
        self._used: OrderedDict[str, None] = OrderedDict()
        self.cookie = f"rollmesh_{_mac(token, _COOKIE, '')[:12]}"
        """Name of the cookie. It depends on the token, because browsers send cookies of one host to all of its
        ports."""

    @property
    def session_s(self) -> float:
        return self._session_s

    def admits(self, authorization: str, session: str) -> bool:
        """Return whether the header `authorization`, or else the session cookie, is valid."""
        if authorization:
            return hmac.compare_digest(authorization.encode(), self._expected)
        return self._is_valid(session, _SESSION)

    def left_s(self, session: str) -> float:
        """Return the time for which a session is still valid, in seconds; 0 if it is not."""
        return int(session.partition(".")[0]) - self._clock.wall_s() if self._is_valid(session, _SESSION) else 0.0

    def open_with_token(self, token: str) -> str | None:
        """Return a new session for a client that gave `token`; None if it is wrong."""
        return self._open() if hmac.compare_digest(bearer(token.strip())[1].encode(), self._expected) else None

    def open_with_ticket(self, ticket: str) -> str | None:
        """Return a new session for a ticket; None if it is wrong, expired or used."""
        if not self._is_valid(ticket, _TICKET) or ticket in self._used:
            return None
        self._used[ticket] = None
        if len(self._used) > USED_MAX:
            self._used.popitem(last=False)
        return self._open()

    def _open(self) -> str:
        return _signed(self._token, _SESSION, self._clock.wall_s() + self._session_s, self._ids.new())

    def _is_valid(self, text: str, purpose: bytes) -> bool:
        if len(text) > _TEXT_CHARS_MAX or not re.fullmatch(r"[0-9]{1,12}\.[0-9a-f]+\.[0-9a-f]{64}", text):
            return False
        expiry, nonce, mac = text.split(".")
        right = hmac.compare_digest(mac, _mac(self._token, purpose, f"{expiry}.{nonce}"))
        return right and self._clock.wall_s() < int(expiry)


def new_ticket(token: str, *, clock: Clock, ids: IdSource | None = None) -> str:
    """Return a ticket of the holder of `token`. It needs no call to the gateway."""
    return _signed(token, _TICKET, clock.wall_s() + TICKET_S, (ids or RandomIds()).new())


def _signed(token: str, purpose: bytes, expiry_s: float, nonce: str) -> str:
    content = f"{int(expiry_s)}.{nonce}"
    return f"{content}.{_mac(token, purpose, content)}"


def _mac(token: str, purpose: bytes, content: str) -> str:
    return hmac.new(token.encode(), purpose + b"\0" + content.encode(), hashlib.sha256).hexdigest()
