"""The one place where exceptions of servicers become statuses.

A `MeshError` becomes its status with details. A failed call to another server that was not translated keeps its status.
Every other exception is a bug. It is logged here once with its traceback, and the client gets INTERNAL without its
text. Cancellation passes unchanged.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import grpc

from rollmesh.shared.errors import Internal, MeshError
from rollmesh.shared.rpc.handlers import AroundInterceptor, Context
from rollmesh.shared.rpc.status import abort_with, drop_tracebacks_later, from_rpc_error

_log = logging.getLogger(__name__)


class ErrorInterceptor(AroundInterceptor):
    """Converts exceptions to statuses, on servers."""

    def around(self, method: str, context: Context) -> AbstractAsyncContextManager[None]:
        return _mapped(method, context)


@asynccontextmanager
async def _mapped(method: str, context: Context) -> AsyncIterator[None]:
    try:
        yield
    except MeshError as err:
        await abort_with(context, err)
    except grpc.aio.AioRpcError as err:
        await abort_with(context, from_rpc_error(err))
    except grpc.aio.AbortError as err:  # the handler has chosen its status
        drop_tracebacks_later(err)
        raise
    except Exception as err:  # noqa: BLE001 (the one recording point for bugs in servicers)
        _log.exception("%s failed", method)
        await abort_with(
            context, Internal(f"{method} failed with {type(err).__name__}; see the server's log", method=method)
        )
