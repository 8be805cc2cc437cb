"""Versions between nodes: deltas, forwarding in a line, sources that lie, stall or vanish. Over real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rollmesh.shared.errors import DeadlineExceeded, DiskFull, MeshError
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.server import RpcServer
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.shared.weights.blobs import BlobStore
from rollmesh.shared.weights.byte_rate import ByteRate
from rollmesh.shared.weights.delta import encode_delta
from rollmesh.shared.weights.delta_cache import DeltaCache
from rollmesh.shared.weights.digests import sha256_hex
from rollmesh.shared.weights.fetcher import Fetcher, SourceChannels
from rollmesh.shared.weights.manifest import chunk_sizes
from rollmesh.shared.weights.servicer import BlobServicer
from rollmesh.shared.weights.transfer import PIECE_BYTES, TransferConfig
from rollmesh.v1 import weights_pb2, weights_pb2_grpc

from .test_bad_days import small_disk  # noqa: F401  (a fixture)
from .weight_mesh import ACCESS, SERVER, depot, publish

CHUNK = 1 << 16
PATIENT = TransferConfig(same_host=False, stall_s=10.0, peer_wait_s=0.2)
"""For sources that do not stall. They may wait for a core."""
QUICK = TransferConfig(same_host=False, stall_s=1.0, peer_wait_s=0.2)
"""For tests in which a source stalls."""


class Peer:
    """A store with a fetcher and a BlobService, as a node has."""

    def __init__(
        self, store: BlobStore, fetch: Fetcher, sources: SourceChannels, address: str, servicer: BlobServicer
    ) -> None:
        self.store, self.fetch, self.sources, self.address, self.servicer = store, fetch, sources, address, servicer

    async def content(self, manifest: weights_pb2.WeightManifest) -> bytes:
        return b"".join([(await self.store.open(c.digest)).read_bytes() for f in manifest.files for c in f.chunks])


@contextlib.asynccontextmanager
async def peer(
    folder: Path, kind: type[BlobServicer] = BlobServicer, transfer: TransferConfig = PATIENT
) -> AsyncIterator[Peer]:
    store = BlobStore(folder, quota_bytes=64 << 20, durable=False)
    store.start()
    deltas = DeltaCache(store, bytes_max=1 << 20)
    sources = SourceChannels(lambda address: open_channel(address, access=ACCESS))
    fetch = Fetcher(store, sources, transfer, deltas)
    servicer = kind(store, writable=False, deltas=deltas)
    async with RpcServer(SERVER, access=ACCESS) as server:
        server.add(weights_pb2_grpc.add_BlobServiceServicer_to_server, servicer)
        await server.start()
        yield Peer(store, fetch, sources, server.address, servicer)
    await sources.close()
    await deltas.close()
    store.close()


def file(folder: Path, name: str, *, change: float = 0.0) -> dict[str, Path]:
    """A safetensors file of four chunks. `change` is the share of its values that differ in their lowest bit from those
    of change 0."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal(CHUNK).astype("<f4").view("<u4")
    values[np.random.default_rng(1).random(CHUNK) < change] ^= 1
    header = b'{"w":{"dtype":"F32","shape":[%d],"data_offsets":[0,%d]}}' % (CHUNK, 4 * CHUNK)
    path = folder / name
    path.write_bytes(len(header).to_bytes(8, "little") + header + values.tobytes())
    return {"model.safetensors": path}


async def two_versions(folder: Path, address: str) -> list[str]:
    """Upload two versions that differ in few bits. Return their digests."""
    made = [file(folder, "a"), file(folder, "b", change=0.01)]
    return [(await publish(address, n, one, chunk_bytes=CHUNK))[0].weights_digest for n, one in enumerate(made, 1)]


async def test_a_node_with_the_version_before_fetches_deltas_and_forwards_them(tmp_path: Path) -> None:
    async with depot(tmp_path) as source, peer(tmp_path / "p") as first, peer(tmp_path / "q") as second:
        one, two = await two_versions(tmp_path, source.address)
        for node in (first, second):
            await node.fetch.version(one, [source.address], owner="v1")
        before = [node.fetch.fetched_bytes for node in (first, second)]
        base = weights_pb2.WeightManifest.FromString((await first.store.open(one)).read_bytes())
        manifest = await first.fetch.version(two, [source.address], owner="v2", base=base)
        await second.fetch.version(two, [first.address], owner="v2", base=base)
        assert await first.content(manifest) == await second.content(manifest) == (tmp_path / "b").read_bytes()
        moved = [node.fetch.fetched_bytes - start for node, start in zip((first, second), before, strict=True)]
        assert moved[0] == moved[1] < 0.05 * (tmp_path / "b").stat().st_size


async def test_a_node_whose_base_is_gone_gets_whole_chunks(tmp_path: Path) -> None:
    async with depot(tmp_path) as source, peer(tmp_path / "p") as node:
        one, two = await two_versions(tmp_path, source.address)
        base = weights_pb2.WeightManifest.FromString((await source.store.open(one)).read_bytes())
        manifest = await node.fetch.version(two, [source.address], owner="v2", base=base)
        assert await node.content(manifest) == (tmp_path / "b").read_bytes()
        assert node.fetch.fetched_bytes > (tmp_path / "b").stat().st_size


@pytest.mark.parametrize("damage", ["deleted", "changed"])
async def test_a_base_that_is_gone_or_damaged_here_is_not_a_fault_of_the_source(tmp_path: Path, damage: str) -> None:
    """The whole chunks come from the first source, which stays the first one for the rest of the version."""
    async with depot(tmp_path) as source, peer(tmp_path / "f") as feeder, peer(tmp_path / "p") as node:
        one, two = await two_versions(tmp_path, source.address)
        for digest in (one, two):
            await feeder.fetch.version(digest, [source.address], owner=digest)
        base = weights_pb2.WeightManifest.FromString((await source.store.open(one)).read_bytes())
        await node.fetch.version(one, [feeder.address], owner="v1")
        target = weights_pb2.WeightManifest.FromString((await source.store.open(two)).read_bytes())
        node.store._verified.clear()  # as after a restart
        for digest in chunk_sizes(base).keys() - chunk_sizes(target).keys():
            path = node.store.directory / digest
            path.unlink() if damage == "deleted" else path.write_bytes(b"x" * path.stat().st_size)
        manifest = await node.fetch.version(two, [feeder.address, source.address], owner="v2", base=base)
        assert await node.content(manifest) == (tmp_path / "b").read_bytes()
        assert not node.fetch._slow


class Counting(BlobServicer):
    """A source that counts its calls."""

    num_calls = 0

    async def Fetch(self, request: weights_pb2.FetchRequest, context: Any) -> AsyncIterator[weights_pb2.FetchResponse]:
        self.num_calls += 1
        async for reply in super().Fetch(request, context):
            yield reply


async def test_a_full_disk_is_not_a_fault_of_the_source(tmp_path: Path, small_disk: Path) -> None:  # noqa: F811
    """The second source is not asked, neither then nor when there is space again."""
    async with (
        peer(tmp_path / "f") as feeder,
        depot(tmp_path) as source,
        peer(tmp_path / "s", Counting) as other,
        peer(small_disk / "p") as node,
    ):
        version, _ = await publish(source.address, 1, file(tmp_path, "a"), chunk_bytes=CHUNK)
        for one in (feeder, other):
            await one.fetch.version(version.weights_digest, [source.address], owner="v")
        ballast = small_disk / "ballast"
        ballast.write_bytes(bytes((2 << 20) - 2 * CHUNK))
        sources = [feeder.address, other.address]
        with pytest.raises(DiskFull, match="no space left"):
            await node.fetch.version(version.weights_digest, sources, owner="v")
        ballast.unlink()
        manifest = await node.fetch.version(version.weights_digest, sources, owner="v")
        assert await node.content(manifest) == (tmp_path / "a").read_bytes()
        assert isinstance(other.servicer, Counting)
        assert other.servicer.num_calls == 0


class WrongDeltas(BlobServicer):
    """A source that sends deltas of other weights."""

    async def Fetch(self, request: weights_pb2.FetchRequest, context: Any) -> AsyncIterator[weights_pb2.FetchResponse]:
        if request.base:
            size = (await self._store.open(request.digest)).stat().st_size
            yield weights_pb2.FetchResponse(data=encode_delta(bytes(size), b"x" * size), delta=True)
        else:
            async for reply in super().Fetch(request, context):
                yield reply


async def test_a_wrong_delta_is_noticed_and_the_whole_chunk_fetched(tmp_path: Path) -> None:
    async with (
        depot(tmp_path) as source,
        peer(tmp_path / "l", WrongDeltas) as liar,
        peer(tmp_path / "p") as node,
    ):
        one, two = await two_versions(tmp_path, source.address)
        for other in (liar, node):
            await other.fetch.version(one, [source.address], owner="v1")
        base = weights_pb2.WeightManifest.FromString((await node.store.open(one)).read_bytes())
        await liar.fetch.version(two, [source.address], owner="v2")
        manifest = await node.fetch.version(two, [liar.address], owner="v2", base=base)
        assert await node.content(manifest) == (tmp_path / "b").read_bytes()


async def test_a_line_of_nodes_begins_before_the_first_one_has_the_version(tmp_path: Path) -> None:
    """The last node asks first; each waits for the chunks of the node before it, and the depot sends the version
    once."""
    async with contextlib.AsyncExitStack() as stack:
        source = await stack.enter_async_context(depot(tmp_path))
        line = [await stack.enter_async_context(peer(tmp_path / str(n), transfer=LINE)) for n in range(4)]
        one, _ = await two_versions(tmp_path, source.address)
        sources = [[source.address], *([node.address, source.address] for node in line)]
        tasks = []
        for node, of in reversed(list(zip(line, sources, strict=False))):
            tasks.append(asyncio.create_task(node.fetch.version(one, of, owner="v")))
            await asyncio.sleep(0)
        manifest, *_ = await asyncio.gather(*tasks)
        assert {await node.content(manifest) for node in line} == {(tmp_path / "a").read_bytes()}
        size = (tmp_path / "a").stat().st_size
        assert all(size < node.fetch.fetched_bytes < 1.1 * size for node in line)


LINE = TransferConfig(same_host=False, peer_wait_s=10.0)


class Halts(BlobServicer):
    """A source that sends the first pieces of a blob, and the others when `proceed` is set."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.proceed = asyncio.Event()

    async def Fetch(self, request: weights_pb2.FetchRequest, context: Any) -> AsyncIterator[weights_pb2.FetchResponse]:
        num_sent = 0
        async for reply in super().Fetch(request, context):
            if num_sent == 2:
                await self.proceed.wait()
            num_sent += 1
            yield reply


async def large_blob(node: Peer) -> str:
    """Store a blob of four pieces at `node`."""
    content = np.random.default_rng(2).bytes(4 * PIECE_BYTES)
    digest = sha256_hex(content)
    with node.store.partial(digest, len(content)) as partial:
        await partial.write(content)
        await partial.commit(owner="v")
    return digest


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  # a count of bytes has no event
            await asyncio.sleep(0)


async def test_a_node_forwards_a_chunk_that_it_is_still_receiving(tmp_path: Path) -> None:
    async with (
        peer(tmp_path / "s", Halts, LINE) as source,
        peer(tmp_path / "m", transfer=LINE) as middle,
        peer(tmp_path / "e", transfer=LINE) as end,
    ):
        digest = await large_blob(source)
        options: dict[str, Any] = {"owner": "v", "size_bytes_max": 4 * PIECE_BYTES}
        last = asyncio.create_task(end.fetch.blob(digest, [middle.address, source.address], **options))
        first = asyncio.create_task(middle.fetch.blob(digest, [source.address], **options))
        await until(lambda: end.fetch.fetched_bytes == 2 * PIECE_BYTES)
        assert middle.store.missing([digest]), "the middle node has half of it"
        assert isinstance(source.servicer, Halts)
        source.servicer.proceed.set()
        await asyncio.gather(first, last)
        assert end.fetch.fetched_bytes == middle.fetch.fetched_bytes == 4 * PIECE_BYTES


class Corrupts(Halts):
    """A source that changes a byte of the second piece."""

    async def Fetch(self, request: weights_pb2.FetchRequest, context: Any) -> AsyncIterator[weights_pb2.FetchResponse]:
        num_sent = 0
        async for reply in super().Fetch(request, context):
            num_sent += 1
            yield weights_pb2.FetchResponse(data=b"?" + reply.data[1:]) if num_sent == 2 else reply


async def test_wrong_bytes_that_a_node_forwarded_are_fetched_again_by_both(tmp_path: Path) -> None:
    """The node behind learns it from the node that forwarded, before it has all bytes."""
    async with (
        peer(tmp_path / "s", Corrupts, LINE) as liar,
        peer(tmp_path / "g", transfer=LINE) as good,
        peer(tmp_path / "m", transfer=LINE) as middle,
        peer(tmp_path / "e", transfer=LINE) as end,
    ):
        digest = await large_blob(liar)
        await large_blob(good)
        options: dict[str, Any] = {"owner": "v", "size_bytes_max": 4 * PIECE_BYTES}
        last = asyncio.create_task(end.fetch.blob(digest, [middle.address, good.address], **options))
        first = asyncio.create_task(middle.fetch.blob(digest, [liar.address, good.address], **options))
        await until(lambda: end.fetch.fetched_bytes == 2 * PIECE_BYTES)
        assert isinstance(liar.servicer, Corrupts)
        liar.servicer.proceed.set()
        await asyncio.gather(first, last)
        assert middle.fetch.fetched_bytes == 8 * PIECE_BYTES
        assert end.fetch.fetched_bytes <= 7 * PIECE_BYTES
        assert not end.store.missing([digest])


class Stalls(BlobServicer):
    """A source that sends the first byte of each blob, and no other."""

    async def Fetch(self, request: weights_pb2.FetchRequest, context: Any) -> AsyncIterator[weights_pb2.FetchResponse]:
        async for reply in super().Fetch(request, context):
            yield weights_pb2.FetchResponse(data=reply.data[:1])
            await asyncio.Event().wait()


async def test_a_source_that_stalls_is_left_for_the_next_one(tmp_path: Path) -> None:
    async with (
        depot(tmp_path) as source,
        peer(tmp_path / "s", Stalls) as slow,
        peer(tmp_path / "p", transfer=QUICK) as node,
    ):
        one, _ = await two_versions(tmp_path, source.address)
        await slow.fetch.version(one, [source.address], owner="v")
        manifest = await node.fetch.version(one, [slow.address, source.address], owner="v")
        assert await node.content(manifest) == (tmp_path / "a").read_bytes()


class Trickles(BlobServicer):
    """A source that sends right bytes, one at a time, and never stalls."""

    num_pieces = 0

    async def Fetch(self, request: weights_pb2.FetchRequest, context: Any) -> AsyncIterator[weights_pb2.FetchResponse]:
        async for reply in super().Fetch(request, context):
            for at in range(len(reply.data)):
                self.num_pieces += 1
                yield weights_pb2.FetchResponse(data=reply.data[at : at + 1])
                await asyncio.sleep(0.01)


async def test_a_source_that_trickles_is_left_for_the_next_one(tmp_path: Path) -> None:
    """At 100 bytes per second a chunk would take 40 minutes. What it has sent is kept, and the depot sends the rest."""
    async with (
        depot(tmp_path) as source,
        peer(tmp_path / "s", Trickles) as slow,
        peer(tmp_path / "p", transfer=QUICK) as node,
    ):
        one, _ = await two_versions(tmp_path, source.address)
        await slow.fetch.version(one, [source.address], owner="v")
        async with asyncio.timeout(15.0):
            manifest = await node.fetch.version(one, [slow.address, source.address], owner="v")
        assert await node.content(manifest) == (tmp_path / "a").read_bytes()
        assert isinstance(slow.servicer, Trickles)
        assert slow.servicer.num_pieces > 1, "pieces within stall_s are progress, but too little"


async def test_a_source_at_the_minimum_rate_is_used(tmp_path: Path) -> None:
    """The time between its pieces adds up to more than `stall_s`. Each piece is worth more time than it took."""
    transfer = msgspec.structs.replace(QUICK, rate_min_bytes_per_s=1.0)
    async with peer(tmp_path / "s", Trickles) as slow, peer(tmp_path / "p", transfer=transfer) as node:
        data = bytes(150)  # at 10 ms each
        digest = sha256_hex(data)
        with slow.store.partial(digest, len(data)) as partial:
            await partial.write(data)
            await partial.commit(owner="v")
        await node.fetch.blob(digest, [slow.address], owner="v")
        assert (await node.store.open(digest)).read_bytes() == data
        fast = Fetcher(node.store, node.sources, msgspec.structs.replace(QUICK, stall_s=0.2, rate_min_bytes_per_s=1e6))
        node.store.release("v")
        with pytest.raises(DeadlineExceeded, match="rate_min_bytes_per_s = 1e"):
            await fast.blob(digest, [slow.address], owner="v")


class Silent(BlobServicer):
    """A source that answers nothing, as a stopped process."""

    async def Has(self, request: weights_pb2.HasRequest, context: Any) -> weights_pb2.HasResponse:
        await asyncio.Event().wait()
        raise AssertionError


async def test_a_source_that_does_not_answer_is_left_on_one_host_too(tmp_path: Path) -> None:
    here = msgspec.structs.replace(QUICK, same_host=True)
    async with (
        depot(tmp_path) as source,
        peer(tmp_path / "s", Silent) as slow,
        peer(tmp_path / "p", transfer=here) as node,
    ):
        one, _ = await two_versions(tmp_path, source.address)
        async with asyncio.timeout(15.0):  # half of the default deadline of a call
            manifest = await node.fetch.version(one, [slow.address, source.address], owner="v")
        assert await node.content(manifest) == (tmp_path / "a").read_bytes()
        assert node.fetch.fetched_bytes == 0, "the depot is on this host"


async def test_all_sources_without_the_blob_end_in_one_error_after_the_wait(tmp_path: Path) -> None:
    async with peer(tmp_path / "s") as empty, peer(tmp_path / "p") as node:
        # On a busy host, the wait of the source may end after the time in which it must send something.
        with pytest.raises(MeshError, match="is not stored here|sent nothing of blob"):
            await node.fetch.version("0" * 64, [empty.address, empty.address], owner="v")
        assert node.store.used_bytes == 0


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (weights_pb2.FetchRequest(digest="0" * 64, wait_s=61), "wait_s"),
        (weights_pb2.FetchRequest(digest="0" * 64, wait_s=-1), "wait_s"),
        (weights_pb2.FetchRequest(digest="0" * 64, wait_s=float("nan")), "wait_s"),
        (weights_pb2.FetchRequest(digest="0" * 64, base="1" * 64, offset=1), "offset"),
        (weights_pb2.FetchRequest(digest="../../etc/passwd"), "digest"),
        (weights_pb2.FetchRequest(digest="0" * 64, base="../x"), "not stored|digest"),
    ],
)
async def test_a_bad_request_names_its_field(tmp_path: Path, request_: weights_pb2.FetchRequest, message: str) -> None:
    async with peer(tmp_path / "s") as node, open_channel(node.address, access=ACCESS) as channel:
        stub = weights_pb2_grpc.BlobServiceStub(channel)
        with pytest.raises(MeshError, match=message), typed_errors():
            async for _ in stub.Fetch(request_):
                pass


async def test_a_limited_source_sends_no_faster(tmp_path: Path) -> None:
    taken: list[int] = []

    class Counts(ByteRate):
        async def take(self, num_bytes: int) -> None:
            taken.append(num_bytes)

    async with depot(tmp_path) as source, peer(tmp_path / "p") as node:
        one, _ = await two_versions(tmp_path, source.address)
        await node.fetch.version(one, [source.address], owner="v")
        node.servicer._egress = Counts(1.0)
        async with open_channel(node.address, access=ACCESS) as channel:
            request = weights_pb2.FetchRequest(digest=one)
            async for _ in weights_pb2_grpc.BlobServiceStub(channel).Fetch(request):
                pass
        assert sum(taken) == (await node.store.open(one)).stat().st_size
