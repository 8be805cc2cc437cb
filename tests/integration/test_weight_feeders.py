"""Sources of weights that are killed in mid-transfer, stall or lie: a version is delayed, and never changed.

docs/reliability.md has the table.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rollmesh.services.inference.engine import KvPolicy
from rollmesh.shared.errors import DiskFull, UnknownBlob
from rollmesh.shared.weights.manifest import parse_manifest
from rollmesh.shared.weights.servicer import BlobServicer
from rollmesh.v1 import weights_pb2

from .coordinator_mesh import eventually
from .script_process import LIMIT_S, line_of, script_process
from .test_weight_plane import CHUNK, PATIENT, QUICK, file, peer
from .weight_mesh import ACCESS, coordinator, depot, inference, publish, serve, small
from .weight_mesh import WeightCommand as Command
from .weight_mesh import WeightReport as Report

FEEDER = """
import asyncio, os, sys
from pathlib import Path
from rollmesh.services.inference.config import InferenceConfig
from rollmesh.services.inference.node import InferenceNode
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.weights.transfer import TransferConfig

async def main(folder, source, digest):
    config = InferenceConfig(
        directory=folder, engine=Extension("fake"), egress_bytes_per_s=3e5, transfer=TransferConfig(same_host=False)
    )
    async with InferenceNode(config, node_id="feeder", access=Access(token=os.environ["SECRET"])) as node:
        await node.keeper.prepare(PolicyVersion(policy="main", step=1, weights_digest=digest), [source])
        print(node.address, flush=True)
        await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""
"""A node that has a version and sends 300 kB per second."""


async def test_a_feeder_that_is_killed_in_mid_transfer_is_replaced_by_the_depot(tmp_path: Path) -> None:
    async with depot(tmp_path) as store, inference(tmp_path, engine="ContentEngine") as node:
        before, _ = await publish(store.address, 0, small(tmp_path, 0), with_probes=True)
        await serve(node, before, store.address)
        version, _ = await publish(store.address, 1, file(tmp_path, "a"), with_probes=True, chunk_bytes=CHUNK)
        manifest = parse_manifest((await store.store.open(version.weights_digest)).read_bytes())
        chunks = [chunk.digest for chunk in manifest.files[0].chunks]
        with script_process(
            FEEDER, tmp_path / "feeder", store.address, version.weights_digest, access=ACCESS
        ) as feeder:
            address = await line_of(feeder)
            preparing = asyncio.create_task(node.keeper.prepare(version, [address, store.address]))

            async def half_way() -> bool:
                assert not preparing.done(), "the feeder has to be slower than this test"
                return len(node.store.missing(chunks)) < len(chunks)

            await eventually(half_way, LIMIT_S)
            feeder.kill()
            feeder.wait()
            assert node.state.active == before, "it serves meanwhile"
            fetched_bytes = await asyncio.wait_for(preparing, LIMIT_S)
        size = manifest.files[0].size_bytes
        assert size < fetched_bytes < size + 3 * CHUNK, "chunks that the feeder sent are not fetched again"
        await node.keeper.activate(version, KvPolicy.RECOMPUTE)
        assert node.state.active == version


class LyingFeeder(BlobServicer):
    """A source that has the version and sends something else. `lie` says what."""

    lie = ""

    async def Fetch(self, request: weights_pb2.FetchRequest, context: Any) -> AsyncIterator[weights_pb2.FetchResponse]:
        size = (await self._store.open(request.digest)).stat().st_size - request.offset
        if self.lie == "wrong":
            yield weights_pb2.FetchResponse(data=bytes(size))
        elif self.lie == "short":
            yield weights_pb2.FetchResponse(data=bytes(size // 2))
        elif self.lie == "stalls after wrong bytes":
            yield weights_pb2.FetchResponse(data=bytes(10))
            await asyncio.Event().wait()
        elif self.lie == "fails after wrong bytes":
            yield weights_pb2.FetchResponse(data=bytes(10))
            raise UnknownBlob("it is gone")
        elif self.lie == "states that a disk is full":
            raise DiskFull("no space left")
            yield
        elif self.lie == "bytes, then a delta":
            yield weights_pb2.FetchResponse(data=bytes(10))
            yield weights_pb2.FetchResponse(data=b"x" * 100, delta=True)
        else:
            assert self.lie in ("endless", "endless and empty")
            while True:
                yield weights_pb2.FetchResponse(data=bytes(0 if "empty" in self.lie else 4096))
                await asyncio.sleep(0)


LIES = [
    "wrong",
    "short",
    "stalls after wrong bytes",
    "fails after wrong bytes",
    "states that a disk is full",
    "bytes, then a delta",
    "endless",
    "endless and empty",
]


@pytest.mark.parametrize("lie", LIES)
async def test_a_feeder_that_lies_delays_a_version_and_does_not_change_it(tmp_path: Path, lie: str) -> None:
    """The depot is asked last. It sends the right chunks in the end, whatever the feeder sent before."""
    kind = type("Feeder", (LyingFeeder,), {"lie": lie})
    async with (
        depot(tmp_path) as store,
        peer(tmp_path / "l", kind) as liar,
        peer(tmp_path / "p", transfer=QUICK) as node,
    ):
        version, _ = await publish(store.address, 1, file(tmp_path, "a"), chunk_bytes=CHUNK)
        await liar.fetch.version(version.weights_digest, [store.address], owner="v")
        manifest = await asyncio.wait_for(
            node.fetch.version(version.weights_digest, [liar.address, store.address], owner="v"), LIMIT_S
        )
        assert await node.content(manifest) == (tmp_path / "a").read_bytes()


@pytest.mark.parametrize("lie", LIES)
async def test_a_version_that_only_a_liar_has_ends_in_one_error_and_the_node_serves_what_it_served(
    tmp_path: Path, lie: str
) -> None:
    kind = type("Feeder", (LyingFeeder,), {"lie": lie})
    stalls = {"endless and empty", "stalls after wrong bytes"}
    async with (
        coordinator() as (boss, address),
        depot(tmp_path) as store,
        peer(tmp_path / "l", kind) as liar,
        inference(
            tmp_path, coordinator=address, engine="ContentEngine", transfer=QUICK if lie in stalls else PATIENT
        ) as node,
    ):
        await boss.until(boss.has_hello)
        before, _ = await publish(store.address, 0, small(tmp_path, 0), with_probes=True)
        await serve(node, before, store.address)
        version, _ = await publish(store.address, 1, file(tmp_path, "a"), chunk_bytes=CHUNK)
        await liar.fetch.version(version.weights_digest, [store.address], owner="v")
        boss.command("inf-0", Command.VERB_PREPARE, version, [liar.address])
        report = await boss.outcome("inf-0", version, Report.PHASE_FAILED, Report.PHASE_PREPARED)
        expected = dict.fromkeys(stalls, "DEADLINE_EXCEEDED")
        expected |= {"fails after wrong bytes": "UNKNOWN_BLOB", "states that a disk is full": "UNAVAILABLE"}
        assert report.failure.reason == expected.get(lie, "HASH_MISMATCH"), report.failure.message
        assert node.state.active == before
