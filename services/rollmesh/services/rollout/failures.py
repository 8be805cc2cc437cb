"""Infra failures of an episode: which are retried, at which boundary they occur, and how they are reported.

A failure is attributed where it crosses a boundary (`boundary`), passes through the agent unchanged, and is recorded once, by
`episode.EpisodeRunner`. Nothing here is about the model: what it does wrong is text, an outcome of a tool, or a limit.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rollmesh.services.rollout.config import WorkerConfig
from rollmesh.shared.clock import Clock
from rollmesh.shared.errors import Code, DeadlineExceeded, MeshError, UnknownNode
from rollmesh.shared.retry import retry
from rollmesh.shared.user_code import explain, user_traceback
from rollmesh.v1 import types_pb2

T = TypeVar("T")


def worth_retrying(err: MeshError) -> bool:
    """Return whether the other side was away, too slow, full, or does not know this node yet."""
    return err.retryable or isinstance(err, (DeadlineExceeded, UnknownNode))


async def retry_call(ask: Callable[[], Awaitable[T]], config: WorkerConfig, clock: Clock) -> T:
    """Repeat an idempotent call until it returns or `give_up_s` has passed; then raise the last error."""
    return await retry(ask, limit_s=config.give_up_s, config=config, clock=clock, again=worth_retrying)


class EpisodeFailed(Exception):
    """An infra failure that ends the episode; `where` is the boundary it came from, `cause` what came over it."""

    def __init__(self, where: str, cause: BaseException, *, traceback: str = "") -> None:
        """`traceback` is that of a user's code in another process; one of this process is read from `cause`."""
        super().__init__(f"{where}: {_text(cause)}")
        self.where = where
        self.cause = cause
        self.traceback = traceback


@contextmanager
def boundary(where: str) -> Iterator[None]:
    """Attributes what a call into the mesh raises to `where`: a bug in a client there is not the agent's either."""
    try:
        yield
    except EpisodeFailed:
        raise
    except Exception as err:
        raise EpisodeFailed(where, err) from err


def to_failure(err: EpisodeFailed) -> types_pb2.Failure:
    """The failure as the coordinator keeps it. Errors that aren't the mesh's own bring their traceback."""
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
    return types_pb2.Failure(code=Code.INTERNAL.value, reason=_reason(err.where), message=str(err), metadata=metadata)


def _reason(where: str) -> str:
    return f"{where.split(' ')[0].upper()}_FAILED"


def _text(cause: BaseException) -> str:
    return str(cause) if isinstance(cause, MeshError) else explain(cause)
