"""Payloads in files of the run folder: a whole run over them, with damaged files, and resumed with the stream."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from rollmesh.mesh import Mesh, MeshConfig
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.housekeeping import retained
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.store.payload_files import NoPayloadFile, PayloadFiles, file_of, in_file
from rollmesh.v1 import run_pb2, types_pb2

from ..chaos.world import save_model_folder
from .test_mesh import Operator, config, policy


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model_folder(tmp_path_factory.mktemp("model"))


def files_of(run_dir: Path, mesh: Mesh) -> PayloadFiles:
    return PayloadFiles(run_dir / "payloads" / mesh.run)


async def payloads_of(operator: Operator) -> list[int]:
    return [fact.payload.sequence for fact in await operator.facts() if isinstance(fact, f.EpisodeScored)]


async def test_a_file_without_live_payloads_is_removed_while_the_run_continues(model: Path, tmp_path: Path) -> None:
    """A limit of 1 MiB makes files of 64 KiB, which a run of these samples fills within an update or two. Half of the
    groups are retained."""
    short = config(model, updates_max=500)
    streams = msgspec.structs.replace(short.coordinator.streams, samples_bytes_max=1 << 20)
    limits = msgspec.structs.replace(short.coordinator.run, retain_share=0.5)
    coordinator = msgspec.structs.replace(short.coordinator, streams=streams, run=limits)
    short = msgspec.structs.replace(short, coordinator=coordinator)
    async with Mesh(short, run_dir=tmp_path) as mesh:
        operator, files = Operator(mesh), files_of(tmp_path, mesh)
        await operator.until(lambda _: bool(files.sizes()))
        first = min(files.sizes())
        await operator.until(lambda _: min(files.sizes()) > first)
        assert sum(files.sizes().values()) <= 1 << 20
        assert all(map(in_file, await payloads_of(operator)))
        assert (await operator.audit()).holds
        scored = [fact for fact in await operator.facts() if isinstance(fact, f.EpisodeScored)]
        ended = [fact for fact in scored if file_of(fact.payload.sequence) == first]
        assert ended
        for fact in ended:
            if retained(types_pb2.EpisodeKey(run=mesh.run, group=fact.group), 0.5):
                found = types_pb2.Episode.FromString(files.read(fact.payload.sequence))
                assert found.key.episode == fact.episode
            else:
                with pytest.raises(NoPayloadFile):
                    files.read(fact.payload.sequence)


async def test_samples_of_a_damaged_file_end_with_the_cause_and_the_run_continues(model: Path, tmp_path: Path) -> None:
    async with Mesh(config(model, updates_max=8), run_dir=tmp_path) as mesh:
        operator = Operator(mesh)
        await operator.until(lambda state: policy(state).applied_step >= 1)
        for path in files_of(tmp_path, mesh).folder.iterdir():
            path.write_bytes(b"\xff" * path.stat().st_size)
        await operator.finished()
        assert policy(await operator.state()).applied_step == 8
        letters = (await operator.call("ListDead", run_pb2.ListDeadRequest(run=mesh.run))).letters
        causes = {letter.letter.cause for letter in letters}
        assert any("no record begins at offset" in cause and str(tmp_path) in cause for cause in causes), causes
        assert (await operator.audit()).holds


async def test_a_run_is_resumed_with_the_stream_while_payloads_in_files_are_live(model: Path, tmp_path: Path) -> None:
    made = config(model, updates_max=500)
    async with Mesh(made, run_dir=tmp_path) as mesh:
        await Operator(mesh).until(lambda state: policy(state).applied_step >= 1)
    stream = msgspec.structs.replace(made, bus=msgspec.structs.replace(made.bus, payloads="stream"))
    async with Mesh(stream, run_dir=tmp_path) as mesh:
        operator = Operator(mesh)
        begin = policy(await operator.state()).applied_step
        await operator.until(lambda state: policy(state).applied_step > begin + 4)
        assert {in_file(sequence) for sequence in await payloads_of(operator)} == {True, False}
        assert (await operator.audit()).holds


def test_files_are_rejected_where_other_hosts_or_copies_need_the_stream() -> None:
    with pytest.raises(ConfigError, match=r"`bus.payloads` must be auto or stream.*num_replicas"):
        config_from_dict(MeshConfig, {"bus": {"payloads": "files"}, "coordinator": {"streams": {"num_replicas": 3}}})
    with pytest.raises(ConfigError, match=r"retain_share` must be 0 with payloads in the sample stream, got 1.0: `bus"):
        config_from_dict(MeshConfig, {"bus": {"payloads": "stream"}, "coordinator": {"run": {"retain_share": 1.0}}})
    auto = config_from_dict(MeshConfig, {"coordinator": {"streams": {"num_replicas": 3}}})
    assert not auto.payloads_in_files
    assert config_from_dict(MeshConfig, {}).payloads_in_files
