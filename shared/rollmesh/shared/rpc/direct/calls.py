"""The client's objects of direct calls, with the methods and errors of grpc.aio's.

A call object that is dropped while the call is open cancels the call: the `DirectRpc` does not hold it. Its methods are those that
grpc.aio documents for `grpc.aio.Call` and the four arities, so they are described there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Generator, Iterable
from typing import Any

import grpc

from rollmesh.shared.rpc.direct.rpc import EOF, DirectRpc, RpcStatus

_CANCELLED = "Locally cancelled by application!"
_DROPPED = "Cancelled upon garbage collection!"
_log = logging.getLogger(__name__)

Coder = Callable[[Any], Any] | None


class DirectCall(grpc.aio.Call):
    """What the four arities share."""

    _channel = None  # grpc.aio's channels look for their own calls by this name in the frames of tasks

    def __init__(self, rpc: DirectRpc, encode: Coder, decode: Coder) -> None:
        self._rpc = rpc
        self._encode = encode
        self._decode = decode
        self._loop = asyncio.get_running_loop()

    def __del__(self) -> None:
        rpc = getattr(self, "_rpc", None)
        if rpc is not None and rpc.status is None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(rpc.cancel, _DROPPED)  # the collector may run in any thread

    def send(self, request: Any) -> None:
        """Begin to send what the caller has passed."""
        raise NotImplementedError

    def cancel(self) -> bool:
        return self._rpc.cancel(_CANCELLED)

    def cancelled(self) -> bool:
        return self._rpc.status is not None and self._rpc.status.code is grpc.StatusCode.CANCELLED

    def done(self) -> bool:
        return self._rpc.status is not None

    def time_remaining(self) -> float | None:
        return self._rpc.time_remaining()

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._rpc.on_finish(lambda: self._loop.call_soon(callback, self))  # its error is not one of the call

    async def initial_metadata(self) -> grpc.aio.Metadata:
        await self._rpc.responding()
        return grpc.aio.Metadata(*self._rpc.initial_metadata)

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata(*(await self._ended()).trailing)

    async def code(self) -> grpc.StatusCode:
        return (await self._ended()).code

    async def details(self) -> str:
        return (await self._ended()).details

    async def debug_error_string(self) -> str:
        return (await self._ended()).details

    async def wait_for_connection(self) -> None:
        if self._rpc.status is not None:
            self._raise_for_status()

    async def _ended(self) -> RpcStatus:
        if self._rpc.status is None:
            await self._rpc.finished()
        assert self._rpc.status is not None
        return self._rpc.status

    def _raise_for_status(self) -> None:
        """Raise CancelledError after a cancellation by this side, AioRpcError after another failure."""
        if self._rpc.cancelled:
            raise asyncio.CancelledError
        if self._rpc.status is not None and self._rpc.status.code is not grpc.StatusCode.OK:
            raise self._rpc.error()

    def _encoded(self, request: Any) -> bytes:
        raw: bytes = request if self._encode is None else self._encode(request)
        return raw


class _UnaryResponse(DirectCall):
    """One response."""

    _response: Any = None

    def __await__(self) -> Generator[Any, None, Any]:
        rpc = self._rpc
        if rpc.status is None:
            try:
                yield from rpc.finished()
            except asyncio.CancelledError:
                self.cancel()
                raise
        self._raise_for_status()
        if (raw := rpc.responses.get_nowait()) is not None:
            self._response = raw if self._decode is None else self._decode(raw)
        return self._response


class _ResponseStream(DirectCall):
    """Responses, read with `async for` or `read`."""

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        message = await self.read()
        if message is EOF:
            raise StopAsyncIteration
        return message

    async def read(self) -> Any:
        try:
            raw = await self._rpc.responses.get()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if raw is None:
            self._raise_for_status()
            return EOF
        return raw if self._decode is None else self._decode(raw)


class _UnaryRequest(DirectCall):
    """One request."""

    def send(self, request: Any) -> None:
        raw = self._encoded(request)
        if self._rpc.admits_request(raw):
            self._rpc.requests.put_nowait(raw)
            self._rpc.requests.end()


class _RequestStream(DirectCall):
    """Requests, from an iterator or from `write`."""

    _half_closed = False

    def send(self, request: AsyncIterator[Any] | Iterable[Any] | None) -> None:
        if request is not None:
            sending = self._loop.create_task(_send_all(self._rpc, self._encode, request))
            self._rpc.on_finish(sending.cancel)

    async def write(self, request: Any) -> None:
        if self._rpc.status is not None:
            raise asyncio.InvalidStateError("RPC already finished.")
        if self._half_closed:
            raise asyncio.InvalidStateError('RPC is half closed after calling "done_writing".')
        raw = self._encoded(request)
        try:
            sent = self._rpc.admits_request(raw) and await self._rpc.requests.put(raw)
        except asyncio.CancelledError:
            self.cancel()
            raise
        if not sent:
            self._raise_for_status()

    async def done_writing(self) -> None:
        self._half_closed = True
        self._rpc.requests.end()


class DirectUnaryUnaryCall(_UnaryRequest, _UnaryResponse, grpc.aio.UnaryUnaryCall[Any, Any]):
    """One request, one response."""


class DirectUnaryStreamCall(_UnaryRequest, _ResponseStream, grpc.aio.UnaryStreamCall[Any, Any]):
    """One request, a stream of responses."""


class DirectStreamUnaryCall(_RequestStream, _UnaryResponse, grpc.aio.StreamUnaryCall[Any, Any]):
    """A stream of requests, one response."""


class DirectStreamStreamCall(_RequestStream, _ResponseStream, grpc.aio.StreamStreamCall[Any, Any]):
    """Streams in both directions."""


async def _send_all(rpc: DirectRpc, encode: Coder, requests: AsyncIterator[Any] | Iterable[Any]) -> None:
    """Send the requests of an iterator. A failed iterator cancels the call, because its error has no other receiver."""
    try:
        async for request in _iterated(requests):
            raw = request if encode is None else encode(request)
            if not rpc.admits_request(raw) or not await rpc.requests.put(raw):
                return
        rpc.requests.end()
    except Exception:  # noqa: BLE001 (recorded here)
        _log.debug("the requests of %s failed", rpc.method, exc_info=True)
        rpc.cancel(_CANCELLED)


async def _iterated(requests: AsyncIterator[Any] | Iterable[Any]) -> AsyncIterator[Any]:
    if hasattr(requests, "__aiter__"):
        async for request in requests:
            yield request
    else:
        for request in requests:
            yield request
