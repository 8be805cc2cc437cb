"""Requests that cannot be decoded, or that are beyond the limits of their service, end with a status that contains the
cause.

grpc.aio calls a deserializer outside of the handler, where no interceptor sees what it raises: the client would get
UNKNOWN or INTERNAL without a reason. So the deserializer returns the failure in place of the message, and the handler
raises it when it reads that message.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from rollmesh.shared.errors import (
    MeshError,
    PayloadTooLarge,
    UndecodableRequest,
    field_error,
)
from rollmesh.shared.rpc.handlers import Context, Handler, behavior_of, rebuilt
from rollmesh.shared.rpc.limits import RequestLimits

Decode = Callable[[bytes], Any]
_NO_LIMITS = RequestLimits()


class _Refused:
    """Replaces a message that the handler must not see."""

    __slots__ = ("error",)

    def __init__(self, error: MeshError) -> None:
        self.error = error


class DecodeInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Checks requests while they are decoded. `limits` are by service."""

    def __init__(self, limits: Mapping[str, RequestLimits], received: Callable[[int], None]) -> None:
        """`received` is called with the size of each request."""
        self._limits = limits
        self._received = received

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        method = handler_call_details.method
        limits = self._limits.get(method.strip("/").rpartition("/")[0], _NO_LIMITS)
        decode = _decoding(handler.request_deserializer, method, limits, self._received)
        return rebuilt(handler, _reading(behavior_of(handler), streams=handler.request_streaming), decode)


def _decoding(decode: Decode, method: str, limits: RequestLimits, received: Callable[[int], None]) -> Decode:
    def decoded(raw: bytes) -> Any:
        received(len(raw))
        if limits.request_bytes is not None and len(raw) > limits.request_bytes:
            return _Refused(
                PayloadTooLarge(
                    f"a request of {method} must have at most {limits.request_bytes} bytes, got {len(raw)}; send less "
                    "at once",
                    method=method,
                )
            )
        try:
            message = decode(raw)
        except DecodeError as err:
            return _Refused(
                UndecodableRequest(
                    f"{method} cannot decode a request of {len(raw)} bytes ({err}); encode it with the message type "
                    "that the mesh's protos name for this method, with text in UTF-8",
                    method=method,
                )
            )
        short = method.rpartition("/")[2] not in limits.long_texts
        if short and limits.text_bytes is not None and len(raw) > limits.text_bytes:
            return _with_short_texts(message, limits.text_bytes)
        return message

    return decoded


def _with_short_texts(message: Message, limit: int) -> Message | _Refused:
    for path, num_bytes in texts(message):
        if num_bytes > limit:
            return _Refused(field_error(path, f"have at most {limit} bytes", num_bytes, "shorten it"))
    return message


def texts(message: Message) -> Iterator[tuple[str, int]]:
    """Yield the path and the size in bytes of every text in `message`, keys of maps included."""
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_STRING:
            for text in value if field.is_repeated else (value,):
                yield field.name, _num_bytes(text)
        elif field.message_type is not None:
            if field.message_type.GetOptions().map_entry:
                yield from ((field.name, num_bytes) for num_bytes in _in_map(value))
            else:
                for one in value if field.is_repeated else (value,):
                    yield from ((f"{field.name}.{path}", num_bytes) for path, num_bytes in texts(one))


def _in_map(entries: Mapping[Any, Any]) -> Iterator[int]:
    for pair in entries.items():
        for part in pair:
            if isinstance(part, str):
                yield _num_bytes(part)
            elif isinstance(part, Message):
                yield from (num_bytes for _, num_bytes in texts(part))


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _reading(behavior: Callable[..., Any], *, streams: bool) -> Callable[..., Any]:
    """`behavior` with requests that raise the cause of their rejection. It is a function of the same kind, because
    grpc.aio checks the kind."""
    checked = _each if streams else _one
    if inspect.isasyncgenfunction(behavior):

        async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
            async with aclosing(behavior(checked(request), context)) as responses:
                async for response in responses:
                    yield response

        return stream
    if not inspect.iscoroutinefunction(behavior):
        return behavior  # the servicer does not implement the method

    async def call(request: Any, context: Context) -> Any:
        return await behavior(checked(request), context)

    return call


def _one(request: Any) -> Any:
    if isinstance(request, _Refused):
        raise request.error
    return request


async def _each(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _one(request)
