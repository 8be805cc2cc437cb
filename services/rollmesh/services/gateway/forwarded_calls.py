"""A limit on calls that stay open at the coordinator, so that they leave room for short calls and never wait without an
answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rollmesh.shared.errors import Overloaded

RETRY_AFTER_S = 1.0


class ForwardedCalls:
    """The open calls of one kind, at most `num_max`."""

    def __init__(self, kind: str, num_max: int) -> None:
        self._kind = kind
        self._num_max = num_max
        self._num = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """Count a call. Raises Overloaded beyond the limit."""
        if self._num >= self._num_max:
            raise Overloaded(
                f"{self._num} {self._kind} are open at this gateway, its forwarded_max; end some, or retry later",
                retry_after_s=RETRY_AFTER_S,
            )
        self._num += 1
        try:
            yield
        finally:
            self._num -= 1
