"""A bound on streams in progress, because calls without a deadline must not exhaust a server.

A server has one token, so this is the bound of that token. gRPC bounds each connection (`connection_rpcs_max`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import grpc

from rollmesh.shared.errors import Overloaded
from rollmesh.shared.rpc.handlers import AroundInterceptor, Context, Handler

RETRY_AFTER_S = 1.0


class StreamInterceptor(AroundInterceptor):
    """Rejects streams beyond `num_max` with RESOURCE_EXHAUSTED."""

    def __init__(self, num_max: int) -> None:
        self._num_max = num_max
        self._num = 0

    def applies(self, details: grpc.HandlerCallDetails, handler: Handler) -> bool:
        return bool(handler.request_streaming or handler.response_streaming)

    def around(self, method: str, context: Context) -> AbstractAsyncContextManager[None]:
        return self._counted(method)

    @asynccontextmanager
    async def _counted(self, method: str) -> AsyncIterator[None]:
        if self._num >= self._num_max:
            raise Overloaded(
                f"{self._num} streams are open, streams_max of this server; end some before {method}, or retry later",
                retry_after_s=RETRY_AFTER_S,
            )
        self._num += 1
        try:
            yield
        finally:
            self._num -= 1
