"""Repeating idempotent requests while the other side is away, within a limit."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

import msgspec

from rollmesh.shared.clock import Clock
from rollmesh.shared.errors import Cancelled, DeadlineExceeded, MeshError

T = TypeVar("T")


class PatienceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long a trainer puts up with a gateway that is away."""

    retry_s: float = 60.0
    """How long one request is repeated while nobody answers it; at least the batch lease's term once that is known."""
    backoff_s: float = 0.05
    """First pause between tries; doubles up to `backoff_s_max`."""
    backoff_s_max: float = 2.0
    """Longest pause between tries."""
    call_s: float = 15.0
    """Limit of one try. A lease may wait its `wait_s` longer."""
    fetch_s: float = 300.0
    """Limit of one try at fetching a whole batch."""

    def __post_init__(self) -> None:
        for name in ("retry_s", "backoff_s", "backoff_s_max", "call_s", "fetch_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


def worth_retrying(err: MeshError) -> bool:
    """Whether the other side was away, too slow, full, or stopped while it worked on the request."""
    return err.retryable or isinstance(err, (DeadlineExceeded, Cancelled))


class Pauses(Protocol):
    """How long to wait between tries."""

    @property
    def backoff_s(self) -> float: ...

    @property
    def backoff_s_max(self) -> float: ...


class Backoff:
    """Pauses that double from `backoff_s` to `backoff_s_max`."""

    def __init__(self, config: Pauses, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._next_s = config.backoff_s

    def reset(self) -> None:
        self._next_s = self._config.backoff_s

    async def pause(self) -> None:
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, self._config.backoff_s_max)
        await self._clock.sleep(pause_s)


async def persist(
    ask: Callable[[], Awaitable[T]],
    *,
    limit_s: float,
    config: Pauses,
    clock: Clock,
    again: Callable[[MeshError], bool] = worth_retrying,
) -> T:
    """Asks until it is answered or `limit_s` is over; then raises the last error. What is not worth it is raised at once."""
    backoff = Backoff(config, clock)
    end_s = clock.monotonic_s() + limit_s
    while True:
        try:
            return await ask()
        except MeshError as err:
            if not again(err) or clock.monotonic_s() >= end_s:
                raise
        await backoff.pause()
