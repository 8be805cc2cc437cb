"""Infra failures of an episode: retries, boundaries and reports.

A failure is attributed where it crosses a boundary (`boundary`), passes through the agent unchanged, and is recorded
once, by `episode.EpisodeRunner`. Model failures are not exceptions of this module: they are text, an outcome of a tool,
or a limit.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rollmesh.services.rollout.config import WorkerConfig
from rollmesh.shared.clock import Clock
from rollmesh.shared.config.user_code import explain, user_traceback
from rollmesh.shared.errors import Code, DeadlineExceeded, MeshError, UnknownNode
from rollmesh.shared.net.retry import retry
from rollmesh.v1 import types_pb2

T = TypeVar("T")


def worth_retrying(err: MeshError) -> bool:
    """Return whether the peer was unreachable, too slow or full, or has not accepted this node yet."""
    return err.retryable or isinstance(err, (DeadlineExceeded, UnknownNode))


async def retry_call(ask: Callable[[], Awaitable[T]], config: WorkerConfig, clock: Clock) -> T:
    """Repeat an idempotent call until it returns or `give_up_s` has passed; then raise the last error."""
    return await retry(ask, limit_s=config.give_up_s, config=config, clock=clock, again=worth_retrying)


class EpisodeFailed(Exception):
    """An infra failure that ends the episode. `where` is the boundary at which `cause` was raised."""

    def __init__(self, where: str, cause: BaseException, *, traceback: str = "") -> None:
        """`traceback` is the one of user code in another process. The traceback of this process is read from
        `cause`."""
        super().__init__(f"{where}: {cause if isinstance(cause, MeshError) else explain(cause)}")
        self.where = where
        self.cause = cause
        self.traceback = traceback


@contextmanager
def boundary(where: str) -> Iterator[None]:
    """Attribute every error of a call into the mesh to `where`. A bug in a client is not a bug of the agent."""
    try:
        yield
    except EpisodeFailed:
        raise
    except Exception as err:
        raise EpisodeFailed(where, err) from err


def to_failure(err: EpisodeFailed) -> types_pb2.Failure:
    """Return the failure as the coordinator stores it. An error that is not a MeshError includes its traceback."""
    cause = err.cause
    if isinstance(cause, MeshError):
        return types_pb2.Failure(
            code=cause.code.value,
            reason=cause.reason,
            message=str(err),
            metadata={**cause.metadata, **({"traceback": err.traceback} if err.traceback else {})},
            retry_after_s=cause.retry_after_s or 0.0,
        )
    metadata = {"traceback": user_traceback(cause)}
    reason = f"{err.where.split(' ')[0].upper()}_FAILED"
    return types_pb2.Failure(code=Code.INTERNAL.value, reason=reason, message=str(err), metadata=metadata)
