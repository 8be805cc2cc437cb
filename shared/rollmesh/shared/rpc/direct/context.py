"""`DirectContext`: what a handler sees of a direct call, with the meaning that grpc.aio gives to each method."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any, NoReturn

import grpc

from rollmesh.shared.rpc.direct.rpc import EOF, DirectRpc, Metadata, RpcStatus

PEER = "inproc:rollmesh"
"""Name of the peer of every direct call."""
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class DirectContext(grpc.aio.ServicerContext[Any, Any]):
    """The context of one call."""

    def __init__(
        self, rpc: DirectRpc, decode: Callable[[bytes], Any] | None, encode: Callable[[Any], bytes] | None
    ) -> None:
        self._rpc = rpc
        self._decode = decode
        self._encode = encode
        self._code = 0
        self._details = ""
        self._trailing: Metadata = ()

    # Messages ---------------------------------------------------------------------------------------------------------

    async def read(self) -> Any:
        """Return the next request; `EOF` after the last one."""
        raw = await self._rpc.requests.get()
        if raw is None:
            return EOF
        return raw if self._decode is None else self._decode(raw)

    async def requests(self) -> AsyncIterator[Any]:
        """Yield the requests of a stream."""
        decode, get = self._decode, self._rpc.requests.get
        while (raw := await get()) is not None:
            yield raw if decode is None else decode(raw)

    async def write(self, message: Any) -> None:
        """Send a response as soon as the client's window is open."""
        raw = message if self._encode is None else self._encode(message)
        self._rpc.begin_response()
        if not self._rpc.admits_response(raw) or not await self._rpc.responses.put(raw):
            raise self._ended()

    # The end of the call ----------------------------------------------------------------------------------------------

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> NoReturn:
        """End the call with a status, and raise AbortError."""
        self._code, self._details = code.value[0] or grpc.StatusCode.UNKNOWN.value[0], details
        self._trailing = tuple(trailing_metadata or self._trailing)
        self.finish()
        raise grpc.aio.AbortError("the handler has ended the call")

    def finish(self) -> None:
        """End the call with the status that the handler has set; OK by default."""
        self._rpc.finish(RpcStatus(_CODES[self._code], self._details, self._trailing))

    def _ended(self) -> grpc.aio.AbortError:
        status = self._rpc.status
        assert status is not None
        self._code = status.code.value[0]
        return grpc.aio.AbortError(f"the call has ended: {status.details}")

    def set_code(self, code: grpc.StatusCode) -> None:
        self._code = code.value[0]

    def set_details(self, details: str) -> None:
        self._details = details

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        self._trailing = tuple(trailing_metadata)

    def code(self) -> Any:
        """Return the code as a number, as grpc.aio does."""
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Any:
        return self._trailing

    def cancelled(self) -> bool:
        return self.done() and self._rpc.status is not None and self._rpc.status.code is grpc.StatusCode.CANCELLED

    def done(self) -> bool:
        return self._rpc.status is not None

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        loop = asyncio.get_running_loop()
        self._rpc.on_finish(lambda: loop.call_soon(callback, self))  # its error is not one of the call

    # The caller -------------------------------------------------------------------------------------------------------

    async def send_initial_metadata(self, initial_metadata: Any) -> None:
        self._rpc.begin_response(tuple(initial_metadata))

    def invocation_metadata(self) -> Any:
        return self._rpc.metadata

    def time_remaining(self) -> float | None:  # type: ignore[override]  # the stubs leave out None
        return self._rpc.time_remaining()

    def peer(self) -> str:
        return PEER

    def peer_identities(self) -> Iterable[bytes] | None:
        """Return None: the token authenticates the call, not the peer."""
        return None

    def peer_identity_key(self) -> str | None:
        return None

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        return {}

    def set_compression(self, compression: grpc.Compression) -> None:
        """Do nothing: messages stay in memory."""

    def disable_next_message_compression(self) -> None:
        """Do nothing: messages stay in memory."""
