"""Weights on their way: upload to the depot, fetch, prepare, activate, and what goes wrong with them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from rollmesh.services.inference.engine import KvPolicy
from rollmesh.shared.codec.trajectory import decode_version, encode_version
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import (
    DiskFull,
    HashMismatch,
    InvalidInput,
    MeshError,
    NotPrepared,
    Unavailable,
    Unimplemented,
    UnknownBlob,
    WeightsRejected,
)
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.server import RpcServer
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.shared.weights.blobs import BlobStore
from rollmesh.shared.weights.fetcher import Fetcher, SourceChannels
from rollmesh.shared.weights.manifest import parse_manifest
from rollmesh.shared.weights.servicer import BlobServicer
from rollmesh.shared.weights.transfer import TransferConfig
from rollmesh.v1 import weights_pb2, weights_pb2_grpc

from ..unit.shared.safetensors_files import write_safetensors
from .weight_mesh import ACCESS, NETWORK, SERVER, coordinator, depot, inference, publish
from .weight_mesh import WeightCommand as Command
from .weight_mesh import WeightReport as Report

SAME_HOST = TransferConfig()


def files(folder: Path, *seeds: int) -> dict[str, Path]:
    """One safetensors file of about 4 KB, hence three chunks, per seed."""
    return {f"{seed}.safetensors": write_safetensors(folder / f"{seed}.safetensors", seed) for seed in seeds}


def channel(address: str) -> Any:
    return open_channel(address, access=ACCESS)


@contextlib.asynccontextmanager
async def weight_stub(address: str) -> AsyncIterator[Any]:
    async with channel(address) as opened:
        yield weights_pb2_grpc.WeightServiceStub(opened)


# Upload ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transfer", [NETWORK, SAME_HOST])
async def test_upload_stores_what_the_manifest_names(tmp_path: Path, transfer: TransferConfig) -> None:
    async with depot(tmp_path) as node:
        version, report = await publish(node.address, 1, files(tmp_path, 1), transfer=transfer)
        path = await node.store.open(version.weights_digest)
        manifest = parse_manifest(path.read_bytes())
        assert node.store.missing(chunk.digest for chunk in manifest.files[0].chunks) == []
        moved = (report.sent_bytes, report.written_bytes)
        chunks, rest = manifest.files[0].size_bytes, path.stat().st_size
        assert moved == ((chunks + rest, 0) if transfer is NETWORK else (rest, chunks))
        async with weight_stub(node.address) as stub:
            request = weights_pb2.GetManifestRequest(weights_digest=version.weights_digest)
            assert (await stub.GetManifest(request)).manifest == manifest
            with pytest.raises(Unimplemented), typed_errors():
                await stub.Prepare(weights_pb2.PrepareRequest(version=encode_version(version)))


async def test_upload_sends_only_what_changed_and_owns_the_rest(tmp_path: Path) -> None:
    async with depot(tmp_path, versions_max=2) as node:
        await publish(node.address, 1, files(tmp_path, 1, 2))
        second, report = await publish(node.address, 2, files(tmp_path, 1, 3))
        assert report.num_existed == 3
        assert report.sent_bytes < 2 * (tmp_path / "3.safetensors").stat().st_size
        third, _ = await publish(node.address, 3, files(tmp_path, 4))
        assert node.store.owners == {"weights:main@2.0", "weights:main@3.0"}
        for version in (second, third):  # the chunks that 2 shared with 1 outlived 1
            manifest = parse_manifest((await node.store.open(version.weights_digest)).read_bytes())
            assert node.store.missing(c.digest for f in manifest.files for c in f.chunks) == []


async def test_upload_into_a_full_depot_says_so_and_an_old_version_survives(tmp_path: Path) -> None:
    async with depot(tmp_path, quota_bytes=6000) as node:
        version, _ = await publish(node.address, 1, files(tmp_path, 1))
        with pytest.raises(DiskFull, match="quota_bytes = 6000"):
            await publish(node.address, 2, files(tmp_path, 2))
        assert await node.store.open(version.weights_digest)


async def test_depot_keeps_its_versions_over_a_restart(tmp_path: Path) -> None:
    async with depot(tmp_path) as node:
        version, _ = await publish(node.address, 1, files(tmp_path, 1))
    async with depot(tmp_path) as node:
        _, report = await publish(node.address, 1, files(tmp_path, 1))
        assert report.num_existed == 3
        assert await node.store.open(version.weights_digest)


async def test_put_of_wrong_bytes_is_refused_and_stores_nothing(tmp_path: Path) -> None:
    async with depot(tmp_path) as node, channel(node.address) as opened:
        stub = weights_pb2_grpc.BlobServiceStub(opened)

        async def put(**fields: Any) -> None:
            async def requests() -> AsyncIterator[weights_pb2.PutRequest]:
                yield weights_pb2.PutRequest(**fields)

            with typed_errors():
                await stub.Put(requests())

        with pytest.raises(HashMismatch):
            await put(digest="0" * 64, size_bytes=3, owner="x", data=b"abc")
        with pytest.raises(InvalidInput, match="`data` must have 2 bytes in all, .*got at least 3"):
            await put(digest="0" * 64, size_bytes=2, owner="x", data=b"abc")
        with pytest.raises(InvalidInput, match="`owner` must be set in the first message, got none"):
            await put(digest="0" * 64, size_bytes=3, data=b"abc")
        assert node.store.used_bytes == 0


# Fetch ----------------------------------------------------------------------------------------------------------------


class DamagedSource(BlobServicer):
    """A source with every bit of every blob right but one, or one that breaks off half-way."""

    def __init__(self, store: BlobStore, *, break_off: bool = False) -> None:
        super().__init__(store, writable=False)
        self._break_off = break_off
        self.offsets: list[int] = []

    async def Fetch(self, request: weights_pb2.FetchRequest, context: Any) -> AsyncIterator[weights_pb2.FetchResponse]:
        self.offsets.append(request.offset)
        data = b"".join([piece async for piece in self._store.read(request.digest, offset=request.offset)])
        if self._break_off:
            yield weights_pb2.FetchResponse(data=data[: len(data) // 2])
            raise Unavailable("the machine went away")
        yield weights_pb2.FetchResponse(data=data[:-1] + bytes([data[-1] ^ 1]))


@contextlib.asynccontextmanager
async def serving(servicer: BlobServicer) -> AsyncIterator[str]:
    async with RpcServer(SERVER, access=ACCESS) as server:
        server.add(weights_pb2_grpc.add_BlobServiceServicer_to_server, servicer)
        await server.start()
        yield server.address


@contextlib.asynccontextmanager
async def fetcher(folder: Path, transfer: TransferConfig = NETWORK) -> AsyncIterator[tuple[Fetcher, BlobStore]]:
    store = BlobStore(folder / "fetched", quota_bytes=64 << 20)
    store.start()
    sources = SourceChannels(channel)
    try:
        yield Fetcher(store, sources, transfer), store
    finally:
        await sources.close()
        store.close()


async def test_fetch_takes_right_chunks_from_the_next_source_when_one_is_wrong(tmp_path: Path) -> None:
    async with depot(tmp_path) as node, serving(DamagedSource(node.store)) as bad, fetcher(tmp_path) as (get, store):
        version, _ = await publish(node.address, 1, files(tmp_path, 1))
        manifest = await get.version(version.weights_digest, [bad, node.address], owner="v")
        assert store.missing(chunk.digest for chunk in manifest.files[0].chunks) == []


async def test_fetch_from_wrong_sources_only_stores_nothing(tmp_path: Path) -> None:
    async with depot(tmp_path) as node, serving(DamagedSource(node.store)) as bad, fetcher(tmp_path) as (get, store):
        version, _ = await publish(node.address, 1, files(tmp_path, 1))
        with pytest.raises(HashMismatch):
            await get.version(version.weights_digest, [bad], owner="v")
        assert store.used_bytes == 0
        with pytest.raises(UnknownBlob):
            await get.blob("0" * 64, [node.address], owner="v")


async def test_fetch_goes_on_where_a_lost_source_stopped(tmp_path: Path) -> None:
    async with depot(tmp_path) as node, fetcher(tmp_path) as (get, store):
        version, _ = await publish(node.address, 1, files(tmp_path, 1))
        lost, rest = DamagedSource(node.store, break_off=True), DamagedSource(node.store, break_off=True)
        async with serving(lost) as first, serving(rest) as second:
            await get.blob(version.weights_digest, [first, second, node.address], owner="v")
        size = (await store.open(version.weights_digest)).stat().st_size
        assert (lost.offsets, rest.offsets) == ([0], [size // 2])
        assert get.fetched_bytes == size


async def test_fetch_on_one_host_links_instead_of_copying(tmp_path: Path) -> None:
    async with depot(tmp_path) as node, fetcher(tmp_path, SAME_HOST) as (get, store):
        version, _ = await publish(node.address, 1, files(tmp_path, 1))
        manifest = await get.version(version.weights_digest, [node.address], owner="v")
        assert get.fetched_bytes == 0
        chunk = manifest.files[0].chunks[0].digest
        assert (await store.open(chunk)).stat().st_ino == (await node.store.open(chunk)).stat().st_ino


# Prepare and activate -------------------------------------------------------------------------------------------------


async def test_node_prepares_and_activates_on_command_and_reports_both(tmp_path: Path) -> None:
    async with (
        coordinator() as (boss, address),
        depot(tmp_path, coordinator=address) as store,
        inference(tmp_path, coordinator=address, engine="ContentEngine") as node,
    ):
        await boss.until(lambda: len(boss.hellos) == 2)
        version, _ = await publish(store.address, 3, files(tmp_path, 1), with_probes=True)
        assert node.state.active is None
        boss.command("inf-0", Command.VERB_PREPARE, version, [store.address])
        await boss.outcome("inf-0", version, Report.PHASE_PREPARED)
        boss.command("inf-0", Command.VERB_ACTIVATE, version)
        await boss.outcome("inf-0", version, Report.PHASE_ACTIVE)
        assert node.state.active == version
        assert not list(node.store.directory.glob("files-*"))


async def test_node_activates_what_it_has_prepared_if_the_command_permits_it(tmp_path: Path) -> None:
    """Also while another preparation runs, and with the versions to retain. It sends one report."""
    async with (
        coordinator() as (boss, address),
        depot(tmp_path, coordinator=address) as store,
        inference(tmp_path, coordinator=address, engine="ContentEngine", versions_max=2) as node,
    ):
        await boss.until(lambda: len(boss.hellos) == 2)
        versions = [(await publish(store.address, step, files(tmp_path, step), with_probes=True))[0] for step in (0, 1)]
        boss.command("inf-0", Command.VERB_PREPARE, versions[0], [store.address], activate=True)
        await boss.outcome("inf-0", versions[0], Report.PHASE_ACTIVE, Report.PHASE_PREPARED)
        boss.command("inf-0", Command.VERB_PREPARE, versions[1], [store.address], retain=[versions[0]], activate=True)
        boss.command("inf-0", Command.VERB_PREPARE, versions[1], [store.address], retain=[versions[0]], activate=True)
        await boss.until(lambda: len(boss.weight_reports("inf-0")) == 3)
        assert {report.phase for report in boss.weight_reports("inf-0")} == {Report.PHASE_ACTIVE}
        assert node.engine.held == (versions[1], versions[0])


async def test_a_slow_preparation_is_not_activated_over_the_version_of_a_later_command(tmp_path: Path) -> None:
    """The order of the commands decides, so a later command activates an older version."""
    async with (
        coordinator() as (boss, address),
        depot(tmp_path) as store,
        inference(tmp_path, coordinator=address, engine="PausingEngine") as node,
    ):
        await boss.until(boss.has_hello)
        slow, fast = [(await publish(store.address, step, files(tmp_path, step)))[0] for step in (5, 6)]
        resume = cast(Any, node.engine).pauses[5] = asyncio.Event()
        for version in (slow, fast):
            boss.command("inf-0", Command.VERB_PREPARE, version, [store.address], activate=True)
        await boss.outcome("inf-0", fast, Report.PHASE_ACTIVE)
        resume.set()
        report = await boss.outcome("inf-0", slow, Report.PHASE_PREPARED, Report.PHASE_ACTIVE)
        assert (report.phase, node.state.active) == (Report.PHASE_PREPARED, fast)
        boss.command("inf-0", Command.VERB_PREPARE, slow, [store.address], activate=True)
        await boss.outcome("inf-0", slow, Report.PHASE_ACTIVE)
        assert node.state.active == slow


async def test_a_slow_preparation_is_activated_while_a_later_one_is_not_ready(tmp_path: Path) -> None:
    """A node that takes longer for a version than the learner would otherwise never serve new weights."""
    async with (
        coordinator() as (boss, address),
        depot(tmp_path) as store,
        inference(tmp_path, coordinator=address, engine="PausingEngine") as node,
    ):
        await boss.until(boss.has_hello)
        first, second = [(await publish(store.address, step, files(tmp_path, step)))[0] for step in (5, 6)]
        pauses = cast(Any, node.engine).pauses = {step: asyncio.Event() for step in (5, 6)}
        for version in (first, second):
            boss.command("inf-0", Command.VERB_PREPARE, version, [store.address], activate=True)
        for version in (first, second):
            pauses[version.step].set()
            await boss.outcome("inf-0", version, Report.PHASE_ACTIVE)
        assert node.state.active == second


async def test_node_that_may_activate_reports_a_failed_preparation_once(tmp_path: Path) -> None:
    async with (
        coordinator() as (boss, address),
        depot(tmp_path) as store,
        serving(DamagedSource(store.store)) as bad,
        inference(tmp_path, coordinator=address) as node,
    ):
        await boss.until(lambda: len(boss.hellos) == 1)
        version, _ = await publish(store.address, 1, files(tmp_path, 1))
        boss.command("inf-0", Command.VERB_PREPARE, version, [bad], activate=True)
        report = await boss.outcome("inf-0", version, Report.PHASE_FAILED, Report.PHASE_ACTIVE)
        assert report.failure.reason == "HASH_MISMATCH"
        boss.command("inf-0", Command.VERB_PREPARE, version, [store.address], activate=True)
        await boss.outcome("inf-0", version, Report.PHASE_ACTIVE)
        assert len(boss.weight_reports("inf-0")) == 2
        assert node.engine.active == version


async def test_node_keeps_the_versions_that_the_command_names_and_reports_them(tmp_path: Path) -> None:
    async with (
        coordinator() as (boss, address),
        depot(tmp_path, coordinator=address) as store,
        inference(tmp_path, coordinator=address, engine="ContentEngine", versions_max=3) as node,
    ):
        await boss.until(lambda: len(boss.hellos) == 2)
        versions: list[PolicyVersion] = []
        for step, retained in enumerate(((), (0,), (0, 1), (0,))):
            version, _ = await publish(store.address, step, files(tmp_path, step), with_probes=True)
            boss.command("inf-0", Command.VERB_PREPARE, version, [store.address])
            await boss.outcome("inf-0", version, Report.PHASE_PREPARED)
            retain = [versions[index] for index in retained]
            boss.command("inf-0", Command.VERB_ACTIVATE, version, retain=retain)
            report = await boss.outcome("inf-0", version, Report.PHASE_ACTIVE)
            (sent,) = [r for node_id, r in boss.reports if node_id == "inf-0" and report in r.weights]
            assert [decode_version(held) for held in sent.held] == retain[::-1], "in the same report"
            versions.append(version)
        assert node.engine.held == (versions[3], versions[0])
        boss.hang_up("inf-0")
        await boss.until(lambda: len(boss.hellos) == 3)
        hello = boss.hellos[-1]
        assert decode_version(hello.active) == versions[3]
        assert [decode_version(held) for held in hello.held] == [versions[0]]
        assert hello.capabilities.versions_max == 3


async def test_corrupted_chunks_never_become_active(tmp_path: Path) -> None:
    async with (
        coordinator() as (boss, address),
        depot(tmp_path) as store,
        serving(DamagedSource(store.store)) as bad,
        inference(tmp_path, coordinator=address) as node,
    ):
        await boss.until(lambda: len(boss.hellos) == 1)
        version, _ = await publish(store.address, 1, files(tmp_path, 1))
        boss.command("inf-0", Command.VERB_PREPARE, version, [bad])
        report = await boss.outcome("inf-0", version, Report.PHASE_FAILED, Report.PHASE_PREPARED)
        assert report.failure.reason == "HASH_MISMATCH"
        boss.command("inf-0", Command.VERB_ACTIVATE, version)
        await boss.until(lambda: len(boss.weight_reports("inf-0")) == 2)
        assert boss.weight_reports("inf-0")[1].failure.reason == "NOT_PREPARED"
        assert node.engine.active is None


@pytest.mark.parametrize("at_once", [False, True])
async def test_node_that_serves_other_weights_quarantines_itself(tmp_path: Path, at_once: bool) -> None:
    async with (
        coordinator() as (boss, address),
        depot(tmp_path) as store,
        inference(tmp_path, coordinator=address, engine="StuckEngine") as node,
    ):
        await boss.until(lambda: len(boss.hellos) == 1)
        first, _ = await publish(store.address, 0, files(tmp_path, 1), with_probes=True)
        second, _ = await publish(store.address, 1, files(tmp_path, 2), with_probes=True)
        for version in (first, second):
            if at_once:
                boss.command("inf-0", Command.VERB_PREPARE, version, [store.address], activate=True)
                await boss.until(lambda: bool(boss.weight_reports("inf-0")))
            else:
                boss.command("inf-0", Command.VERB_PREPARE, version, [store.address])
                await boss.outcome("inf-0", version, Report.PHASE_PREPARED)
                boss.command("inf-0", Command.VERB_ACTIVATE, version)
        await boss.outcome("inf-0", first, Report.PHASE_ACTIVE)
        report = await boss.outcome("inf-0", second, Report.PHASE_PROBE_MISMATCH, Report.PHASE_ACTIVE)
        assert report.failure.reason == "PROBE_MISMATCH"
        assert float(report.failure.metadata["probe_error"]) > 0.01
        assert node.state.active is None
        boss.hang_up("inf-0")  # a new stream is not a restart
        await boss.until(lambda: len(boss.hellos) == 2)
        assert not boss.hellos[1].HasField("active")
        num_reports = len(boss.weight_reports("inf-0"))
        boss.command("inf-0", Command.VERB_PREPARE, first, [store.address])
        await boss.until(lambda: len(boss.weight_reports("inf-0")) > num_reports)
        assert boss.weight_reports("inf-0")[-1].phase == Report.PHASE_PROBE_MISMATCH


async def test_late_node_fetches_from_a_node_when_the_depot_is_gone(tmp_path: Path) -> None:
    async with inference(tmp_path, "inf-0") as early, inference(tmp_path, "inf-1") as late:
        async with depot(tmp_path) as store:
            version, _ = await publish(store.address, 5, files(tmp_path, 1))
            await early.keeper.prepare(version, [store.address])
            gone = store.address
        fetched_bytes = await late.keeper.prepare(version, [gone, early.address])
        assert fetched_bytes > (tmp_path / "1.safetensors").stat().st_size


async def test_restarted_node_has_no_weights_until_it_activates_and_fetches_nothing_twice(tmp_path: Path) -> None:
    async with depot(tmp_path) as store:
        version, _ = await publish(store.address, 2, files(tmp_path, 1))
        async with inference(tmp_path) as node, weight_stub(node.address) as stub:
            wire = encode_version(version)
            first = await stub.Prepare(weights_pb2.PrepareRequest(version=wire, sources=[store.address]))
            await stub.Activate(weights_pb2.ActivateRequest(version=wire))
            assert first.fetched_bytes > 0
            assert node.state.active == version
        async with inference(tmp_path) as node, weight_stub(node.address) as stub:
            assert node.state.active is None
            with pytest.raises(NotPrepared), typed_errors():
                await stub.Activate(weights_pb2.ActivateRequest(version=wire))
            again = await stub.Prepare(weights_pb2.PrepareRequest(version=wire, sources=[store.address]))
            assert again.fetched_bytes == 0
            await stub.Activate(weights_pb2.ActivateRequest(version=wire))
            assert node.state.active == version


async def test_node_deletes_the_assembled_files_that_a_killed_one_left(tmp_path: Path) -> None:
    async with depot(tmp_path) as store:
        version, _ = await publish(store.address, 2, files(tmp_path, 1))
        async with inference(tmp_path) as node:
            await node.keeper.prepare(version, [store.address])
            left = node.store.directory / f"files-{version.weights_digest}"
        left.mkdir()
        (left / "1.safetensors").write_bytes(b"half")
        async with inference(tmp_path) as node:
            assert not left.exists()
            assert await node.keeper.prepare(version, [store.address]) == 0, "the blobs stay"


async def test_weights_that_do_not_fit_are_rejected_and_the_old_ones_stay(tmp_path: Path) -> None:
    async with depot(tmp_path) as store, inference(tmp_path, tensors={"w": [1000]}) as node:
        good, _ = await publish(store.address, 1, files(tmp_path, 1))
        await node.keeper.prepare(good, [store.address])
        await node.keeper.activate(good, KvPolicy.RECOMPUTE)
        write_safetensors(tmp_path / "bad.safetensors", 2, num_values=7)
        bad, _ = await publish(store.address, 2, {"bad.safetensors": tmp_path / "bad.safetensors"})
        with pytest.raises(WeightsRejected, match="tensor w has shape"):
            await node.keeper.prepare(bad, [store.address])
        assert node.state.active == good


async def test_discard_stops_a_prepare_in_progress(tmp_path: Path) -> None:
    async with depot(tmp_path) as store, inference(tmp_path, engine="LoadingEngine") as node:
        version, _ = await publish(store.address, 1, files(tmp_path, 1))
        preparing = asyncio.create_task(node.keeper.prepare(version, [store.address]))
        await asyncio.wait_for(cast(Any, node.engine).loading.wait(), 20)
        await node.keeper.discard(version)
        with pytest.raises(MeshError, match="was cancelled"):
            await preparing
        assert node.store.owners == set()
