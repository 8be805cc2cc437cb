"""Bearer tokens: a server accepts only calls that carry the run's token in the `authorization` metadata.

A single health check is exempt, because a probe must work without a secret. Watching health is not exempt, because
streams without a token could exhaust the server. Tokens are compared in constant time.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from rollmesh.shared.errors import Unauthenticated
from rollmesh.shared.rpc.handlers import Context, Handler
from rollmesh.shared.rpc.status import abort_with

METADATA_KEY = "authorization"
EXEMPT = "/grpc.health.v1.Health/Check"


def bearer(token: str) -> tuple[str, str]:
    """The metadata entry that carries `token`."""
    return METADATA_KEY, f"Bearer {token}"


class AuthInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Rejects calls without the token with UNAUTHENTICATED, before their handler is looked up."""

    def __init__(self, token: str) -> None:
        self._expected = bearer(token)[1].encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        if handler_call_details.method == EXEMPT or self._admits(handler_call_details):
            return await continuation(handler_call_details)
        # Serves a method of any arity: on the wire they are alike, and a stream handler need not wait for a first
        # message.
        return grpc.stream_stream_rpc_method_handler(_refuse)

    def _admits(self, details: grpc.HandlerCallDetails) -> bool:
        given = dict(details.invocation_metadata).get(METADATA_KEY, "")
        return hmac.compare_digest(given.encode() if isinstance(given, str) else given, self._expected)


async def _refuse(requests: Any, context: Context) -> None:
    await abort_with(
        context,
        Unauthenticated(
            "no valid token; send `authorization: Bearer TOKEN` with the run's token, which its run folder holds"
        ),
    )
