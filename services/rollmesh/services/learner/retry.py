"""Repeating idempotent requests while the other side is away, within a limit."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from rollmesh.services.learner.config import RetryConfig
from rollmesh.shared.clock import Clock
from rollmesh.shared.errors import Cancelled, DeadlineExceeded, MeshError

T = TypeVar("T")


def worth_retrying(err: MeshError) -> bool:
    """Whether the other side was away, too slow, full, or stopped while it worked on the request."""
    return err.retryable or isinstance(err, (DeadlineExceeded, Cancelled))


class Backoff:
    """Pauses that double from `backoff_s` to `backoff_s_max`."""

    def __init__(self, config: RetryConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._next_s = config.backoff_s

    def reset(self) -> None:
        self._next_s = self._config.backoff_s

    async def pause(self) -> None:
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, self._config.backoff_s_max)
        await self._clock.sleep(pause_s)


async def persist(ask: Callable[[], Awaitable[T]], *, limit_s: float, config: RetryConfig, clock: Clock) -> T:
    """Asks until it is answered or `limit_s` is over; then raises the last error. Other errors are raised at once."""
    backoff = Backoff(config, clock)
    end_s = clock.monotonic_s() + limit_s
    while True:
        try:
            return await ask()
        except MeshError as err:
            if not worth_retrying(err) or clock.monotonic_s() >= end_s:
                raise
        await backoff.pause()
