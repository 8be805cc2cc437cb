"""W3C trace context through gRPC metadata: a span per call on servers, `traceparent` on outgoing calls.

Costs nothing while no tracer provider is configured and the caller sends no `traceparent`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import grpc
from opentelemetry import propagate, trace

from rollmesh.shared.rpc.handlers import AroundInterceptor, Context, Handler


class TraceInterceptor(AroundInterceptor):
    """Continues the caller's trace, on servers."""

    def applies(self, details: grpc.HandlerCallDetails, handler: Handler) -> bool:
        return tracing_is_on() or any(key == "traceparent" for key, _ in _pairs(details.invocation_metadata))

    def around(self, method: str, context: Context) -> AbstractAsyncContextManager[None]:
        return _span(method, context)


def tracing_is_on() -> bool:
    """Whether the process has a tracer provider."""
    return not isinstance(trace.get_tracer_provider(), (trace.ProxyTracerProvider, trace.NoOpTracerProvider))


def trace_headers() -> dict[str, str]:
    """The current trace context as W3C headers; empty outside of a trace."""
    headers: dict[str, str] = {}
    if trace.get_current_span().get_span_context().is_valid:
        propagate.inject(headers)
    return headers


@asynccontextmanager
async def _span(method: str, context: Context) -> AsyncIterator[None]:
    headers = {key: value for key, value in _pairs(context.invocation_metadata()) if isinstance(value, str)}
    parent = propagate.extract(headers)
    tracer = trace.get_tracer("rollmesh.rpc")
    service, _, verb = method.strip("/").rpartition("/")
    attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": verb}
    with tracer.start_as_current_span(f"{service}/{verb}", parent, trace.SpanKind.SERVER, attributes):
        yield


def _pairs(metadata: Any) -> list[tuple[str, Any]]:
    return [(key, value) for key, value in metadata or ()]
