"""Every unary call has a deadline: the caller's, or the default of this process.

The client half is in `channel.py` (a timeout on calls made without one). Here the server protects itself against other
clients: a unary call without a deadline gets `limit_s`. Streams have no limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import grpc

from rollmesh.shared.errors import DeadlineExceeded
from rollmesh.shared.rpc.handlers import AroundInterceptor, Context, Handler


class DeadlineInterceptor(AroundInterceptor):
    """Limits unary calls without a deadline, on servers."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s

    def applies(self, details: grpc.HandlerCallDetails, handler: Handler) -> bool:
        return not handler.response_streaming

    def around(self, method: str, context: Context) -> AbstractAsyncContextManager[None]:
        return _limited(method, self._limit_s, context)


@asynccontextmanager
async def _limited(method: str, limit_s: float, context: Context) -> AsyncIterator[None]:
    remaining_s: float | None = context.time_remaining()
    if remaining_s is not None:
        yield  # gRPC itself cancels the handler at the caller's deadline
        return
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            yield
    except TimeoutError as err:
        if not limit.expired():
            raise  # raised by the handler
        raise DeadlineExceeded(
            f"{method} took over {limit_s} s and the call has no deadline; set a deadline", method=method
        ) from err
