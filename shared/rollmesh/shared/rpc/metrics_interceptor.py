"""Count every call by method and code, and measure the time of unary calls. Servers have it only if metrics are on.

Streams are counted when they end. Their duration is not meaningful, so it is not measured.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import grpc

from rollmesh.shared.errors import MeshError
from rollmesh.shared.rpc.handlers import AroundInterceptor, Context, Handler
from rollmesh.shared.telemetry.metrics import count, counter, histogram, observe

CALLS = counter(
    "rollmesh_rpc_calls_total",
    "Calls served, by method and gRPC code.",
    "service",
    "method",
    "code",
    code=[code.name for code in grpc.StatusCode],
)
CALL_SECONDS = histogram(
    "rollmesh_rpc_call_seconds",
    "Time to serve a call with one response, in seconds. It includes the wait of long polls.",
    "service",
    "method",
)
_NAMES = {key: code.name for code in grpc.StatusCode for key in (code, code.value[0])}
"""grpc.aio gives the code of an aborted call as a number."""


class MetricsInterceptor(AroundInterceptor):
    """Counts and measures calls, on servers. It is directly outside of the error interceptor, so it sees the
    statuses."""

    def __init__(self) -> None:
        self._streams: set[str] = set()

    def applies(self, details: grpc.HandlerCallDetails, handler: Handler) -> bool:
        if handler.response_streaming:
            self._streams.add(details.method)
        return True

    def around(self, method: str, context: Context) -> AbstractAsyncContextManager[None]:
        return _measured(method, context, timed=method not in self._streams)


@asynccontextmanager
async def _measured(method: str, context: Context, *, timed: bool) -> AsyncIterator[None]:
    service, _, verb = method.strip("/").rpartition("/")
    service = service.rpartition(".")[2]
    start_s, code = time.perf_counter(), "OK"
    try:
        yield
    except asyncio.CancelledError:
        code = "CANCELLED"
        raise
    except BaseException as err:
        code = _code(err, context)
        raise
    finally:
        count(CALLS, service, verb, code)
        if timed:
            observe(CALL_SECONDS, time.perf_counter() - start_s, service, verb)


def _code(err: BaseException, context: Any) -> str:
    if isinstance(err, MeshError):
        return err.code.name
    return _NAMES.get(context.code(), "UNKNOWN")
