"""A learner with adapters publishes its base once, and then adapters that an inference node verifies by the probes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.demo.tokenizer import build_tokenizer
from rollmesh.services.inference.config import InferenceConfig
from rollmesh.services.inference.engine import KvPolicy
from rollmesh.services.inference.engines.common.adapters import merge_adapter
from rollmesh.services.inference.node import InferenceNode
from rollmesh.services.learner.config import LearnerConfig
from rollmesh.services.learner.engine import ExportedWeights, Position, Restored, TrainerEngine
from rollmesh.services.learner.engines.torch_trainer import TorchTrainer
from rollmesh.services.weights.config import DepotConfig
from rollmesh.services.weights.node import DepotNode
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import IntArray
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import ConfigError, ProbeMismatch
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.weights.manifest import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    BuiltManifest,
    build_manifest,
)
from rollmesh.shared.weights.probes import Probe
from rollmesh.shared.weights.transfer import TransferConfig
from rollmesh.trainer.config import LoraSettings, OptimizerConfig
from rollmesh.trainer.model_files import WEIGHTS_NAME, write_model_folder
from tests.unit.trainer.builders import random_batch

pytest.importorskip("peft")
from tests.unit.inference.peft_adapters import upload_and_prepare

ACCESS = Access(token="t")
NETWORK = TransferConfig(same_host=False)
PROMPTS: list[IntArray] = [np.arange(1, 13, dtype=np.int32)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model_folder(build_tiny_model(TinyModelConfig(num_layers=2), seed=1), build_tokenizer(), folder)
    return folder


def config(model: Path, directory: Path, **lora: object) -> LearnerConfig:
    return LearnerConfig(
        directory=str(directory),
        model=str(model),
        lora=LoraSettings(rank=4, **lora),  # type: ignore[arg-type]
        optimizer=OptimizerConfig(lr=1e-2, warmup_updates=0),
    )


def exported(engine: TrainerEngine, folder: Path) -> ExportedWeights:
    folder.mkdir()
    return engine.export_weights(folder)


def trained(restored: Restored, updates: int) -> TrainerEngine:
    for k in range(1, updates + 1):
        result = restored.engine.update(k, *random_batch(seed=k, step=k - 1))
        assert result.applied
        restored.log.append(k, result.used_ids, incarnation=0, outcome="APPLIED")
    return restored.engine


async def test_a_node_activates_the_base_and_then_adapters_that_alone_are_fetched(model: Path, tmp_path: Path) -> None:
    engine = TorchTrainer.open(config(model, tmp_path / "learner")).engine
    made: list[BuiltManifest] = []
    scores = []
    for step in range(3):
        if step:
            assert engine.update(step, *random_batch(seed=step, step=step - 1)).applied
        weights = exported(engine, tmp_path / f"step-{step}")
        assert bool(weights.adapter) == bool(step)
        scores.append(engine.score(PROMPTS)[0])
        probes = [Probe(token_ids=PROMPTS[0], logprobs=scores[-1]).encode()]
        made.append(build_manifest(weights.files, adapter=weights.adapter, tied=weights.tied, probes=probes))
    assert np.abs(scores[2] - scores[0]).max() > 0.01
    wrong = [Probe(token_ids=PROMPTS[0], logprobs=scores[0]).encode()]
    made.append(build_manifest(weights.files, adapter=weights.adapter, tied=weights.tied, probes=wrong))
    settings = InferenceConfig(
        directory=str(tmp_path / "node"),
        engine=Extension("torch", {"model": str(model), "context_max": 64}),
        transfer=NETWORK,
    )
    depot = DepotNode(DepotConfig(directory=str(tmp_path / "depot")), node_id="d", access=ACCESS)
    async with depot, InferenceNode(settings, node_id="i", access=ACCESS) as node:
        fetched = []
        for step, one in enumerate(made):
            version = PolicyVersion(policy="main", step=step, weights_digest=one.weights_digest)
            fetched.append(await upload_and_prepare(depot, node, version, one, ACCESS))
            if step == 3:
                with pytest.raises(ProbeMismatch, match="of main@3.0 differ by"):
                    await node.keeper.activate(version, KvPolicy.RECOMPUTE)
                break
            await node.keeper.activate(version, KvPolicy.RECOMPUTE)
            (found,) = await node.engine.score(PROMPTS)
            assert found.version == version
            np.testing.assert_allclose(found.logprobs, scores[step], atol=1e-4)
        adapter_bytes = sum(path.stat().st_size for path in weights.adapter.values())
        assert max(fetched[1:]) < adapter_bytes + 4096 < 0.5 * fetched[0]


def test_merged_publishes_whole_weights_equal_to_the_adapter_on_its_base(model: Path, tmp_path: Path) -> None:
    found = []
    for publish in ("adapter", "merged"):
        engine = trained(TorchTrainer.open(config(model, tmp_path / publish, publish=publish)), 2)
        weights = exported(engine, tmp_path / f"files-{publish}")
        files = merge_adapter({**weights.files, **weights.adapter}, tmp_path / f"merged-{publish}")
        assert set(weights.adapter) == ({ADAPTER_CONFIG, ADAPTER_WEIGHTS} if publish == "adapter" else set())
        found.append(load_file(files[WEIGHTS_NAME]))
    assert found[0].keys() == found[1].keys()
    assert all(np.allclose(found[0][name], found[1][name], rtol=0, atol=1e-7) for name in found[0])


def test_a_resumed_learner_exports_the_same_bytes(model: Path, tmp_path: Path) -> None:
    settings = config(model, tmp_path / "learner")
    restored = TorchTrainer.open(settings)
    engine = trained(restored, 2)
    engine.save(restored.log, Position(update=2, digest=restored.log.digest), data_snapshot=b"")
    again = TorchTrainer.open(settings).engine
    assert again.step == 2
    one, two = exported(engine, tmp_path / "one"), exported(again, tmp_path / "two")
    assert [p.read_bytes() for p in one.adapter.values()] == [p.read_bytes() for p in two.adapter.values()]
    with pytest.raises(ConfigError, match=r"has low-rank adapters, and `learner\.lora\.rank` is 0"):
        TorchTrainer.open(LearnerConfig(directory=str(tmp_path / "learner"), model=str(model)))
