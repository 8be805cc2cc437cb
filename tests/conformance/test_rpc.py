"""What calls between services do: errors, token, deadlines, limits, traces and cancellation, in all four arities."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from opentelemetry import trace

from rollmesh.shared import errors
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import ChannelConfig, open_channel
from rollmesh.shared.rpc.server import RpcServer, ServerConfig
from rollmesh.shared.rpc.status import typed_errors

from .rpc_kit import ACCESS, ARITIES, TOKEN, Echo, call, drain, echo_channel, echo_server, raised


@pytest.mark.parametrize("arity", ARITIES)
async def test_a_mesh_error_arrives_as_its_own_class(arity: str) -> None:
    async with echo_channel() as channel:
        assert (await call(channel, arity, b"hello"))[-1] == b"hello"
        err = await raised(channel, arity, b"raise stale")
    assert isinstance(err, errors.StaleWeights)
    assert err.metadata == {"node": "n1", "step": "3"}
    assert str(err) == "node n1 is at step 3; ask another node"


@pytest.mark.parametrize("arity", ARITIES)
async def test_a_bug_is_logged_once_and_reported_without_its_text(arity: str, caplog: pytest.LogCaptureFixture) -> None:
    async with echo_channel() as channel:
        err = await raised(channel, arity, b"raise bug")
    assert type(err) is errors.Internal
    assert "secret" not in str(err)
    records = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert len(records) == 1
    assert records[0].exc_info is not None


@pytest.mark.parametrize("arity", ARITIES)
async def test_without_the_token_nothing_is_served(arity: str) -> None:
    async with echo_server() as server, open_channel(server.address, access=Access(token="wrong")) as channel:
        assert isinstance(await raised(channel, arity, b"hello"), errors.Unauthenticated)


async def test_a_refused_stream_ends_before_its_first_request() -> None:
    async with echo_server() as server, open_channel(server.address, access=Access(token="wrong")) as channel:
        stream: Any = channel.stream_stream("/test.Echo/stream_stream")()
        with pytest.raises(errors.Unauthenticated), typed_errors():
            await asyncio.wait_for(stream.read(), 5)


async def test_retry_delay_violations_and_long_texts_survive_the_trailer() -> None:
    async with echo_channel() as channel:
        overloaded = await raised(channel, "unary_unary", b"raise long")
        invalid = await raised(channel, "unary_unary", b"raise invalid")
    assert isinstance(overloaded, errors.Overloaded)
    assert overloaded.retry_after_s == 2.5
    assert invalid.violations == (errors.FieldViolation("a.b", "must be >= 1, got -1"),)


async def test_a_handler_that_writes_to_its_context_is_mapped_too() -> None:
    async with echo_channel() as channel:
        method: Any = channel.unary_stream("/test.Echo/written")
        assert [m async for m in method(b"x")] == [b"first", b"x"]
        with pytest.raises(errors.StaleWeights), typed_errors():
            await drain(method(b"raise stale"))


async def test_a_method_the_servicer_leaves_out_is_unimplemented() -> None:
    async with echo_channel() as channel:
        for name in ("missing", "unheard_of"):
            method: Any = channel.unary_unary(f"/test.Echo/{name}")
            with pytest.raises(errors.Unimplemented), typed_errors():
                await method(b"")


async def test_a_unary_call_gets_the_channels_deadline() -> None:
    async with echo_channel(config=ChannelConfig(deadline_s=0.05)) as channel:
        assert isinstance(await raised(channel, "unary_unary", b"wait"), errors.DeadlineExceeded)


async def test_the_server_limits_a_unary_call_that_has_no_deadline() -> None:
    config = ServerConfig(deadline_s=0.05, stop_s=0.0)
    async with echo_server(config) as server, grpc.aio.insecure_channel(server.address) as channel:
        err = await raised(channel, "unary_unary", b"wait", metadata=(("authorization", f"Bearer {TOKEN}"),))
    assert isinstance(err, errors.DeadlineExceeded)
    assert "no deadline" in str(err)


@pytest.mark.parametrize("arity", ["unary_unary", "stream_stream"])
async def test_cancelling_a_call_cancels_its_handler(arity: str) -> None:
    echo = Echo()
    async with echo_server(echo=echo) as server, open_channel(server.address, access=ACCESS) as channel:
        calling = asyncio.create_task(call(channel, arity, b"wait"))
        await asyncio.wait_for(echo.waiting.wait(), 30)  # a call that is cancelled before it arrives has no handler
        calling.cancel()
        await asyncio.wait_for(echo.cancelled.wait(), 30)
        await asyncio.wait([calling])


@pytest.mark.parametrize("limited", ["server", "client"])
async def test_a_message_over_the_limit_says_so_on_either_side(limited: str) -> None:
    sizes = {"server": 8 << 20, "client": 8 << 20, limited: 1000}
    config = ChannelConfig(message_bytes_max=sizes["client"])
    async with echo_channel(ServerConfig(message_bytes_max=sizes["server"], stop_s=0.0), config=config) as channel:
        err = await raised(channel, "unary_unary", bytes(2000))
        assert await call(channel, "unary_unary", b"small") == [b"small"]
    assert err.code is errors.Code.RESOURCE_EXHAUSTED
    assert isinstance(err, errors.PayloadTooLarge)
    assert "message_bytes_max" in str(err)


@pytest.mark.parametrize("arity", ["unary_stream", "stream_unary", "stream_stream"])
async def test_streams_beyond_the_bound_are_refused_and_short_calls_go_on(arity: str) -> None:
    echo = Echo()
    config = ServerConfig(streams_max=1, stop_s=0.0)
    async with echo_server(config, echo=echo) as server, open_channel(server.address, access=ACCESS) as channel:
        first = asyncio.create_task(call(channel, arity, b"wait"))
        await asyncio.wait_for(echo.waiting.wait(), 30)
        err = await raised(channel, arity, b"more")
        assert await call(channel, "unary_unary", b"short") == [b"short"]
        first.cancel()
        await asyncio.wait_for(echo.cancelled.wait(), 30)
        assert (await call(channel, arity, b"again"))[-1] == b"again"
    assert isinstance(err, errors.Overloaded)
    assert "1 streams are open, streams_max" in str(err)
    assert err.retry_after_s == 1.0


async def test_one_connection_cannot_use_up_the_server() -> None:
    echo = Echo()
    config = ServerConfig(connection_rpcs_max=2, concurrent_rpcs_max=3, stop_s=0.0)
    async with echo_server(config, echo=echo) as server:
        greedy, modest = (open_channel(server.address, access=ACCESS) for _ in range(2))
        async with greedy, modest:
            calls = [asyncio.create_task(call(greedy, "unary_unary", b"wait")) for _ in range(8)]
            await asyncio.wait_for(echo.waiting.wait(), 30)
            assert await call(modest, "unary_unary", b"hello") == [b"hello"]
            assert not any(one.done() for one in calls)
            for one in calls:
                one.cancel()
            await asyncio.wait(calls)


async def test_a_busy_port_is_refused() -> None:
    async with echo_server() as server, RpcServer(ServerConfig(address=server.address), access=ACCESS) as second:
        with pytest.raises(errors.AddressTaken, match=rf"cannot listen on .*: process {os.getpid()} .* has the port"):
            await second.start()


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "10.0.0.1:0", "example.org:0", ":0"])
async def test_beyond_loopback_without_tls_is_refused(address: str) -> None:
    async with RpcServer(ServerConfig(address=address), access=ACCESS) as server:
        with pytest.raises(errors.ConfigError, match="without TLS"):
            await server.start()


async def test_health_needs_no_token_and_knows_each_service() -> None:
    async with echo_server() as server, grpc.aio.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service, serving in (("test.Echo", True), ("", True), ("test.Echo", False)):
            await server.set_serving(serving)
            status = (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status
            assert (status == health_pb2.HealthCheckResponse.SERVING) is serving


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_lists_services_and_describes_itself(version: str) -> None:
    service = f"grpc.reflection.{version}.ServerReflection"
    async with echo_server() as server, open_channel(server.address, access=ACCESS) as channel:
        method: Any = channel.stream_stream(
            f"/{service}/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        asks = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=service),
        ]
        answers = [answer async for answer in method(iter(asks))]
    assert {"test.Echo", service} <= {s.name for s in answers[0].list_services_response.service}
    assert f"grpc.reflection.{version}".encode() in answers[1].file_descriptor_response.file_descriptor_proto[0]


@pytest.mark.parametrize("arity", ARITIES)
async def test_the_trace_context_crosses_the_call(arity: str) -> None:
    echo = Echo()
    trace_id = 0x1234567890ABCDEF1234567890ABCDEF
    parent = trace.SpanContext(trace_id, 0x1234567890ABCDEF, is_remote=False, trace_flags=trace.TraceFlags(1))
    async with echo_server(echo=echo) as server, open_channel(server.address, access=ACCESS) as channel:
        await call(channel, arity, b"x")
        assert echo.traceparent == ""
        with trace.use_span(trace.NonRecordingSpan(parent)):
            await call(channel, arity, b"x")
        assert echo.traceparent == f"{trace_id:032x}"


async def test_an_idempotent_call_survives_a_restart_of_the_server() -> None:
    async with echo_server() as first:
        address = first.address
    patient = ChannelConfig(attempts_max=5)
    async with open_channel(address, access=ACCESS, config=patient, idempotent=["test.Echo/unary_unary"]) as channel:
        pending = asyncio.create_task(call(channel, "unary_unary", b"hello"))
        await asyncio.sleep(0)
        async with echo_server(ServerConfig(address=address, stop_s=0.0)):
            assert await pending == [b"hello"]


async def test_an_unreachable_server_is_unavailable_and_retryable() -> None:
    async with open_channel("127.0.0.1:1", access=ACCESS) as channel:
        err = await raised(channel, "unary_unary", b"x")
    assert type(err) is errors.Unavailable
    assert err.retryable


async def test_a_unix_socket_serves_as_well(tmp_path: Any) -> None:
    async with echo_channel(ServerConfig(address=f"unix:{tmp_path}/s.sock", stop_s=0.0)) as channel:
        assert await call(channel, "unary_unary", b"x") == [b"x"]
