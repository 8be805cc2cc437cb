"""What a server does with requests that it cannot decode, and what refused requests leave behind."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from rollmesh.shared import errors
from rollmesh.shared.rpc import heap
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import MeshChannel, open_channel
from rollmesh.shared.rpc.limits import RequestLimits
from rollmesh.shared.rpc.server import RpcServer, ServerConfig
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.v1 import events_pb2, run_pb2, weights_pb2

ACCESS = Access(token="token")
NOT_UTF_8 = b"\x0a\x02\xff\xff"
GARBAGE = b"\xff\xff\xff"
CHANGE = events_pb2.ConfigChange
RUN, BLOB = "/rollmesh.v1.RunService/", "/rollmesh.v1.BlobService/"


class Held:
    """An object that can be observed through a weak reference, as a local of a handler's frame."""


class Runs:
    """Methods of RunService that reject everything that can be decoded."""

    def __init__(self) -> None:
        self.held: list[weakref.ref[Held]] = []

    async def GetRun(self, request: run_pb2.GetRunRequest, context: Any) -> run_pb2.GetRunResponse:
        held = Held()
        self.held.append(weakref.ref(held))
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        answer.set_exception(errors.UnknownRun(f"there is no run {request.run!r}"))
        await answer
        raise AssertionError(held)

    async def WatchRun(self, request: run_pb2.WatchRunRequest, context: Any) -> AsyncIterator[run_pb2.WatchRunResponse]:
        held = Held()
        self.held.append(weakref.ref(held))
        raise errors.UnknownRun(f"there is no run {request.run!r}")
        yield held

    async def ChangeRun(self, request: run_pb2.ChangeRunRequest, context: Any) -> run_pb2.GetRunResponse:
        return run_pb2.GetRunResponse()

    def SubmitSamples(self, request: run_pb2.SubmitSamplesRequest, context: Any) -> run_pb2.SubmitSamplesResponse:
        raise NotImplementedError  # as in the generated base class


class Blobs:
    async def Put(self, requests: AsyncIterator[weights_pb2.PutRequest], context: Any) -> weights_pb2.PutResponse:
        return weights_pb2.PutResponse(existed=any([True async for _ in requests]))


def add_runs(runs: Runs, server: Any) -> None:
    make = {"WatchRun": grpc.unary_stream_rpc_method_handler}
    methods = {
        verb: make.get(verb, grpc.unary_unary_rpc_method_handler)(
            getattr(runs, verb), getattr(run_pb2, f"{verb}Request").FromString, run_pb2.GetRunResponse.SerializeToString
        )
        for verb in ("GetRun", "WatchRun", "ChangeRun", "SubmitSamples")
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("rollmesh.v1.RunService", methods),))


def add_blobs(blobs: Blobs, server: Any) -> None:
    put = grpc.stream_unary_rpc_method_handler(
        blobs.Put, weights_pb2.PutRequest.FromString, weights_pb2.PutResponse.SerializeToString
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("rollmesh.v1.BlobService", {"Put": put}),))


@asynccontextmanager
async def served(runs: Runs, limits: RequestLimits | None = None) -> AsyncIterator[MeshChannel]:
    async with RpcServer(ServerConfig(stop_s=0.0), access=ACCESS) as server:
        server.add(add_runs, runs, limits=limits)
        server.add(add_blobs, Blobs())
        await server.start()
        async with open_channel(server.address, access=ACCESS) as channel:
            yield channel


async def send(channel: MeshChannel, method: str, *requests: bytes, streams: bool) -> None:
    """Send raw bytes to a method of either kind of request. Raises MeshError."""

    async def messages() -> AsyncIterator[bytes]:
        for request in requests:
            yield request

    begin = channel.stream_stream if streams else channel.unary_stream
    with typed_errors():
        await begin(method)(messages() if streams else requests[0]).read()


@pytest.mark.parametrize("raw", [GARBAGE, NOT_UTF_8], ids=["garbage", "not-utf-8"])
@pytest.mark.parametrize(
    ("method", "before"),
    [
        (f"{RUN}GetRun", None),
        (f"{RUN}WatchRun", None),
        (f"{RUN}SubmitSamples", None),
        (f"{BLOB}Put", ()),
        (f"{BLOB}Put", (b"",)),
    ],
    ids=["unary", "response-stream", "not-implemented", "request-stream", "second-message"],
)
async def test_bytes_that_are_not_the_message_are_an_invalid_argument(
    method: str, before: tuple[bytes, ...] | None, raw: bytes
) -> None:
    async with served(Runs()) as channel:
        with pytest.raises(errors.MeshError) as caught:
            await send(channel, method, *(before or ()), raw, streams=before is not None)
    if method.endswith("SubmitSamples"):
        assert isinstance(caught.value, errors.Unimplemented)
        return
    assert isinstance(caught.value, errors.UndecodableRequest)
    assert method in str(caught.value)
    assert f"{len(raw)} bytes" in str(caught.value)


async def test_health_and_reflection_reject_them_as_well() -> None:
    async with served(Runs()) as channel:
        for method, streams in (
            ("/grpc.health.v1.Health/Check", False),
            ("/grpc.health.v1.Health/Watch", False),
            ("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", True),
        ):
            with pytest.raises(errors.UndecodableRequest):
                await send(channel, method, NOT_UTF_8, streams=streams)


async def test_a_request_beyond_the_services_limit_is_rejected_with_the_remedy() -> None:
    async with served(Runs(), RequestLimits(request_bytes=100)) as channel:
        with pytest.raises(errors.PayloadTooLarge, match="at most 100 bytes, got 101; send less at once"):
            await send(channel, f"{RUN}GetRun", bytes(101), streams=False)
        with pytest.raises(errors.UnknownRun):
            await send(channel, f"{RUN}GetRun", run_pb2.GetRunRequest(run="x" * 98).SerializeToString(), streams=False)


async def test_a_text_beyond_the_services_limit_is_rejected_by_its_path() -> None:
    long = "x" * 101
    requests = {
        "run": (f"{RUN}GetRun", run_pb2.GetRunRequest(run=long)),
        "spec.run": (f"{RUN}ChangeRun", run_pb2.ChangeRunRequest(spec=events_pb2.RunSpec(run=long))),
        "changes.key": (f"{RUN}ChangeRun", run_pb2.ChangeRunRequest(changes=[CHANGE(), CHANGE(key=long)])),
    }
    async with served(Runs(), RequestLimits(text_bytes=100)) as channel:
        for path, (method, request) in requests.items():
            with pytest.raises(errors.InvalidInput) as caught:
                await send(channel, method, request.SerializeToString(), streams=False)
            assert caught.value.violations[0].field == path
            assert "at most 100 bytes, got 101" in str(caught.value)
        many = run_pb2.ChangeRunRequest(changes=[CHANGE(key="x" * 100)] * 3)
        await send(channel, f"{RUN}ChangeRun", many.SerializeToString(), streams=False)
        digest = weights_pb2.PutRequest(digest=long)
        await send(channel, f"{BLOB}Put", digest.SerializeToString(), streams=True)


@pytest.mark.parametrize("method", ["GetRun", "WatchRun"])
async def test_a_refused_request_is_freed_without_a_garbage_collection(method: str) -> None:
    runs = Runs()
    async with served(runs) as channel:
        gc.disable()
        try:
            for _ in range(3):
                with pytest.raises(errors.MeshError):
                    await send(channel, f"{RUN}{method}", b"", streams=False)
            with pytest.raises(errors.MeshError):
                await send(channel, f"{RUN}SubmitSamples", b"", streams=False)  # the earlier calls have ended
            assert [held() for held in runs.held] == [None] * 3
        finally:
            gc.enable()


@pytest.mark.parametrize(
    ("method", "token"),
    [
        (f"{RUN}GetRun", "token"),
        (f"{RUN}WatchRun", "token"),
        (f"{RUN}SubmitSamples", "token"),
        (f"{RUN}GetRun", "wrong"),
    ],
)
async def test_refused_calls_do_not_count_against_their_connection(method: str, token: str) -> None:
    """However long ago the last garbage collection was."""
    async with RpcServer(ServerConfig(stop_s=0.0, connection_rpcs_max=8), access=ACCESS) as server:
        server.add(add_runs, Runs())
        await server.start()
        async with open_channel(server.address, access=Access(token)) as channel:
            gc.disable()
            try:
                for _ in range(20):
                    with pytest.raises((errors.UnknownRun, errors.Unimplemented, errors.Unauthenticated)):
                        await send(channel, method, b"", streams=False)
            finally:
                gc.enable()


def test_an_error_keeps_a_bounded_part_of_what_it_quotes() -> None:
    large = "x" * 1_000_000
    error = errors.InvalidInput(large, violations=[errors.FieldViolation("f", large)], name=large)
    kept = [error.message, str(error), error.metadata["name"], error.violations[0].description]
    assert max(map(len, kept)) < 10_000


async def test_the_heap_is_trimmed_once_after_many_large_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed = asyncio.Event()
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(heap, "PAUSE_S", 0.0)
    trimmer = heap.HeapTrimmer()
    monkeypatch.setattr(trimmer, "_trim", lambda _: loop.call_soon_threadsafe(trimmed.set))
    trimmer.received(heap.TRIM_AFTER_BYTES - 1)
    trimmer.received(heap.LARGE_BYTES - 1)
    assert trimmer._timer is None
    trimmer.received(heap.LARGE_BYTES)
    async with asyncio.timeout(10):
        await trimmed.wait()
    assert trimmer._timer is None
    assert trimmer._num_bytes == 0
    trimmer.close()


def test_the_memory_of_messages_is_reused_without_page_faults() -> None:
    """Eight blocks of 1 MiB take 2048 pages. A process that returns them to the system faults on each page again."""
    program = """
import resource
from rollmesh.shared.rpc.heap import reuse_freed_memory

def make_messages():
    for _ in range(20):
        [b"x" * n for n in [1 << 20] * 8]

reuse_freed_memory()
make_messages()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
make_messages()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    num_faults = int(subprocess.check_output([sys.executable, "-c", program], text=True))
    assert num_faults < 2048
