"""A span per call on servers, below the caller's. Calls without a sampled `traceparent` cost nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import grpc

from rollmesh.shared.rpc.handlers import AroundInterceptor, Context, Handler
from rollmesh.shared.telemetry import tracing


class TraceInterceptor(AroundInterceptor):
    """Continues the caller's trace, on servers. Calls outside of a trace get no span, because heartbeats would
    dominate."""

    def applies(self, details: grpc.HandlerCallDetails, handler: Handler) -> bool:
        return any(key == "traceparent" for key, _ in details.invocation_metadata or ())

    def around(self, method: str, context: Context) -> AbstractAsyncContextManager[None]:
        return _span(method, _text_headers(context.invocation_metadata()))


@asynccontextmanager
async def _span(method: str, headers: Mapping[str, str]) -> AsyncIterator[None]:
    service, _, verb = method.strip("/").rpartition("/")
    attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": verb}
    with tracing.call_span(headers, f"{service.rpartition('.')[2]}/{verb}", attributes):
        yield


def _text_headers(metadata: Any) -> dict[str, str]:
    return {key: value for key, value in metadata or () if isinstance(value, str)}
