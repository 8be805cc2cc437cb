"""Ids and secrets as arguments: a random source for production, a seeded source for tests and the simulator."""

from __future__ import annotations

import random
import secrets
from typing import Protocol

ID_BYTES = 10
"""80 random bits. The probability of a collision among 10 million ids of one run is about 4e-11."""


class IdSource(Protocol):
    """Makes ids that are unique within a run."""

    def new(self, prefix: str = "") -> str:
        """Return a new id: lower-case hex, after `prefix` and a dash if one is given. It is valid in NATS subjects and
        file names."""
        ...


class RandomIds:
    """Unguessable ids from the operating system."""

    def new(self, prefix: str = "") -> str:
        return _join(prefix, secrets.token_hex(ID_BYTES))


class SeededIds:
    """Ids that depend only on the seed. Not for secrets."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def new(self, prefix: str = "") -> str:
        return _join(prefix, self._random.randbytes(ID_BYTES).hex())


def new_secret() -> str:
    """Return a bearer token of a run: 256 random bits, url-safe."""
    return secrets.token_urlsafe(32)


def _join(prefix: str, suffix: str) -> str:
    return f"{prefix}-{suffix}" if prefix else suffix
