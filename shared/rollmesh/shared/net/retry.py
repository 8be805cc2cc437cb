"""Exponential back-off, and repeating idempotent requests within a limit while the other side is away."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from rollmesh.shared.clock import Clock
from rollmesh.shared.config.settings import PositiveFloat, Settings
from rollmesh.shared.errors import Cancelled, DeadlineExceeded, InfraFailure, MeshError, Unavailable

T = TypeVar("T")

_DOUBLINGS_MAX = 30


class BackoffLimits(Protocol):
    """The two settings of a back-off, in seconds."""

    @property
    def backoff_s(self) -> float:
        """First pause."""
        ...

    @property
    def backoff_s_max(self) -> float:
        """Longest pause."""
        ...


class RetryConfig(Settings):
    """How long a client of RunService retries while the gateway is away."""

    retry_s: PositiveFloat = 60.0
    """Longest time that one request is repeated, in seconds; at least the term of the batch lease once that is
    known."""
    backoff_s: PositiveFloat = 0.05
    """First pause between attempts, in seconds; doubles up to `backoff_s_max`."""
    backoff_s_max: PositiveFloat = 2.0
    """Longest pause between attempts, in seconds."""
    call_s: PositiveFloat = 15.0
    """Deadline of one attempt, in seconds. A lease may take its `wait_s` longer."""
    fetch_s: PositiveFloat = 300.0
    """Deadline of one attempt to fetch a whole batch, in seconds."""


def pause_after(num_failed: int, first_s: float, max_s: float) -> float:
    """Return the pause in seconds after `num_failed` >= 1 consecutive failures: `first_s`, doubled for each further
    one, up to `max_s`."""
    return min(max_s, first_s * 2.0 ** min(num_failed - 1, _DOUBLINGS_MAX))


class Backoff:
    """Pauses that double from `backoff_s` to `backoff_s_max`, until `reset`."""

    def __init__(self, config: BackoffLimits, clock: Clock, jitter: random.Random | None = None) -> None:
        """`jitter` shortens each pause to a random part of at least one half, so that clients do not retry in step."""
        self._config = config
        self._clock = clock
        self._jitter = jitter
        self._num_failed = 0

    def reset(self) -> None:
        self._num_failed = 0

    async def pause(self) -> None:
        self._num_failed += 1
        pause_s = pause_after(self._num_failed, self._config.backoff_s, self._config.backoff_s_max)
        await self._clock.sleep(pause_s * self._jitter.uniform(0.5, 1.0) if self._jitter else pause_s)


def worth_retrying(err: MeshError) -> bool:
    """Return whether the other side was away, too slow, full, or stopped while it handled the request."""
    return err.retryable or isinstance(err, (DeadlineExceeded, Cancelled))


def is_away(err: MeshError) -> bool:
    """Return whether the other side was not reached or does not serve yet or any more, as opposed to a failure of the
    work."""
    return isinstance(err, Unavailable) and not isinstance(err, InfraFailure)


async def retry(
    ask: Callable[[], Awaitable[T]],
    *,
    limit_s: float,
    config: BackoffLimits,
    clock: Clock,
    again: Callable[[MeshError], bool] = worth_retrying,
) -> T:
    """Call `ask` until it returns or `limit_s` has passed; then raise the last error. Errors that `again` rejects are
    raised at once."""
    backoff = Backoff(config, clock)
    end_s = clock.monotonic_s() + limit_s
    while True:
        try:
            return await ask()
        except MeshError as err:
            if not again(err) or clock.monotonic_s() >= end_s:
                raise
        await backoff.pause()
