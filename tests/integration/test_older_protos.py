"""Peers built from other protos than ours: fields that one side does not know, and numbers of enums that it does not
know."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

from rollmesh.services.weights.servicer import DepotBlobServicer
from rollmesh.shared.errors import InvalidInput, InvalidSpec, NotUploaded
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.shared.weights.manifest import parse_manifest
from rollmesh.v1 import events_pb2, reward_pb2, run_pb2, types_pb2, weights_pb2

from .coordinator_mesh import ACCESS, MeshParts, coordinator_mesh, spec

NEWER = bytes([0xFA, 0x7D, 3]) + b"new"
"""Field 2015, three bytes: as a message of newer protos contains."""
NEWER_NUMBER = 77
"""A number of an enum that these protos do not have."""
LATER: Mapping[str, set[str]] = {
    "RunSpec": {"export_groups", "export_split", "stall_s", "success_reward"},
    "AttachTrainerRequest": {"keeps_no_checkpoints"},
    "AttachTrainerResponse": {"rolled_back_to", "spec"},
    "LeaseBatchRequest": {"geometry"},
    "LeasedSample": {"mask_below_step", "staleness"},
    "FetchSamplesResponse": {"failure"},
    "CommitUpdateRequest": {"groups"},
    "CommitUpdateResponse": {"ledger_position", "ledger_hash"},
    "Segment": {"arrays", "media", "logprobs_model", "kv_step_oldest"},
}
"""Fields that an older trainer's protos lack."""


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[MeshParts]:
    async with coordinator_mesh(tmp_path) as parts:
        yield parts


# Older than the mesh --------------------------------------------------------------------------------------------------


class OlderTrainer:
    """Speaks RunService with protos that lack the fields in LATER."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._pool = descriptor_pool.DescriptorPool()
        for module in (types_pb2, reward_pb2, events_pb2, run_pb2):
            file = descriptor_pb2.FileDescriptorProto()
            module.DESCRIPTOR.CopyToProto(file)
            for message in file.message_type:
                kept = [field for field in message.field if field.name not in LATER.get(message.name, ())]
                del message.field[:]
                message.field.extend(kept)
            self._pool.Add(file)

    def message(self, name: str) -> Any:
        return message_factory.GetMessageClass(self._pool.FindMessageTypeByName(f"rollmesh.v1.{name}"))

    async def ask(self, verb: str, **values: Any) -> Any:
        with typed_errors():
            return await self._channel.unary_unary(*self._method(verb))(self.message(f"{verb}Request")(**values))

    async def stream(self, verb: str, **values: Any) -> list[Any]:
        with typed_errors():
            call = self._channel.unary_stream(*self._method(verb))(self.message(f"{verb}Request")(**values))
            return [reply async for reply in call]

    def _method(self, verb: str) -> tuple[str, Callable[[Message], bytes], Callable[[bytes], Message]]:
        reply = self.message(f"{verb}Response")
        return f"/rollmesh.v1.RunService/{verb}", lambda message: message.SerializeToString(), reply.FromString


async def test_a_trainer_with_older_protos_trains(mesh: MeshParts) -> None:
    assert mesh.gateway is not None
    plain = {name: value for name, value in _values(spec()).items() if name not in LATER["RunSpec"]}
    async with open_channel(mesh.gateway.address, access=ACCESS) as channel:
        old = OlderTrainer(channel)
        assert "geometry" not in old.message("LeaseBatchRequest").DESCRIPTOR.fields_by_name
        await old.ask("CreateRun", spec=plain)
        mesh.epoch = (await old.ask("AttachTrainer", run="r")).trainer_epoch
        await mesh.publish(0)
        await mesh.generate(await mesh.acquire(), step=0)
        held = {"run": "r", "trainer_epoch": mesh.epoch}
        lease = await old.ask("LeaseBatch", **held, update=1, wait_s=10.0)
        episodes = await old.stream("FetchSamples", **held, lease_id=lease.lease_id)
        assert sorted(name for message in episodes for name in message.sample_ids) == sorted(
            sample.meta.sample_id for sample in lease.samples
        )
        outcome = run_pb2.UPDATE_OUTCOME_APPLIED
        commit = await old.ask("CommitUpdate", **held, update=1, lease_ids=[lease.lease_id], outcome=outcome)
        await old.ask("ReportCheckpoint", **held, update=1, digest=commit.digest)
    state = await mesh.state()
    assert state.policies[0].digest == commit.digest
    assert state.samples.trained == 4


def _values(message: Message) -> dict[str, Any]:
    return {field.name: value for field, value in message.ListFields()}


# Newer than the mesh --------------------------------------------------------------------------------------------------


@dataclass
class NewerPeer(MeshParts):
    """Worker and trainer whose every message, however deep, carries a field of later protos; but not a run's spec."""

    async def call(self, verb: Callable[..., Awaitable[Any]], request: Any) -> Any:
        grow(request)
        return await super().call(verb, request)


def grow(message: Message) -> None:
    """Adds the field to a message and to every one in it."""
    if isinstance(message, events_pb2.RunSpec):
        return
    for field, value in message.ListFields():
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for inner in value if field.is_repeated else [value]:
                grow(inner)
    message.MergeFromString(NEWER)


async def test_a_worker_and_a_trainer_with_newer_protos_are_served(mesh: MeshParts) -> None:
    newer = NewerPeer(**{field.name: getattr(mesh, field.name) for field in fields(mesh)})
    await newer.begin()
    digest = await newer.train(1)
    await newer.publish(1)
    await newer.checkpoint(1, digest)
    state = await newer.state()
    assert state.policies[0].digest == digest
    assert state.samples.trained == 4


async def test_a_field_of_a_spec_that_this_version_does_not_have_is_refused(mesh: MeshParts) -> None:
    wanted = spec()
    wanted.MergeFromString(NEWER)
    with pytest.raises(InvalidSpec, match="must have only fields that this version has, got field 2015"):
        await mesh.call(mesh.run.CreateRun, run_pb2.CreateRunRequest(spec=wanted))


def test_a_manifest_with_a_field_that_this_version_does_not_have_is_refused() -> None:
    file = weights_pb2.WeightFile(name="w", size_bytes=1, chunks=[{"digest": "0" * 64, "size_bytes": 1}])  # type: ignore[list-item]
    manifest = weights_pb2.WeightManifest(kind=weights_pb2.WeightManifest.KIND_FULL, files=[file])
    assert parse_manifest(manifest.SerializeToString()) == manifest
    with pytest.raises(InvalidInput, match="must have only fields that this version has, got field 2015"):
        parse_manifest(manifest.SerializeToString() + NEWER)


async def test_a_number_of_an_enum_that_decides_is_refused_and_not_guessed(mesh: MeshParts) -> None:
    with pytest.raises(InvalidSpec, match="beyond"):
        await mesh.create(beyond=NEWER_NUMBER)
    await mesh.begin()
    await mesh.generate(await mesh.acquire(), step=0)
    lease = await mesh.lease(1)
    with pytest.raises(InvalidInput, match="outcome"):
        await mesh.commit(1, [lease.lease_id], outcome=NEWER_NUMBER)
    sample = run_pb2.DisposedSample(sample_id=lease.samples[0].meta.sample_id)
    sample.disposition = NEWER_NUMBER  # type: ignore[assignment]
    with pytest.raises(InvalidInput, match="disposition"):
        await mesh.commit(1, [lease.lease_id], samples=[sample])
    assert (await mesh.commit(1, [lease.lease_id])).digest, "the lease is as it was"


async def test_an_outcome_of_an_episode_that_this_version_does_not_have_is_refused(mesh: MeshParts) -> None:
    await mesh.begin()
    (lease, *_) = await mesh.acquire(num_max=1)
    report = await mesh.finished(lease, step=0)
    report.outcome = NEWER_NUMBER  # type: ignore[assignment]
    (result,) = await mesh.report([report])
    assert result.startswith("INVALID_REPORT: `outcome` must be COMPLETED, INFRA_FAILURE or CANCELLED"), result


async def test_a_version_is_announced_with_a_depot_that_checks_digests_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def older(self: DepotBlobServicer, request: weights_pb2.HasRequest, context: Any) -> weights_pb2.HasResponse:
        return await has(self, weights_pb2.HasRequest(digests=request.digests), context)

    has = DepotBlobServicer.Has
    monkeypatch.setattr(DepotBlobServicer, "Has", older)
    async with coordinator_mesh(tmp_path) as mesh:
        await mesh.begin()
        chunk = weights_pb2.WeightChunk(digest="ab" * 32, size_bytes=3)
        file = weights_pb2.WeightFile(name="m.safetensors", size_bytes=3, chunks=[chunk])
        kind = weights_pb2.WeightManifest.KIND_FULL
        manifest = weights_pb2.WeightManifest(kind=kind, files=[file], dtype="float32")
        digest = await mesh.put(manifest.SerializeToString())
        for unknown, first in ((digest, "ab" * 32), ("cd" * 32, "cd" * 32)):
            version = types_pb2.PolicyVersion(step=0, weights_digest=unknown)
            request = run_pb2.PublishVersionRequest(run=mesh.name, trainer_epoch=mesh.epoch, version=version)
            with pytest.raises(NotUploaded) as caught:
                await mesh.call(mesh.run.PublishVersion, request)
            assert caught.value.metadata["first"] == first
