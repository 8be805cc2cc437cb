"""The client channels that every service uses: token, deadline, trace context and retries on each call.

`MeshChannel` decorates the calls of a plain channel instead of using grpc.aio's client interceptors: those put a task
and a queue around every call, and this class changes only its timeout and metadata.

    async with open_channel(address, access=access) as channel:
        stub = run_pb2_grpc.RunServiceStub(channel)
        with typed_errors():
            reply = await stub.CommitUpdate(request)        # raises e.g. errors.Fenced
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Annotated, Any, Self

import grpc
from msgspec import Meta

from rollmesh.shared.config.settings import PositiveFloat, PositiveInt, Settings
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.addresses import host_of, split_addresses
from rollmesh.shared.rpc.auth_interceptor import bearer
from rollmesh.shared.rpc.limits import MESSAGE_BYTES_MAX
from rollmesh.shared.telemetry.tracing import trace_headers

CONNECT_S_MAX = 5.0
"""Longest wait for the outcome of an attempt to connect before a call, in seconds."""
_CONNECTING = (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING)


class ChannelConfig(Settings):
    """Limits and retries of a client."""

    deadline_s: PositiveFloat = 30.0
    """Default timeout of a unary call, in seconds. Streams have none."""
    message_bytes_max: PositiveInt = MESSAGE_BYTES_MAX
    """Maximum size of a message in each direction, in bytes."""
    keepalive_s: PositiveFloat = 20.0
    """Seconds without data after which the server is pinged. A crashed server is detected 10 s later."""
    reconnect_s_max: PositiveFloat = 1.0
    """Longest pause between attempts to connect, in seconds. It is short, so that a restarted service is found
    quickly."""
    wait_for_ready: bool = False
    """Whether a call waits (within its deadline) for a server that cannot be reached, instead of failing with
    UNAVAILABLE."""
    attempts_max: Annotated[int, Meta(ge=1, le=5)] = 4
    """Attempts of an idempotent call that ends in UNAVAILABLE; gRPC allows up to 5. 1 means no retry."""


def open_channel(
    address: str,
    *,
    access: Access,
    config: ChannelConfig | None = None,
    idempotent: Sequence[str] = (),
    once: Sequence[str] = (),
) -> MeshChannel:
    """Return a channel to `address`. It connects on the first call, and again when the connection breaks.

    `address` may list several, IP:PORT,IP:PORT: the channel uses the first one that responds, and tries all of them
    again when the connection breaks. With TLS the certificate of each server must contain the first address.

    `idempotent` lists services and methods that may be sent again after UNAVAILABLE, such as
    "rollmesh.v1.RunService" or "rollmesh.v1.RunService/CommitUpdate", and `once` methods of these services that are
    not, because UNAVAILABLE ends their wait.
    ConfigError if a TLS file of `access` cannot be read, or if a list contains a name.
    """
    config = config or ChannelConfig()
    options = _options(config, idempotent, once)
    credentials = None if address.startswith("unix:") else access.channel_credentials()
    if len(addresses := split_addresses(address)) > 1:
        name = host_of(addresses[0])
        options += [("grpc.default_authority", addresses[0]), ("grpc.ssl_target_name_override", name)]
        address = f"{'ipv6' if ':' in name else 'ipv4'}:{address}"
    if credentials is None:
        channel = grpc.aio.insecure_channel(address, options=options)
    else:
        channel = grpc.aio.secure_channel(address, credentials, options=options)
    return MeshChannel(channel, config, access.token)


async def connected_address(channel: grpc.aio.Channel, address: str) -> str:
    """Wait for the outcome of the attempt to connect. Return the address, or "" if the channel is not connected.

    A connected channel sends a call at once. If gRPC then ends the call with UNAVAILABLE, the peer may have executed
    it, in contrast to a call that found no peer (`typed_errors`).
    """
    try:
        async with asyncio.timeout(CONNECT_S_MAX):
            while (state := channel.get_state(try_to_connect=True)) in _CONNECTING:
                await channel.wait_for_state_change(state)
    except TimeoutError:
        return ""  # the call waits further, within its deadline
    return address if state is grpc.ChannelConnectivity.READY else ""


class MeshChannel(grpc.aio.Channel):
    """A channel whose calls carry the token, the trace context and, if they are unary, a deadline."""

    def __init__(self, channel: grpc.aio.Channel, config: ChannelConfig, token: str) -> None:
        self._channel = channel
        self._config = config
        self._bearer = bearer(token)

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._decorated(self._channel.unary_unary(*args, **kwargs), self._config.deadline_s)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._decorated(self._channel.unary_stream(*args, **kwargs), None)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._decorated(self._channel.stream_unary(*args, **kwargs), self._config.deadline_s)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._decorated(self._channel.stream_stream(*args, **kwargs), None)

    def _decorated(self, call: Callable[..., Any], deadline_s: float | None) -> Callable[..., Any]:
        def invoke(
            request: Any = None,
            timeout: float | None = None,
            metadata: Sequence[tuple[str, str | bytes]] | None = None,
            credentials: grpc.CallCredentials | None = None,
            wait_for_ready: bool | None = None,
            compression: grpc.Compression | None = None,
        ) -> Any:
            return call(
                request,
                timeout=deadline_s if timeout is None else timeout,
                metadata=(*(metadata or ()), self._bearer, *trace_headers().items()),
                credentials=credentials,
                wait_for_ready=self._config.wait_for_ready if wait_for_ready is None else wait_for_ready,
                compression=compression,
            )

        return invoke

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        await self.close()


def _options(config: ChannelConfig, idempotent: Sequence[str], once: Sequence[str]) -> list[tuple[str, Any]]:
    return [
        ("grpc.max_send_message_length", config.message_bytes_max),
        ("grpc.max_receive_message_length", config.message_bytes_max),
        ("grpc.keepalive_time_ms", int(config.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", min(100, int(config.reconnect_s_max * 1000))),
        # Despite its name the limit of one attempt to connect; its default of 20 s hides a host that swallows packets.
        ("grpc.min_reconnect_backoff_ms", 2_000),
        ("grpc.max_reconnect_backoff_ms", int(config.reconnect_s_max * 1000)),
        # Channels to the same address would share one connection (and its flow control) through the global pool.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.service_config", _service_config(config, idempotent, once)),
    ]


def _service_config(config: ChannelConfig, idempotent: Sequence[str], once: Sequence[str]) -> str:
    if not idempotent or config.attempts_max == 1:
        return "{}"
    names, exceptions = (
        [dict(zip(("service", "method"), name.split("/"), strict=False)) for name in some]
        for some in (idempotent, once)
    )
    retry = {
        "maxAttempts": config.attempts_max,
        "initialBackoff": "0.1s",
        "maxBackoff": "1s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    methods = [{"name": names, "retryPolicy": retry}, *([{"name": exceptions}] if exceptions else [])]
    return json.dumps({"methodConfig": methods})
