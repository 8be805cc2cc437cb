"""The learner with the real trainer: what it publishes and keeps is what an engine and plain transformers can use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollmesh.client import RunAddress
from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.demo.tokenizer import build_tokenizer
from rollmesh.services.learner.config import LearnerConfig
from rollmesh.services.learner.fault_points import LearnerFaultPoint
from rollmesh.services.learner.metrics_log import read_metrics
from rollmesh.services.learner.node import LearnerNode
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.weights.manifest import parse_manifest
from rollmesh.shared.weights.probes import probes_of
from rollmesh.trainer.forward import score
from rollmesh.trainer.model_files import WEIGHTS_NAME, load_model, write_model_folder

from .learner_world import ACCESS, RunningWorld, World, episode

SMALL = TinyModelConfig(hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48, num_layers=1)


class Killed(Exception):
    """The learner ends here."""


def config(folder: Path, **changes: Any) -> LearnerConfig:
    model = folder / "model"
    if not model.exists():
        model.mkdir(parents=True)
        write_model_folder(build_tiny_model(SMALL, seed=1), build_tokenizer(), model)
    settings: dict[str, Any] = {
        "directory": str(folder / "learner"),
        "model": str(model),
        "checkpoint_every": 2,
        "tensorboard": False,
        "update_rule": Extension("minibatches", {"num_minibatches": 1}),
    }
    return LearnerConfig(**(settings | changes))


async def train(running: RunningWorld, settings: LearnerConfig, **kwargs: Any) -> LearnerNode:
    where = RunAddress(address=running.address, access=ACCESS, run="r")
    async with LearnerNode(settings, where, **kwargs) as node:
        await node.wait()
    return node


def published_model(world: World, version: tuple[int, int], folder: Path) -> Any:
    """The published weights in a model, put together as an engine would."""
    manifest = parse_manifest(world.blob(world.published[version]).read_bytes())
    write_model_folder(build_tiny_model(SMALL, seed=99), build_tokenizer(), folder)
    (file,) = manifest.files
    (folder / WEIGHTS_NAME).write_bytes(b"".join(world.blob(chunk.digest).read_bytes() for chunk in file.chunks))
    return load_model(folder), probes_of(manifest), list(manifest.tied)


async def test_published_weights_score_their_probes_as_the_learner_says(tmp_path: Path) -> None:
    async with RunningWorld(tmp_path, updates_max=2) as running:
        await train(running, config(tmp_path))
        found = {}
        for step in (0, 1, 2):
            folder = tmp_path / f"served-{step}"
            folder.mkdir()
            model, probes, tied = published_model(running.world, (step, 0), folder)
            assert len(probes) >= 2
            for probe in probes:
                np.testing.assert_allclose(score(model, probe.token_ids.copy()), probe.logprobs, atol=1e-5)
            found[step] = model.get_input_embeddings().weight.detach().clone()
            assert tied == ["lm_head.weight=model.embed_tokens.weight"]
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])


async def test_resuming_trains_on_bit_for_bit_and_republishes_the_same_version(tmp_path: Path) -> None:
    # Stamps are fixed, so that the samples of both runs are the same ones.
    def make(group: str, index: int) -> Any:
        return episode(group, index, steps=(0,), reward=float(index % 2))

    async with RunningWorld(tmp_path / "straight", updates_max=4) as running:
        running.world.make = make
        await train(running, config(tmp_path / "straight"))
        expected = running.world.published[4, 0]

    async def at(moment: LearnerFaultPoint) -> None:
        if moment is LearnerFaultPoint.STEPPED and running.world.step == 2:
            raise Killed

    async with RunningWorld(tmp_path / "cut", updates_max=4) as running:
        running.world.make = make
        settings = config(tmp_path / "cut")
        with pytest.raises(Killed):
            await train(running, settings, at=at)
        await train(running, settings)
        assert running.world.resolutions == ["CONTINUED", "CONTINUED"]
        assert running.world.published[4, 0] == expected


async def test_the_checkpoint_is_a_plain_model_folder_and_metrics_tell_of_training(tmp_path: Path) -> None:
    settings = config(tmp_path)
    async with RunningWorld(tmp_path, updates_max=2) as running:
        await train(running, settings)
    (folder,) = settings.checkpoints.glob("update-00000002.0")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert 100 < len(AutoTokenizer.from_pretrained(folder)) <= model.config.vocab_size
    line = read_metrics(Path(settings.directory) / "metrics.jsonl")[2]
    assert line.metrics["tokens/trained"] == 24.0
    assert line.metrics["kl"] is not None
    assert line.metrics["reward/correct"] == 0.5


async def test_samples_too_long_for_the_model_are_committed_as_dropped(tmp_path: Path) -> None:
    async with RunningWorld(tmp_path, updates_max=1) as running:
        running.world.make = lambda g, i: episode(
            g, i, steps=(0,) * (100 if (g, i) == ("g0", 0) else 1), reward=float(i)
        )
        await train(running, config(tmp_path))
        assert running.world.commits[1].dropped == {"g0.0": "TOO_LONG"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": ""}, "`model` must be the folder of the initial model"),
        ({"model": "/no/such/folder"}, "no model can be loaded"),
        ({"estimator": Extension("gppo")}, "there is no estimator `gppo`"),
        ({"engine": Extension("torch", {"vocab_size": 3})}, "trainer `torch` has no options, got vocab_size"),
    ],
)
async def test_a_learner_that_cannot_start_says_why(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    async with RunningWorld(tmp_path) as running:
        with pytest.raises(ConfigError, match=message):
            await train(running, config(tmp_path, **changes))
        assert running.world.calls["AttachTrainer"] == 0
