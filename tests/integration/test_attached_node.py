"""A node whose engine attaches to a server: weights come from the depot, and probes tell right from wrong ones."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from rollmesh.services.inference.config import InferenceConfig
from rollmesh.services.inference.engines.attached.tables import computed_in
from rollmesh.services.inference.node import InferenceNode
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import WeightsRejected
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.weights.manifest import build_manifest, version_owner
from rollmesh.shared.weights.probes import Probe
from rollmesh.shared.weights.transfer import upload
from rollmesh.testing.fake_policy import log_softmax
from rollmesh.testing.fake_sglang_server import FakeSglangServer
from tests.bigram import bigram_model

from .weight_mesh import (
    ACCESS,
    MEMBERSHIP,
    NETWORK,
    SERVER,
    TinyCoordinator,
    WeightCommand,
    WeightReport,
    coordinator,
    depot,
)

VOCAB = 30
TOKENS = np.arange(12, dtype=np.int32)


@dataclass
class Attached:
    """A node in a mesh, and its server."""

    folder: Path
    boss: TinyCoordinator
    depot: str
    node: InferenceNode
    server: FakeSglangServer

    async def upload(self, step: int) -> PolicyVersion:
        """Upload a step with right probes to the depot."""
        file = self.folder / f"{step}.safetensors"
        plain = log_softmax(load_file(file)["bigram"].astype(np.float64))[TOKENS[:-1], TOKENS[1:]]
        probe = Probe(token_ids=TOKENS, logprobs=np.concatenate(([0.0], plain)).astype(np.float32))
        built = build_manifest({"model.safetensors": file}, probes=[probe.encode()], chunk_bytes=1500)
        version = PolicyVersion(policy="main", step=step, weights_digest=built.weights_digest)
        async with open_channel(self.depot, access=ACCESS) as channel:
            await upload(channel, built, owner=version_owner(version), config=NETWORK)
        return version

    async def activate(self, step: int, *phases: WeightReport.Phase.ValueType) -> tuple[PolicyVersion, WeightReport]:
        """Publish a step with right probes, have it prepared and activated, and return the report in one of
        `phases`."""
        version = await self.upload(step)
        self.boss.command("inf-0", WeightCommand.VERB_PREPARE, version, [self.depot])
        await self.boss.outcome("inf-0", version, WeightReport.PHASE_PREPARED)
        self.boss.command("inf-0", WeightCommand.VERB_ACTIVATE, version)
        return version, await self.boss.outcome("inf-0", version, *phases)


@asynccontextmanager
async def attached(folder: Path, *, dtype: str = "auto", cast_weights: bool = False) -> AsyncIterator[Attached]:
    server = FakeSglangServer(bigram_model(folder, VOCAB, 64), dtype=dtype)
    await server.start()
    options = {
        "url": server.url,
        "model": str(folder / "model"),
        "weights_dir": str(folder / "shared"),
        "context_max": 64,
    }
    async with coordinator() as (boss, address), depot(folder, coordinator=address) as store:
        config = InferenceConfig(
            directory=str(folder / "inf-0"),
            engine=Extension("sglang", options=options),
            server=SERVER,
            membership=MEMBERSHIP,
            transfer=NETWORK,
            drain_s=0.0,
            cast_weights=cast_weights,
        )
        async with InferenceNode(config, node_id="inf-0", access=ACCESS, coordinator=address) as node:
            await boss.until(lambda: len(boss.hellos) == 2)
            yield Attached(folder, boss, store.address, node, server)
    await server.stop()


async def test_weights_from_the_depot_are_served_after_their_probes_pass(tmp_path: Path) -> None:
    async with attached(tmp_path) as world:
        for step in (0, 1):
            version, _ = await world.activate(step, WeightReport.PHASE_ACTIVE)
            assert world.node.state.active == version
        (hello,) = [hello for hello in world.boss.hellos if hello.node_id == "inf-0"]
        assert (hello.capabilities.engine, list(hello.capabilities.outputs)) == ("sglang", ["top_k", "kept_mass"])


async def test_weights_that_the_server_would_round_are_rejected_unless_that_is_allowed(tmp_path: Path) -> None:
    """The weights are in float32. `half` is a name that servers have for float16."""
    async with attached(tmp_path / "a", dtype="half") as world:
        assert world.node.state.engine.capabilities.dtype == "float16"
        with pytest.raises(WeightsRejected, match=r"bigram of float32, would be rounded to float16.*--dtype"):
            await world.node.keeper.prepare(await world.upload(0), [world.depot])
    async with attached(tmp_path / "b", dtype="half", cast_weights=True) as world:
        await world.activate(0, WeightReport.PHASE_ACTIVE)


@pytest.mark.parametrize(
    ("stated", "model", "dtype"),
    [
        ("auto", {"dtype": "bfloat16"}, "bfloat16"),
        ("auto", {"torch_dtype": "float16"}, "float16"),
        ("auto", {"torch_dtype": "float32"}, ""),
        ("auto", {}, ""),
        ("torch.bfloat16", {"dtype": "float32"}, "bfloat16"),
        ("float", {}, "float32"),
        ("", {"dtype": "bfloat16"}, ""),
    ],
)
def test_the_type_in_which_a_server_computes(stated: str, model: dict[str, str], dtype: str) -> None:
    assert computed_in(stated, model) == dtype


async def test_a_server_that_keeps_the_old_weights_is_not_served(tmp_path: Path) -> None:
    async with attached(tmp_path) as world:
        await world.activate(0, WeightReport.PHASE_ACTIVE)
        world.server.stuck = True
        _, report = await world.activate(1, WeightReport.PHASE_PROBE_MISMATCH, WeightReport.PHASE_ACTIVE)
        assert report.failure.reason == "PROBE_MISMATCH"
        assert world.node.state.active is None


async def test_a_server_that_cannot_read_the_folder_fails_the_activation(tmp_path: Path) -> None:
    async with attached(tmp_path) as world:
        world.server.fail_update = "no such folder"
        _, report = await world.activate(0, WeightReport.PHASE_FAILED, WeightReport.PHASE_ACTIVE)
        assert report.failure.reason == "ENGINE_FAILED"
        assert "no such folder" in report.failure.message


@pytest.mark.parametrize("url", ["http://127.0.0.1:1"])
async def test_a_node_without_its_server_does_not_start(tmp_path: Path, url: str) -> None:
    model = bigram_model(tmp_path, VOCAB, 64)
    options = {
        "url": url,
        "model": str(model),
        "weights_dir": str(tmp_path / "shared"),
        "connect_s": 0.1,
        "context_max": 64,
    }
    config = InferenceConfig(
        directory=str(tmp_path / "inf"), engine=Extension("sglang", options=options), server=SERVER
    )
    node = InferenceNode(config, node_id="inf-0", access=ACCESS)
    with pytest.raises(Exception, match="no server at `url` http://127.0.0.1:1 within connect_s = 0.1"):
        await node.__aenter__()
