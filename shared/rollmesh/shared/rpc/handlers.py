"""Wrapping a server-side method handler, whatever its arity: the base of the interceptors.

A handler of the mesh is an `async def` (one response, or a stream written with `context.write`) or an async generator.
A plain `def` is a method that the generated base class provides because the servicer does not implement it.
"""

from __future__ import annotations

import abc
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, TypeAlias

import grpc

from rollmesh.shared.errors import Unimplemented

Handler = Any  # grpc.RpcMethodHandler; grpc-stubs type its parts for sync servers only
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"  # quoted: generic in the stubs only


class AroundInterceptor(grpc.aio.ServerInterceptor, abc.ABC):  # type: ignore[type-arg]
    """An interceptor that is a context manager around the whole of a call."""

    @abc.abstractmethod
    def around(self, method: str, context: Context) -> AbstractAsyncContextManager[None]:
        """Entered before the handler runs and left after its last message."""

    def applies(self, details: grpc.HandlerCallDetails, handler: Handler) -> bool:
        """Return whether this call must be wrapped. Each wrap costs a generator step per streamed message."""
        return True

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None or not self.applies(handler_call_details, handler):
            return handler
        method = handler_call_details.method
        return rebuilt(handler, _wrap(behavior_of(handler), method, lambda context: self.around(method, context)))


def behavior_of(handler: Handler) -> Callable[..., Any]:
    """Return the servicer's method inside a handler."""
    behavior = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    assert behavior is not None
    return behavior  # type: ignore[no-any-return]


def rebuilt(handler: Handler, behavior: Callable[..., Any], decode: Callable[[bytes], Any] | None = None) -> Handler:
    """Return a handler of the same arity and serializers (`decode`: with this deserializer) around another behavior."""
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    return make(behavior, decode or handler.request_deserializer, handler.response_serializer)


def _wrap(
    behavior: Callable[..., Any], method: str, around: Callable[[Context], AbstractAsyncContextManager[None]]
) -> Callable[..., Any]:
    # grpc.aio checks the kind of the function, so the wrapper must have the kind of the wrapped function.
    if inspect.isasyncgenfunction(behavior):

        async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
            async with around(context), aclosing(behavior(request, context)) as responses:
                async for response in responses:
                    yield response

        return stream

    inner = behavior if inspect.iscoroutinefunction(behavior) else _not_implemented(method)

    async def call(request: Any, context: Context) -> Any:
        async with around(context):
            return await inner(request, context)

    return call


def _not_implemented(method: str) -> Callable[..., Awaitable[Any]]:
    async def refuse(request: Any, context: Context) -> Any:
        raise Unimplemented(f"{method} is not implemented by this server", method=method)

    return refuse
