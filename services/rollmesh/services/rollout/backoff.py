"""Which errors of the mesh are worth another try, and how long to wait between tries."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from rollmesh.services.rollout.config import WorkerConfig
from rollmesh.shared.clock import Clock
from rollmesh.shared.errors import DeadlineExceeded, MeshError, UnknownNode

T = TypeVar("T")


def worth_retrying(err: MeshError) -> bool:
    """For idempotent requests: the other side was away, too slow, full, or has yet to learn of this node."""
    return err.retryable or isinstance(err, (DeadlineExceeded, UnknownNode))


class Backoff:
    """Pauses that double from `backoff_s` to `backoff_s_max`."""

    def __init__(self, config: WorkerConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._next_s = config.backoff_s

    def reset(self) -> None:
        self._next_s = self._config.backoff_s

    async def pause(self) -> None:
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, self._config.backoff_s_max)
        await self._clock.sleep(pause_s)


async def persist(ask: Callable[[], Awaitable[T]], config: WorkerConfig, clock: Clock) -> T:
    """Asks until it works or `give_up_s` is over; then raises the last error."""
    backoff = Backoff(config, clock)
    end_s = clock.monotonic_s() + config.give_up_s
    while True:
        try:
            return await ask()
        except MeshError as err:
            if not worth_retrying(err) or clock.monotonic_s() >= end_s:
                raise
        await backoff.pause()
