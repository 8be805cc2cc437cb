"""What a joining node receives, sends, and why it is rejected: one address and a token, with a mesh in this process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from rollmesh.mesh import joining
from rollmesh.mesh.config import CountsConfig
from rollmesh.mesh.joining import CONFIG_FILE, JoinOptions, open_joined
from rollmesh.mesh.mesh import Mesh
from rollmesh.mesh.mesh_description import describe_mesh
from rollmesh.mesh.run_layout import RunLayout
from rollmesh.services.coordinator.mesh_description import MeshDescription
from rollmesh.services.rollout.tokenizer import load_tokenizer
from rollmesh.shared.bus.bus import Bus
from rollmesh.shared.domain.ids import new_secret
from rollmesh.shared.domain.protocol import PROTOCOL, ProtocolMismatch, ProtocolVersion
from rollmesh.shared.errors import AlreadyExists, ConfigError, MeshError, Unauthenticated, Unimplemented, UnknownBlob
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.shared.weights.model_files import fetch_model_files
from rollmesh.v1 import coordinator_pb2 as pb
from rollmesh.v1 import coordinator_pb2_grpc

from ..chaos.world import mesh_config, save_model_folder

PARTS = ("coordinator", "depot", "sandbox-0", "gateway")
JOIN_S = 30.0


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    model = save_model_folder(tmp_path / "theirs")
    (model / "model.safetensors").write_bytes(b"weights")
    (model / "model.safetensors.index.json").write_text("{}")
    async with Mesh(mesh_config(model), run_dir=tmp_path / "run", base_dir=tmp_path, services=PARTS) as made:
        async with open_channel(made.layout.gateway, access=made.access) as channel, asyncio.timeout(JOIN_S):
            stub: Any = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
            while {n.node_id for n in await ready(stub)} != set(PARTS[1:]):  # noqa: ASYNC110 (another task joins them)
                await asyncio.sleep(0.02)
        yield made


async def ready(stub: Any) -> list[pb.FleetNode]:
    with typed_errors():
        nodes = (await stub.GetFleet(pb.GetFleetRequest())).nodes
    return [node for node in nodes if node.state == pb.NODE_STATE_READY]


def options(mesh: Mesh, kind: str, **fields: Any) -> JoinOptions:
    run_dir = mesh.layout.run_dir
    given = {"address": mesh.layout.gateway, "token_file": run_dir / "token", "folder": run_dir.parent / f"node-{kind}"}
    return JoinOptions(kind=kind, **{**given, **fields})


@pytest.mark.parametrize("through", ["gateway", "coordinator"])
async def test_one_address_brings_configuration_addresses_and_small_files(mesh: Mesh, through: str) -> None:
    asked = options(
        mesh, "rollout", address=getattr(mesh.layout, through), overrides=("rollout.worker.episodes_max=7",)
    )
    layout, name = await open_joined(asked)
    assert name.startswith("rollout-")
    assert (layout.coordinator, layout.gateway) == (mesh.layout.coordinator, mesh.layout.gateway)
    assert layout.config.run == mesh.layout.config.run
    assert layout.config.rollout.worker.episodes_max == 7
    model = Path(layout.config.rollout.model_dir)
    assert model.is_relative_to(layout.run_dir)
    assert load_tokenizer(model).encode_text("1").size
    assert not [name for name in os.listdir(model) if "safetensors" in name], "weights come from the depot"


async def test_nothing_secret_is_sent(mesh: Mesh) -> None:
    layout, _ = await open_joined(options(mesh, "inference"))
    assert mesh.access.token not in (layout.run_dir / CONFIG_FILE).read_text()


@pytest.mark.parametrize(
    ("kind", "fields", "error", "message"),
    [
        ("oracle", {}, ConfigError, "got `oracle`"),
        ("inference", {"base_dir": Path("/nowhere")}, ConfigError, "--base-dir /nowhere: no such folder"),
        ("inference", {"name": "a b"}, ConfigError, "expected letters"),
        ("inference", {"overrides": ("inference.capacity=none",)}, ConfigError, "capacity"),
        ("depot", {}, AlreadyExists, "the mesh has its depot"),
        ("sandbox", {"name": "0"}, AlreadyExists, "a node sandbox-0 is in the mesh already; choose another --name"),
    ],
)
async def test_what_cannot_join_gets_the_reason(
    mesh: Mesh, kind: str, fields: dict[str, Any], error: type[MeshError], message: str
) -> None:
    with pytest.raises(error, match=message):
        await open_joined(options(mesh, kind, **fields))


@pytest.mark.parametrize(
    ("own", "remedy"),
    [("1.2", "upgrade the coordinator first"), ("0.9", "different major versions never work together")],
)
async def test_a_node_of_another_release_is_rejected_before_it_reads_the_configuration(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, own: str, remedy: str
) -> None:
    monkeypatch.setattr(joining, "PROTOCOL", ProtocolVersion.parse(own))
    asked = options(mesh, "rollout")
    with pytest.raises(ProtocolMismatch, match=remedy):
        await open_joined(asked)
    assert asked.folder is not None
    assert not asked.folder.exists()


async def test_settings_that_only_the_newer_coordinator_has_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def describe(layout: RunLayout, bus: Bus) -> MeshDescription:
        found = describe_mesh(layout, bus)
        tree = yaml.safe_load(found.config_yaml)
        tree["rollout"]["later"], tree["newest"] = 1, {"a": 2}
        return replace(found, config_yaml=yaml.safe_dump(tree))

    monkeypatch.setattr("rollmesh.mesh.mesh_description.describe_mesh", describe)
    monkeypatch.setattr(joining, "PROTOCOL", ProtocolVersion(major=PROTOCOL.major, minor=PROTOCOL.minor - 1))
    model = save_model_folder(tmp_path / "theirs")
    services = ("coordinator", "gateway")
    async with Mesh(mesh_config(model), run_dir=tmp_path / "run", base_dir=tmp_path, services=services) as newer:
        asked = options(newer, "sandbox", address=newer.layout.coordinator)
        layout, _ = await open_joined(asked)
        assert layout.config.run == newer.layout.config.run
        assert "have no effect here: rollout.later, newest" in caplog.text or "newest, rollout.later" in caplog.text
        with pytest.raises(ConfigError, match="override `rollout.later=2`: `rollout.later`: unknown key"):
            await open_joined(
                options(newer, "sandbox", address=newer.layout.coordinator, overrides=("rollout.later=2",))
            )
        monkeypatch.undo()
        with pytest.raises(ConfigError, match="unknown key"):  # of the same release it is a mistake
            await open_joined(asked)


async def test_a_mesh_that_hosts_no_workers_trains_with_nodes_that_join(tmp_path: Path) -> None:
    model = save_model_folder(tmp_path / "theirs")
    config = mesh_config(model, updates_max=2, batch_groups=2, group_size=2)
    config = msgspec.structs.replace(config, counts=CountsConfig(inference=0, rollout=0, sandbox=0))
    async with AsyncExitStack() as stack, asyncio.timeout(JOIN_S):
        mesh = await stack.enter_async_context(Mesh(config, run_dir=tmp_path / "run", base_dir=tmp_path))
        for kind in ("inference", "sandbox", "rollout"):
            layout, name = await open_joined(options(mesh, kind))
            node = Mesh(layout.config, run_dir=layout.run_dir, layout=layout, services=[name])
            await stack.enter_async_context(node)
        await mesh.finished()


async def test_a_wrong_token_is_refused(mesh: Mesh, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.touch(mode=0o600)
    wrong.write_text(new_secret())
    with pytest.raises(Unauthenticated):
        await open_joined(options(mesh, "inference", token_file=wrong))


async def test_the_gateway_forwards_looking_and_no_leases(mesh: Mesh, tmp_path: Path) -> None:
    async with open_channel(mesh.layout.gateway, access=mesh.access) as channel:
        stub: Any = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        assert len(await ready(stub)) == len(PARTS) - 1
        with pytest.raises(Unimplemented, match="GetMesh returns"), typed_errors():
            await stub.AcquireRollouts(pb.AcquireRolloutsRequest(node_id="x", num_max=1))
        with pytest.raises(UnknownBlob, match=r"no model file 'model\.safetensors'"):
            await fetch_model_files(stub, [pb.ModelFile(name="model.safetensors", sha256="0" * 64)], tmp_path / "out")
