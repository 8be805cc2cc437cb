"""The estimator, loss term, recipe, inference engine and trainer of docs/extending.md, each one in its place."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace

from rollmesh.app.config import load_train_config
from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.demo.tokenizer import build_tokenizer
from rollmesh.mesh.config import MeshConfig
from rollmesh.services.inference.config import InferenceConfig
from rollmesh.services.inference.engine import GenerateDelta, GenerateRequest, KvPolicy
from rollmesh.services.inference.node import make_engine
from rollmesh.services.learner.config import LearnerConfig
from rollmesh.services.learner.engine import find_engine
from rollmesh.shared.config.loader import config_from_dict, load_config
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import FinishReason, SamplingParams
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import ConfigError
from rollmesh.trainer.config import LossTermChoice
from rollmesh.trainer.estimators import make_estimator
from rollmesh.trainer.features import FEATURES, FeatureInputs
from rollmesh.trainer.losses import LossInputs, LossSum
from rollmesh.trainer.model_files import write_model_folder
from rollmesh.trainer.update import BatchTrainer

from ..unit.trainer.builders import group, member, random_batch

FOLDER = Path(__file__).parents[2] / "examples" / "extending"
SMALL = TinyModelConfig(hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48, num_layers=1)


def test_estimator_ranks_the_members_of_a_group() -> None:
    ranks = make_estimator("ranks.py:Ranks", {"a": 1.0, "b": 2.0}, FOLDER)
    members = [member(f"s{i}", {"a": a, "b": b}) for i, (a, b) in enumerate([(0, 0), (3, 0), (0, 2), (3, 0)])]
    # totals 0, 3, 4, 3: 3 above none, 2 others beat it, and so on; divided by 3
    assert ranks.of_group(group("g", *members)) == pytest.approx({"s0": -1.0, "s1": 0.0, "s2": 1.0, "s3": 0.0})


def test_loss_term_is_added_with_its_weight() -> None:
    term = LossTermChoice("kl_term.py:KlToBehavior", {"log_ratio_max": 5.0}, weight=0.5)
    logprobs = torch.tensor([math.log(0.5), math.log(0.3)]).requires_grad_()
    columns = {"behavior": torch.tensor([math.log(0.25), math.log(0.3)]), "token_weight": torch.tensor([0.5, 0.5])}
    loss, stats = LossSum([term], FOLDER)(LossInputs(logprobs, columns))
    assert loss.item() == pytest.approx(0.5 * 0.5 * (2 - 1 - math.log(2)))  # r = 2 and 1
    assert stats["kl"].tolist() == pytest.approx([1 - math.log(2), 0.0])
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert gradient.tolist() == pytest.approx([0.5 * 0.5 * (2 - 1), 0.0])
    with pytest.raises(ConfigError, match="`log_ratio`: unknown key; did you mean `log_ratio_max`"):
        LossSum([LossTermChoice("kl_term.py:KlToBehavior", {"log_ratio": 1})], FOLDER)


def test_recipe_lies_under_the_configuration_that_names_it() -> None:
    config = load_train_config(FOLDER / "config.yaml", ["rollout.sampling.max_tokens=9"])
    assert config.learner.estimator.name == "ranks.py:Ranks"
    assert [term.short_name for term in config.learner.loss] == ["ppo_clip", "KlToBehavior"]
    assert (config.rollout.sampling.temperature, config.rollout.sampling.max_tokens) == (0.9, 9)
    assert config.rollout.agent.short_name == "SecondTry", "the configuration wins"


def test_feature_loss_term_and_update_rule_of_a_recipe_train(tmp_path: Path) -> None:
    learner = config_from_dict(MeshConfig, {"recipe": str(FOLDER / "doubtful.yaml")}).learner
    config = msgspec.structs.replace(
        learner,
        loss=tuple(term.located(FOLDER) for term in learner.loss),
        features={name: choice.located(FOLDER) for name, choice in learner.features.items()},
        update_rule=learner.update_rule.located(FOLDER),
    )
    made = BatchTrainer(build_tiny_model(SMALL, seed=1), config, seed=1, outputs=["top_k_ids", "top_k_logprobs"])
    samples, groups = random_batch()
    gaps = [0.0, 1.0, 2.0]  # 2 of 3 tokens are in doubt
    top = np.array([[-1.0, -1.0 - gap] for gap in gaps], np.float32)
    with_top = []
    for sample in samples:
        segments = [
            replace(s, arrays={"top_k_logprobs": np.resize(top, (s.num_tokens, 2))}) if s.num_trainable else s
            for s in sample.segments
        ]
        with_top.append(replace(sample, segments=tuple(segments)))
    result = made.update(1, with_top, groups)
    assert result.metrics["steps_taken"] == 2  # two turns
    assert result.metrics["doubtful_share"] == pytest.approx(2 / 3, abs=0.05)
    assert result.metrics["margin_share"] < 0  # an untrained model has likelier tokens


def test_margin_by_hand() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]]).log()
    chosen = torch.tensor([0, 2])
    logprobs = logits.gather(-1, chosen[:, None]).squeeze(-1)
    inputs = FeatureInputs(logits=logits, token_ids=chosen, logprobs=logprobs, hidden=None, columns={})
    found = FEATURES.make("margin.py:Margin", FOLDER)(inputs)
    assert found.tolist() == pytest.approx([math.log(0.5 / 0.3), math.log(0.2 / 0.5)])


async def test_engine_serves_requests() -> None:
    found = load_config(MeshConfig, None, [f"inference.engine={FOLDER}/uniform_engine.py:UniformEngine"])
    assert isinstance(found.inference, InferenceConfig)
    engine = make_engine(found.inference)
    version = PolicyVersion(policy="main", step=3)
    await engine.start()
    await engine.prepare(version, {})
    await engine.activate(version, KvPolicy.RECOMPUTE)
    deltas: asyncio.Queue[GenerateDelta] = asyncio.Queue()
    prefix = np.array([1, 2, 3], np.int32)
    for name in ("a", "b"):
        params = SamplingParams(max_tokens=5, seed=7)
        engine.submit(GenerateRequest(request_id=name, token_ids=prefix, params=params), deltas.put_nowait)
    engine.cancel("b")
    first, second = [await asyncio.wait_for(deltas.get(), 5) for _ in range(2)]
    assert (first.request_id, first.finish, len(first.token_ids)) == ("b", FinishReason.CANCELLED, 0)
    assert (second.request_id, second.finish, second.version) == ("a", FinishReason.LENGTH, version)
    assert second.logprobs.tolist() == pytest.approx([-math.log(64)] * 5)
    (scored,) = await engine.score([prefix])
    assert scored.logprobs.tolist() == pytest.approx([0.0, -math.log(64), -math.log(64)])
    assert engine.load().tokens_generated == 5
    await engine.close()


def test_trainer_updates_the_model_and_logs_it(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    write_model_folder(build_tiny_model(SMALL, seed=1), build_tokenizer(), model)
    config = LearnerConfig(directory=str(tmp_path), model=str(model))
    trainer = find_engine(Extension("logged_trainer.py:LoggedTrainer", {"file": "log.jsonl"}), FOLDER)(config).engine
    result = trainer.update(1, *random_batch())
    assert result.applied
    assert trainer.step == 1
    line = json.loads((tmp_path / "log.jsonl").read_text())
    assert line == {"update": 1, "applied": True, "samples": result.used_ids}
