"""Which errors of the mesh are worth another try to a worker, and for how long."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from rollmesh.services.rollout.config import WorkerConfig
from rollmesh.shared.clients import patience
from rollmesh.shared.clock import Clock
from rollmesh.shared.errors import DeadlineExceeded, MeshError, UnknownNode

T = TypeVar("T")


def worth_retrying(err: MeshError) -> bool:
    """For idempotent requests: the other side was away, too slow, full, or has yet to learn of this node."""
    return err.retryable or isinstance(err, (DeadlineExceeded, UnknownNode))


async def persist(ask: Callable[[], Awaitable[T]], config: WorkerConfig, clock: Clock) -> T:
    """Asks until it works or `give_up_s` is over; then raises the last error."""
    return await patience.persist(ask, limit_s=config.give_up_s, config=config, clock=clock, again=worth_retrying)
