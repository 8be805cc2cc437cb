"""How calls begin, stream and end: metadata, context, flow control, cancellation, and the stop of a server."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import socket
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from grpc.aio import EOF  # type: ignore[attr-defined]  # the stubs leave it out
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from rollmesh.shared import errors
from rollmesh.shared.rpc import channel as channel_module
from rollmesh.shared.rpc.channel import ChannelConfig, connected_address, open_channel
from rollmesh.shared.rpc.server import RpcServer, ServerConfig
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.v1 import run_pb2

from .rpc_kit import ACCESS, ARITIES, METHOD, Echo, call, drain, echo_server, one_call, one_method

LIMIT_S = 30.0
MIB = bytes(1 << 20)


class Waiting:
    """A handler of any arity that waits until it is released or cancelled."""

    def __init__(self) -> None:
        self.begun, self.release, self.cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def wait(self) -> bytes:
        self.begun.set()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return b"released"

    async def unary_unary(self, request: Any, context: Any) -> bytes:
        return await self.wait()

    async def stream_unary(self, request: Any, context: Any) -> bytes:
        return await self.wait()

    async def unary_stream(self, request: Any, context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        yield await self.wait()

    async def stream_stream(self, request: Any, context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        yield await self.wait()


async def begin(make: Any, arity: str, **options: Any) -> Any:
    return make(**options) if arity.startswith("stream") else make(b"", **options)


async def outcome(call: Any, arity: str) -> None:
    """Read a call to its end. Raises what the client gets."""
    with typed_errors():
        if arity.endswith("unary"):
            await call
        else:
            await drain(call)


async def within(work: Any) -> Any:
    return await asyncio.wait_for(work, LIMIT_S)


# Metadata and status --------------------------------------------------------------------------------------------------


async def test_metadata_cross_in_each_direction() -> None:
    async def behavior(request: bytes, context: Any) -> bytes:
        given = dict(context.invocation_metadata())
        await context.send_initial_metadata((("first", given["asked"]), ("first-bin", given["asked-bin"])))
        context.set_trailing_metadata((("last", "z"),))
        return b"body"

    async with one_call("unary_unary", behavior) as make:
        made = make(b"", metadata=(("asked", "a"), ("asked-bin", b"\x00\xff")))
        initial = await made.initial_metadata()
        assert (initial["first"], initial["first-bin"]) == ("a", b"\x00\xff")
        assert await made == b"body"
        assert (await made.trailing_metadata())["last"] == "z"
        assert await made.code() is grpc.StatusCode.OK
        assert await made.details() == ""
        assert made.done()
        assert not made.cancel()
        assert not made.cancelled()


async def test_a_handler_may_set_a_status_without_an_error() -> None:
    async def behavior(request: bytes, context: Any) -> bytes:
        context.set_code(grpc.StatusCode.NOT_FOUND)
        context.set_details("nothing here")
        return b"dropped"

    async with one_call("unary_unary", behavior) as make:
        with pytest.raises(errors.NotFound, match="nothing here"), typed_errors():
            await make(b"")


async def test_the_handler_sees_the_remaining_time_of_the_call() -> None:
    seen: list[float | None] = []

    async def behavior(request: bytes, context: Any) -> AsyncIterator[bytes]:
        seen.append(context.time_remaining())
        yield b""

    async with one_call("unary_stream", behavior) as make:
        await drain(make(b"", timeout=20.0))
        await drain(make(b""))
    assert seen[0] is not None
    assert 10.0 < seen[0] < 21.0
    assert seen[1] is None


async def test_done_callbacks_run_on_both_sides() -> None:
    served, called = asyncio.Event(), asyncio.Event()

    async def behavior(request: bytes, context: Any) -> bytes:
        context.add_done_callback(lambda _: served.set())
        return b""

    async with one_call("unary_unary", behavior) as make:
        made = make(b"")
        made.add_done_callback(lambda _: called.set())
        await made
        await within(called.wait())
        await within(served.wait())


async def test_a_response_that_cannot_be_encoded_fails_the_call() -> None:
    async def behavior(request: bytes, context: Any) -> Any:
        return "not bytes"

    coders: dict[str, Any] = {"response_serializer": run_pb2.GetRunResponse.SerializeToString}
    async with (
        one_method("unary_unary", behavior, **coders) as server,
        open_channel(server.address, access=ACCESS) as channel,
    ):
        with pytest.raises(errors.MeshError, match="TypeError") as caught, typed_errors():
            await channel.unary_unary(METHOD)(b"")
    assert caught.value.code is errors.Code.UNKNOWN


async def test_the_handler_runs_in_the_context_of_the_server() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")

    async def behavior(request: bytes, context: Any) -> bytes:
        found = variable.get().encode()
        variable.set("set by the handler")
        return found

    variable.set("server")
    async with one_call("unary_unary", behavior) as make:
        variable.set("client")
        assert [await make(b""), await make(b"")] == [b"server", b"server"]
    assert variable.get() == "client"


# Streams --------------------------------------------------------------------------------------------------------------


async def test_a_writer_waits_for_a_slow_reader() -> None:
    num_written = 0
    full = asyncio.Event()

    async def behavior(request: bytes, context: Any) -> AsyncIterator[bytes]:
        nonlocal num_written
        while num_written < 200:
            yield MIB
            num_written += 1
            full.clear()
            asyncio.get_running_loop().call_later(0.3, full.set)  # no write finished for so long: the window is closed

    async with one_call("unary_stream", behavior) as make:
        made = make(b"")
        assert len(await made.read()) == len(MIB)
        await within(full.wait())
        assert num_written < 32
        assert 1 + len([True async for _ in _rest(made)]) == 200


async def _rest(made: Any) -> AsyncIterator[bytes]:
    while (message := await made.read()) is not EOF:
        yield message


async def test_a_client_waits_for_a_slow_handler() -> None:
    num_written, release = 0, asyncio.Event()

    async def behavior(requests: AsyncIterator[bytes], context: Any) -> bytes:
        await release.wait()
        return str(len([True async for _ in requests])).encode()

    async with one_call("stream_unary", behavior) as make:
        made = make()

        async def write() -> None:
            nonlocal num_written
            for _ in range(200):
                await made.write(MIB)
                num_written += 1
            await made.done_writing()

        writing = asyncio.create_task(write())
        before = -1
        while before < num_written:
            before = num_written
            await asyncio.wait([writing], timeout=0.3)
        assert num_written < 32
        release.set()
        assert await within(made) == b"200"
        await writing


async def test_messages_before_an_error_are_delivered() -> None:
    async def behavior(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"1"
        yield b"2"
        raise errors.UnknownRun("no such run")

    async with one_call("unary_stream", behavior) as make:
        made = make(b"")
        assert [await anext(aiter(made)), await anext(aiter(made))] == [b"1", b"2"]
        with pytest.raises(errors.UnknownRun), typed_errors():
            await anext(aiter(made))
        with pytest.raises(errors.UnknownRun), typed_errors():
            await made.wait_for_connection()


async def test_the_directions_of_a_stream_are_independent() -> None:
    async def behavior(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        yield b"welcome"
        async for request in requests:
            yield request
        yield b"bye"

    async with one_call("stream_stream", behavior) as make:
        made = make()
        assert await within(made.read()) == b"welcome"
        for text in (b"a", b"b"):
            await made.write(text)
            assert await within(made.read()) == text
        await made.done_writing()
        await made.done_writing()
        with pytest.raises(asyncio.InvalidStateError):
            await made.write(b"late")
        assert await within(made.read()) == b"bye"
        assert await within(made.read()) is EOF
        assert await made.code() is grpc.StatusCode.OK
        with pytest.raises(asyncio.InvalidStateError):
            await made.write(b"late")


async def test_a_handler_may_end_before_it_has_read_its_requests() -> None:
    async def behavior(requests: AsyncIterator[bytes], context: Any) -> bytes:
        async for request in requests:
            return request
        return b"none"

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield MIB

    async with one_call("stream_unary", behavior) as make:
        assert await within(make(endless())) == MIB


@pytest.mark.parametrize("ends", [True, False])
async def test_a_stream_that_ends_while_its_client_writes_is_unavailable(ends: bool) -> None:
    """gRPC replaces the status, so a client calls again, and gets the status when it does not write."""

    async def behavior(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for _ in requests:
            if ends:
                return
            raise errors.StaleWeights("node n1 is at step 3")
        yield b""

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield MIB

    async with one_call("stream_stream", behavior) as make:
        with pytest.raises(errors.Unavailable, match="ended while a message was sent"), typed_errors():
            await within(drain(make(endless())))


async def test_a_failed_request_iterator_cancels_the_call() -> None:
    waiting = Waiting()

    async def broken() -> AsyncIterator[bytes]:
        yield b"x"
        await waiting.begun.wait()
        raise ZeroDivisionError

    async with one_call("stream_stream", waiting.stream_stream) as make:
        with pytest.raises(asyncio.CancelledError):
            await within(drain(make(broken())))
        await within(waiting.cancelled.wait())


async def test_a_stream_with_an_oversized_message_fails() -> None:
    async def behavior(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield bytes(int(request))

    config = ServerConfig(message_bytes_max=1000, stop_s=0.0)
    async with one_call("stream_stream", behavior, config) as make:
        made = make()
        await made.write(b"10")
        assert len(await made.read()) == 10
        await made.write(b"5000")
        with pytest.raises(errors.PayloadTooLarge), typed_errors():
            await within(made.read())
        second = make()
        with pytest.raises(errors.PayloadTooLarge):
            await _write_and_read(second, bytes(5000))


async def _write_and_read(made: Any, message: bytes) -> None:
    with typed_errors():
        await made.write(message)
        await within(made.read())


async def test_many_calls_at_once_get_their_own_answers() -> None:
    async with echo_server() as server, open_channel(server.address, access=ACCESS) as channel:
        calls = [
            call(channel, arity, f"{n}".encode()) for n in range(100) for arity in ("unary_unary", "stream_stream")
        ]
        answers = await within(asyncio.gather(*calls))
    assert [one[-1] for one in answers] == [f"{n}".encode() for n in range(100) for _ in range(2)]


async def test_calls_beyond_the_servers_limit_are_rejected() -> None:
    waiting = Waiting()
    async with one_call("unary_unary", waiting.unary_unary, ServerConfig(concurrent_rpcs_max=1, stop_s=0.0)) as make:
        first = make(b"")
        await within(waiting.begun.wait())
        with pytest.raises(errors.Overloaded), typed_errors():
            await make(b"")
        waiting.release.set()
        assert await first == b"released"


# Ends -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arity", ARITIES)
async def test_the_deadline_ends_both_sides(arity: str) -> None:
    waiting = Waiting()
    async with one_call(arity, getattr(waiting, arity)) as make:
        with pytest.raises(errors.DeadlineExceeded):
            await within(outcome(await begin(make, arity, timeout=2.0), arity))
        await within(waiting.cancelled.wait())


@pytest.mark.parametrize("arity", ARITIES)
async def test_a_cancelled_call_ends_both_sides(arity: str) -> None:
    waiting = Waiting()
    async with one_call(arity, getattr(waiting, arity)) as make:
        made = await begin(make, arity)
        await within(waiting.begun.wait())
        assert made.cancel()
        assert not made.cancel()
        await within(waiting.cancelled.wait())
        assert made.cancelled()
        assert await made.code() is grpc.StatusCode.CANCELLED
        with pytest.raises(asyncio.CancelledError):
            await outcome(made, arity)


@pytest.mark.parametrize("arity", ARITIES)
async def test_a_cancelled_reader_cancels_its_call(arity: str) -> None:
    waiting = Waiting()
    async with one_call(arity, getattr(waiting, arity)) as make:
        reading = asyncio.create_task(outcome(await begin(make, arity), arity))
        await within(waiting.begun.wait())
        reading.cancel()
        await within(waiting.cancelled.wait())
        assert (await asyncio.gather(reading, return_exceptions=True))[0].__class__ is asyncio.CancelledError


async def test_a_client_that_drops_its_call_cancels_it() -> None:
    waiting = Waiting()
    async with one_call("unary_stream", waiting.unary_stream) as make:
        made = make(b"")
        await made.read()
        await within(waiting.begun.wait())
        del made
        gc.collect()
        await within(waiting.cancelled.wait())


# gRPC leaves streams of a closed channel open until they are dropped.
@pytest.mark.parametrize("arity", ["unary_unary", "stream_unary"])
async def test_closing_the_channel_cancels_its_calls(arity: str) -> None:
    waiting = Waiting()
    async with one_method(arity, getattr(waiting, arity)) as server:
        channel = open_channel(server.address, access=ACCESS)
        made = await begin(getattr(channel, arity)(METHOD), arity)
        reading = asyncio.create_task(outcome(made, arity))
        await within(waiting.begun.wait())
        await channel.close()
        await within(waiting.cancelled.wait())
        assert isinstance(
            (await asyncio.gather(reading, return_exceptions=True))[0], asyncio.CancelledError | errors.Cancelled
        )
        with pytest.raises(grpc.aio.UsageError):
            await channel.unary_unary(METHOD)(b"")


@pytest.mark.parametrize("arity", ARITIES)
async def test_a_handler_that_cancels_itself_fails_the_call(arity: str) -> None:
    async def value(request: Any, context: Any) -> bytes:
        raise asyncio.CancelledError

    async def stream(request: Any, context: Any) -> AsyncIterator[bytes]:
        raise asyncio.CancelledError
        yield b""

    async with one_call(arity, value if arity.endswith("unary") else stream) as make:
        with pytest.raises(errors.DeadlineExceeded):  # gRPC leaves the call open
            await within(outcome(await begin(make, arity, timeout=0.5), arity))


@pytest.mark.parametrize("arity", ARITIES)
async def test_a_server_that_stops_waits_for_calls_in_progress(arity: str) -> None:
    waiting = Waiting()
    async with (
        one_method(arity, getattr(waiting, arity)) as server,
        open_channel(server.address, access=ACCESS) as channel,
    ):
        reading = asyncio.create_task(outcome(await begin(getattr(channel, arity)(METHOD), arity), arity))
        await within(waiting.begun.wait())
        stopping = asyncio.create_task(server.stop(LIMIT_S))
        await asyncio.wait([stopping], timeout=0.1)
        with pytest.raises(errors.Unavailable), typed_errors():
            await channel.unary_unary(METHOD)(b"")
        waiting.release.set()
        await within(reading)
        await within(stopping)


@pytest.mark.parametrize("arity", ARITIES)
async def test_a_server_that_has_stopped_ends_its_calls_as_unavailable(arity: str) -> None:
    waiting = Waiting()
    async with (
        one_method(arity, getattr(waiting, arity)) as server,
        open_channel(server.address, access=ACCESS) as channel,
    ):
        reading = asyncio.create_task(outcome(await begin(getattr(channel, arity)(METHOD), arity), arity))
        await within(waiting.begun.wait())
        await within(server.stop(0.0))
        assert waiting.cancelled.is_set()
        with pytest.raises(errors.Unavailable):
            await within(reading)
        with pytest.raises(errors.Unavailable), typed_errors():
            await channel.unary_unary(METHOD)(b"")


async def test_calls_that_wait_for_another_one_end_with_the_server() -> None:
    waiting, num = Waiting(), 600
    config = ServerConfig(connection_rpcs_max=2, stop_s=0.0)
    async with (
        one_method("unary_unary", waiting.unary_unary, config) as server,
        open_channel(server.address, access=ACCESS) as channel,
    ):
        readings = [asyncio.create_task(outcome(channel.unary_unary(METHOD)(b""), "unary_unary")) for _ in range(num)]
        await within(waiting.begun.wait())
        await within(server.stop(0.0))
        ends = await within(asyncio.gather(*readings, return_exceptions=True))
    assert [type(end) for end in ends] == [errors.Unavailable] * num


async def test_a_channel_finds_the_server_that_replaces_a_stopped_one() -> None:
    async with echo_server() as first, open_channel(first.address, access=ACCESS) as channel:
        address = first.address
        assert await call(channel, "unary_unary", b"1") == [b"1"]
        await first.stop()
        with pytest.raises(errors.Unavailable):
            await call(channel, "unary_unary", b"2")
        async with echo_server(ServerConfig(address=address, stop_s=0.0)):
            assert await call(channel, "unary_unary", b"3", wait_for_ready=True) == [b"3"]
            assert await call(channel, "stream_stream", b"4", wait_for_ready=True) == [b"4"]


async def test_an_address_is_connected_only_if_its_server_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    async with echo_server() as server, open_channel(server.address, access=ACCESS) as channel:
        assert await within(connected_address(channel, server.address)) == server.address
        address = server.address
        await server.stop()
    async with open_channel(address, access=ACCESS) as channel:
        assert await within(connected_address(channel, address)) == ""
    monkeypatch.setattr(channel_module, "CONNECT_S_MAX", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        async with open_channel(address, access=ACCESS) as channel:
            assert await within(connected_address(channel, address)) == ""
            with pytest.raises(errors.DeadlineExceeded), typed_errors():
                await within(channel.unary_unary(METHOD)(b"", timeout=0.1))


async def test_a_client_may_open_its_channel_before_the_server_starts() -> None:
    async with echo_server() as probe:
        address = probe.address
    async with open_channel(address, access=ACCESS, config=ChannelConfig(wait_for_ready=True)) as channel:
        waiting = asyncio.create_task(call(channel, "unary_unary", b"x"))
        await asyncio.wait([waiting], timeout=0.05)
        async with echo_server(ServerConfig(address=address, stop_s=0.0)):
            assert await within(waiting) == [b"x"]


async def test_a_handler_outlives_neither_its_call_nor_its_server() -> None:
    echo = Echo()
    async with echo_server(echo=echo) as server, open_channel(server.address, access=ACCESS) as channel:
        before = asyncio.all_tasks()
        for arity in ARITIES:
            await call(channel, arity, b"x")
        with pytest.raises(errors.DeadlineExceeded):
            await call(channel, "unary_unary", b"wait", timeout=2.0)
        await within(echo.cancelled.wait())
        await within(_settled(before))


async def _settled(before: set[asyncio.Task[Any]]) -> None:
    while asyncio.all_tasks() - before - {asyncio.current_task()}:  # noqa: ASYNC110 (tasks end)
        await asyncio.sleep(0)


@pytest.mark.slow
async def test_requests_that_wait_for_a_busy_process_for_longer_than_30_s_are_answered() -> None:
    """gRPC would cancel all but one of them, and `rollmesh train` failed with CANCELLED on a busy host."""

    def check(address: str) -> int:
        with grpc.insecure_channel(address) as channel:
            found = HealthStub(channel).Check(HealthCheckRequest(), timeout=60.0)
        return int(found.status)

    async with RpcServer(ServerConfig(stop_s=0.0), access=ACCESS) as server:
        await server.start()
        with ThreadPoolExecutor(3) as clients:
            asked = [clients.submit(check, server.address) for _ in range(3)]
            threading.Event().wait(32.0)  # the loop of the server takes no request meanwhile
            found = await asyncio.gather(*map(asyncio.wrap_future, asked))
    assert found == [HealthCheckResponse.SERVING] * 3
