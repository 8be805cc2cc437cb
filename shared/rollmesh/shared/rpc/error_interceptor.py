"""The one place where exceptions of servicers become statuses.

A `MeshError` becomes its status with details. A failed call to another server that was not translated is passed on as what it was.
Anything else is a bug: logged here once with its traceback, and INTERNAL to the client, without its text. Cancellation passes.

An exception refers to the frames that it passed, these to the request, and the call to the exception that aborted it: a cycle that keeps
a large request until the next full garbage collection. So the tracebacks are dropped once the status is sent.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import grpc

from rollmesh.shared.errors import Internal, MeshError
from rollmesh.shared.rpc.handlers import AroundInterceptor, Context
from rollmesh.shared.rpc.status import abort_with, from_rpc_error

_log = logging.getLogger(__name__)


class ErrorInterceptor(AroundInterceptor):
    """Maps exceptions to statuses, on servers."""

    def around(self, method: str, context: Context) -> AbstractAsyncContextManager[None]:
        return _mapped(method, context)


@asynccontextmanager
async def _mapped(method: str, context: Context) -> AsyncIterator[None]:
    try:
        try:
            yield
        except MeshError as err:
            await abort_with(context, err)
        except grpc.aio.AioRpcError as err:
            await abort_with(context, from_rpc_error(err))
        except grpc.aio.AbortError:
            raise  # the handler has chosen its status
        except Exception as err:  # noqa: BLE001 (the one recording point for bugs in servicers)
            _log.exception("%s failed", method)
            await abort_with(
                context, Internal(f"{method} failed with {type(err).__name__}; see the server's log", method=method)
            )
    except grpc.aio.AbortError as aborted:
        _drop_tracebacks(aborted.__context__)
        _when_done(context, aborted)  # the frames above this one are still running
        raise


def _when_done(context: Context, error: BaseException) -> None:
    callback: Any = lambda _: _drop_tracebacks(error)
    context.add_done_callback(callback)


def _drop_tracebacks(error: BaseException | None) -> None:
    """Drop the traceback of `error` and of every exception that it followed from."""
    pending, seen = [error], set[int]()
    while pending:
        one = pending.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            pending += [one.__cause__, one.__context__]
