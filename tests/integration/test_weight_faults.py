"""Faults of uploads, disks, precision and reports: the fleet never serves wrong weights. test_weight_feeders.py has
those of sources.

docs/reliability.md has the table.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import numpy as np
import pytest

from rollmesh.app.mesh_client import FleetClient, MeshAddress
from rollmesh.app.views.weights_view import versions_of
from rollmesh.services.inference.config import InferenceConfig
from rollmesh.services.inference.engine import KvPolicy
from rollmesh.services.inference.node import InferenceNode
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import NotUploaded, ProbeMismatch, UnknownBlob, WeightsRejected
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.shared.weights.digests import sha256_hex
from rollmesh.shared.weights.manifest import BuiltManifest, build_manifest, parse_manifest, version_owner
from rollmesh.shared.weights.transfer import upload
from rollmesh.v1 import coordinator_pb2, weights_pb2, weights_pb2_grpc

from ..unit.shared.safetensors_files import write_safetensors
from .coordinator_mesh import ACCESS as MESH_ACCESS
from .coordinator_mesh import coordinator_mesh, eventually
from .script_process import LIMIT_S, line_of, script_process
from .test_bad_days import small_disk  # noqa: F401  (a fixture)
from .test_weight_plane import CHUNK, file
from .weight_fleet import announce, begin, joining, publish_version, serve_all
from .weight_mesh import ACCESS, HERE, NETWORK, SERVER, coordinator, depot, inference, publish, serve, small
from .weight_mesh import WeightCommand as Command
from .weight_mesh import WeightReport as Report

# A full disk ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", ["quota", "device"])
async def test_a_node_with_a_full_disk_serves_what_it_served_until_there_is_space(
    tmp_path: Path,
    small_disk: Path,  # noqa: F811
    limit: str,
) -> None:
    """A version that failed leaves chunks. They are deleted when the next version does not fit beside them."""
    async with coordinator() as (boss, address), depot(tmp_path) as store:
        config = InferenceConfig(
            directory=str((small_disk if limit == "device" else tmp_path) / "inf-0"),
            engine=Extension("content_engine.py:ContentEngine"),
            server=SERVER,
            transfer=NETWORK,
            quota_bytes=9_000_000 if limit == "quota" else 64 << 30,
        )
        async with InferenceNode(config, node_id="inf-0", access=ACCESS, coordinator=address, base_dir=HERE) as node:
            await boss.until(boss.has_hello)
            before, _ = await publish(store.address, 0, small(tmp_path, 0), with_probes=True)
            await serve(node, before, store.address)
            large = {"large.safetensors": write_safetensors(tmp_path / "large.safetensors", 1, num_values=2_600_000)}
            version, _ = await publish(store.address, 1, large, chunk_bytes=1 << 20)
            boss.command("inf-0", Command.VERB_PREPARE, version, [store.address])
            report = await boss.outcome("inf-0", version, Report.PHASE_FAILED, Report.PHASE_PREPARED)
            assert report.failure.reason == "DISK_FULL"
            assert "quota_bytes" in report.failure.message or "no space left on the device" in report.failure.message
            assert node.state.active == before
            fits, _ = await publish(store.address, 2, file(tmp_path, "3", change=0.5), chunk_bytes=CHUNK)
            boss.command("inf-0", Command.VERB_PREPARE, fits, [store.address])
            report = await boss.outcome("inf-0", fits, Report.PHASE_FAILED, Report.PHASE_PREPARED)
            assert report.phase == Report.PHASE_PREPARED, report.failure.message


# A learner that is killed in mid-upload -------------------------------------------------------------------------------

LEARNER = """
import asyncio, os, sys
from pathlib import Path
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.weights.manifest import build_manifest
from rollmesh.shared.weights.transfer import TransferConfig, upload

async def main(address, path, owner, same_host):
    built = build_manifest({"m.safetensors": Path(path)}, chunk_bytes=1024)
    config = TransferConfig(same_host=same_host == "True", concurrency=1)
    async with open_channel(address, access=Access(token=os.environ["SECRET"])) as channel:
        print(built.weights_digest, flush=True)
        report = await upload(channel, built, owner=owner, config=config)
        print(report.num_existed, flush=True)

asyncio.run(main(*sys.argv[1:]))
"""
"""The upload of a learner: 1,000 chunks, one after another."""


@pytest.mark.parametrize("same_host", [False, True])
async def test_half_an_upload_never_becomes_a_version_and_the_next_learner_finishes_it(
    tmp_path: Path, same_host: bool
) -> None:
    async with coordinator_mesh(tmp_path) as parts, joining(parts, "inf-0") as node:
        depot_address = await begin(parts, node)
        before = await announce(parts, depot_address, 0, small(tmp_path, 0))
        await eventually(lambda: serve_all(before, node))
        await parts.train(1)
        path = write_safetensors(tmp_path / "large.safetensors", 9, num_values=250_000)
        owner = version_owner(PolicyVersion(policy="main", step=1), "r")
        async with open_channel(depot_address, access=MESH_ACCESS) as channel:
            blobs = weights_pb2_grpc.BlobServiceStub(channel)
            built = build_manifest({"m.safetensors": path}, chunk_bytes=1024)

            async def missing() -> int:
                return len((await blobs.Has(weights_pb2.HasRequest(digests=list(built.chunks)))).missing)

            async def half_way() -> bool:
                return await missing() < len(built.chunks)

            with script_process(LEARNER, depot_address, path, owner, same_host, access=MESH_ACCESS) as learner:
                digest = await line_of(learner)
                await eventually(half_way, LIMIT_S)
                learner.kill()
                learner.wait()
            num_missing = await missing()
            assert 0 < num_missing < len(built.chunks), "it was killed in the middle"
            request = weights_pb2.GetManifestRequest(weights_digest=digest)
            with pytest.raises(UnknownBlob), typed_errors():
                await weights_pb2_grpc.WeightServiceStub(channel).GetManifest(request)
            version = PolicyVersion(policy="main", step=1, weights_digest=digest)
            with pytest.raises(NotUploaded, match="upload them"):
                await publish_version(parts, version)
            assert node.state.active == before, "the fleet serves what it served"

            with script_process(LEARNER, depot_address, path, owner, same_host, access=MESH_ACCESS) as learner:
                assert await line_of(learner) == digest
                assert int(await line_of(learner)) >= len(built.chunks) - num_missing, (
                    "what was there is not sent again"
                )
            assert await missing() == 0
        await publish_version(parts, version)
        await eventually(lambda: serve_all(version, node))


async def test_what_a_killed_upload_leaves_is_deleted_with_the_versions_that_follow(tmp_path: Path) -> None:
    """Chunks of half an upload have an owner, and go with the old versions. Files that were not claimed are deleted by
    age."""
    async with depot(tmp_path, versions_max=2) as store:
        path = write_safetensors(tmp_path / "large.safetensors", 9, num_values=250_000)
        with script_process(LEARNER, store.address, path, "weights:main@1.0", "False", access=ACCESS) as learner:
            await line_of(learner)

            async def begun() -> bool:
                return "weights:main@1.0" in store.store.owners

            await eventually(begun, LIMIT_S)
            learner.kill()
            learner.wait()
        half_bytes = store.store.used_bytes
        assert half_bytes > 0
        folder = store.store.directory
        left = [folder / f"{'a' * 64}.upload-999.partial", folder / ("b" * 64)]
        new = [folder / f"{'c' * 64}.upload-999.partial", folder / ("d" * 64)]
        for one in (*left, *new):
            one.write_bytes(b"half")
        for one in left:
            os.utime(one, (0, 0))
        for step in (2, 3):
            await publish(store.address, step, small(tmp_path, step))
        assert store.store.owners == {"weights:main@2.0", "weights:main@3.0"}
        assert not any(one.exists() for one in left)
        assert all(one.exists() for one in new), "another upload may be writing them"
        assert store.store.used_bytes < 20_000


# Precision ------------------------------------------------------------------------------------------------------------


async def test_weights_that_would_be_rounded_are_rejected_unless_that_is_intended(tmp_path: Path) -> None:
    config = InferenceConfig(
        directory=str(tmp_path / "inf-0"),
        engine=Extension("content_engine.py:HalfEngine"),
        server=SERVER,
        transfer=NETWORK,
    )
    half = write_safetensors(tmp_path / "half.safetensors", 0, num_values=500)
    half.write_bytes(half.read_bytes().replace(b'"F32", "shape": [500]', b'"BF16", "shape": [1000]', 1))
    raw = half.read_bytes()
    header = raw[8 : raw.index(b"}}") + 2]
    half.write_bytes(len(header).to_bytes(8, "little") + header + np.ones(1000, "<u2").tobytes())
    async with depot(tmp_path) as store:
        fits, _ = await publish(store.address, 0, {"m.safetensors": half})
        wide, _ = await publish(store.address, 1, small(tmp_path, 1))
        async with InferenceNode(config, node_id="inf-0", access=ACCESS, base_dir=HERE) as node:
            await serve(node, fits, store.address)
            with pytest.raises(
                WeightsRejected, match=r"first w of float32, would be rounded to bfloat16.*cast_weights"
            ):
                await serve(node, wide, store.address)
            assert node.state.active == fits
        intended = msgspec.structs.replace(config, cast_weights=True)
        rounded, _ = await publish(store.address, 2, small(tmp_path, 2), with_probes=True, probe_error=0.5)
        wrong, _ = await publish(store.address, 3, small(tmp_path, 3), with_probes=True, probe_error=2.0)
        async with InferenceNode(intended, node_id="inf-0", access=ACCESS, base_dir=HERE) as node:
            await serve(node, wide, store.address)
            await serve(node, rounded, store.address)
            assert node.state.active == rounded, "rounding explains differences of this size"
            with pytest.raises(ProbeMismatch, match="differ by 2 nats, at most 1 is allowed"):
                await serve(node, wrong, store.address)
        async with inference(tmp_path, "inf-1", engine="ContentEngine") as node:
            await serve(node, fits, store.address)


async def test_a_manifest_with_a_false_precision_is_rejected(tmp_path: Path) -> None:
    files = small(tmp_path, 1)
    built = build_manifest(files)
    manifest = parse_manifest(built.data)
    manifest.dtype = "bfloat16"
    data = manifest.SerializeToString(deterministic=True)
    false = BuiltManifest(data=data, weights_digest=sha256_hex(data), chunks=built.chunks)
    version = PolicyVersion(policy="main", step=1, weights_digest=false.weights_digest)
    async with depot(tmp_path) as store, inference(tmp_path) as node:
        async with open_channel(store.address, access=ACCESS) as channel:
            await upload(channel, false, owner=version_owner(version), config=NETWORK)
        with pytest.raises(WeightsRejected, match="tensor w is float32, but the manifest states bfloat16"):
            await node.keeper.prepare(version, [store.address])


# Late nodes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_base", [False, True])
async def test_a_late_node_gets_the_current_version_with_and_without_a_base(tmp_path: Path, has_base: bool) -> None:
    """With the version before, also one that the depot has kept for long, it fetches deltas; else whole chunks."""
    async with depot(tmp_path) as store, inference(tmp_path, engine="ContentEngine") as node:
        versions = []
        for step in range(3):
            one = file(tmp_path, str(step), change=0.005 * step)
            versions.append((await publish(store.address, step, one, with_probes=True, chunk_bytes=CHUNK))[0])
        if has_base:
            await serve(node, versions[0], store.address)
        fetched_bytes = await node.keeper.prepare(versions[-1], [store.address])
        await node.keeper.activate(versions[-1], KvPolicy.RECOMPUTE)
        size = (tmp_path / "2").stat().st_size
        assert fetched_bytes < 0.1 * size if has_base else fetched_bytes > size
        assert node.state.active == versions[-1]


async def test_a_depot_that_dropped_the_base_sends_whole_chunks(tmp_path: Path) -> None:
    async with depot(tmp_path, versions_max=2) as store, inference(tmp_path, engine="ContentEngine") as node:
        first, _ = await publish(store.address, 0, file(tmp_path, "0"), with_probes=True, chunk_bytes=CHUNK)
        await serve(node, first, store.address)
        for step in (1, 2):
            one = file(tmp_path, str(step), change=0.005 * step)
            version, _ = await publish(store.address, step, one, with_probes=True, chunk_bytes=CHUNK)
        assert "weights:main@0.0" not in store.store.owners
        assert await node.keeper.prepare(version, [store.address]) > 4 * CHUNK
        await node.keeper.activate(version, KvPolicy.RECOMPUTE)
        assert node.state.active == version


# A node that lies about its version -----------------------------------------------------------------------------------


class FalseReports(InferenceNode):
    """Reports another digest than that of the command from the second version on."""

    def _report_weights(self, report: coordinator_pb2.WeightReport) -> None:
        if report.version.step >= 1:
            report.version.weights_digest = "f" * 64
        super()._report_weights(report)


async def test_a_node_that_reports_another_digest_is_excluded_and_the_others_serve(tmp_path: Path) -> None:
    async with (
        coordinator_mesh(tmp_path) as parts,
        joining(parts, "a-liar", FalseReports) as liar,
        joining(parts, "b-node") as node,
    ):
        depot_address = await begin(parts, node, liar)
        first = await announce(parts, depot_address, 0, small(tmp_path, 0))
        await eventually(lambda: serve_all(first, liar, node))
        await parts.train(1)
        second = await announce(parts, depot_address, 1, small(tmp_path, 1))
        await eventually(lambda: serve_all(second, node))

        async def excluded() -> bool:
            request = coordinator_pb2.GetFleetRequest(kind=coordinator_pb2.NODE_KIND_INFERENCE)
            nodes = {one.node_id: one for one in (await parts.coordinator.GetFleet(request)).nodes}
            suspect = nodes["a-liar"].state == coordinator_pb2.NODE_STATE_SUSPECT
            return suspect and "restart the node" in nodes["a-liar"].cause

        await eventually(excluded)
        listed = [one.node_id for one in node.fleet.nodes(coordinator_pb2.NODE_KIND_INFERENCE)]
        assert listed == ["b-node"], "routers do not see it"


async def test_the_versions_of_a_running_mesh_are_listed_with_their_precision(tmp_path: Path) -> None:
    async with coordinator_mesh(tmp_path) as parts, joining(parts, "inf-0") as node:
        depot_address = await begin(parts, node)
        version = await announce(parts, depot_address, 0, small(tmp_path, 0))
        await eventually(lambda: serve_all(version, node))
        assert parts.gateway is not None
        mesh = MeshAddress(address=parts.gateway.address, access=MESH_ACCESS)

        async def listed() -> bool:
            async with FleetClient(mesh) as client:
                rows = await versions_of(mesh, client)
            return [(r.version, r.digest, r.kind, r.precision, r.nodes) for r in rows] == [
                ("main@0.0", version.weights_digest, "full", "float32", {"inf-0": "active"})
            ]

        await eventually(listed)
