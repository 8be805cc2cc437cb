"""Mistakes in an estimator, a loss term or an update rule are named with the part, the value and the user's line,
before a step is taken."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.errors import LearnerCodeFailed, LossFailed, MeshError
from rollmesh.trainer.config import LossTermChoice, UpdateConfig
from rollmesh.trainer.model_files import published_state
from rollmesh.trainer.update import BatchTrainer

from .builders import minibatches, random_batch

SMALL = TinyModelConfig(hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48, num_layers=1)
RULE = """
import numpy as np
from rollmesh.trainer.update_rules import OptimizerStep

class Mine:
    def steps(self, batch, rng):
        everything, num_tokens = range(len(batch.samples)), int(batch.lengths.sum())
        {body}
"""
ESTIMATOR = """
import numpy as np
from rollmesh.trainer.estimators import Estimate, GroupEstimator

class Mine(GroupEstimator):
    def of_group(self, group):
        return {{m.sample_id: 1.0 for m in group.members}}

    def __call__(self, batch):
        {body}
"""
TERM = """
import torch

class Mine:
    needs = ()

    def __call__(self, inputs):
        loss = inputs["token_weight"] * inputs.logprobs
        {body}
"""


def trainer(kind: str, body: str, folder: Path) -> BatchTrainer:
    """Return a trainer whose estimator, term or rule is a file with this body."""
    path = folder / "mine.py"
    path.write_text({"rule": RULE, "estimator": ESTIMATOR, "term": TERM}[kind].format(body=body))
    parts: dict[str, Any] = {"update_rule": minibatches(1)}
    if kind == "term":
        parts["loss"] = (LossTermChoice("ppo_clip"), LossTermChoice(f"{path}:Mine"))
    else:
        parts["update_rule" if kind == "rule" else "estimator"] = Extension(f"{path}:Mine")
    return BatchTrainer(build_tiny_model(SMALL, seed=1), UpdateConfig(**parts), seed=7)


@pytest.mark.parametrize(
    ("kind", "body", "error"),
    [
        ("term", "torch.empty(1 << 60)", RuntimeError),
        (
            "term",
            "raise RuntimeError('DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes')",
            RuntimeError,
        ),
        ("estimator", "raise __import__('torch').OutOfMemoryError('no memory')", torch.OutOfMemoryError),
        ("rule", "yield bytearray(1 << 60)", MemoryError),
    ],
)
def test_a_process_without_memory_does_not_blame_the_plug_in(
    kind: str, body: str, error: type[Exception], tmp_path: Path
) -> None:
    with pytest.raises(error) as caught:
        trainer(kind, body, tmp_path).update(1, *random_batch())
    assert not isinstance(caught.value, MeshError)
    (note,) = caught.value.__notes__
    assert "may not be the cause; lower `learner.packing.row_tokens`" in note


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        ("rule", "yield OptimizerStep(samples=everything, lr_factor=float('nan'))", "ValueError: `lr_factor` must be finite and >= 0, got nan"),
        ("rule", "yield OptimizerStep(samples=everything, lr_factor=-1.0)", "ValueError: `lr_factor` must be finite and >= 0, got -1.0"),
        ("rule", "yield OptimizerStep(samples=[999])", "ValueError: `samples` must be in [0, 15], the numbers of"),
        ("rule", "yield OptimizerStep(samples=[-1])", "got -1"),
        ("rule", "yield OptimizerStep(samples=everything, tokens=np.ones(3, bool))", "ValueError: `tokens` must have shape ["),
        ("rule", "yield OptimizerStep(samples=everything, advantage_factors=np.ones(()))", "of the batch, got []"),
        ("rule", "yield everything", "TypeError: it yielded range, expected an OptimizerStep"),
        ("rule", "yield OptimizerStep(samples=batch.nothing)", "no attribute 'nothing'\n"),
        ("rule", "return batch.nothing", "no attribute 'nothing'\n"),
        ("estimator", "return {}", "TypeError: it returned dict, expected an Estimate"),
        ("estimator", "return Estimate(advantages=batch['sample'][999999])", "IndexError: index 999999 is out of bounds"),
        ("estimator", "return Estimate(advantages=['a'])", "ValueError: could not convert string to float"),
        ("term", "return loss, {}", "ValueError: it returned a loss of shape ["),
        ("term", "return 1.0, {}", "ValueError: it returned a loss of float, expected a tensor of shape []"),
        ("term", "return loss.sum(), {'share': loss.mean().detach()}", "ValueError: it returned the statistic `share` of shape [], expected ["),
        ("term", "return loss.sum(), {'share': torch.zeros(2)}", "ValueError: it returned the statistic `share` of shape [2], expected ["),
    ],
)  # fmt: skip
def test_a_mistake_is_named_and_changes_no_weights(kind: str, body: str, message: str, tmp_path: Path) -> None:
    made = trainer(kind, body, tmp_path)
    before = {name: tensor.clone() for name, tensor in published_state(made.model).items()}
    failure: type[MeshError] = LossFailed if kind == "term" else LearnerCodeFailed
    what = {"term": "the loss term Mine", "rule": "the update rule Mine", "estimator": "the estimator Mine"}[kind]
    with pytest.raises(failure, match=f"(?s)^{what} failed: .*{re.escape(message)}") as caught:
        made.update(1, *random_batch())
    if "nothing" in message or "999999" in message:
        assert 'mine.py", line' in str(caught.value)
        assert "rollmesh/trainer/update.py" not in str(caught.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in published_state(made.model).items())


def test_a_term_without_gradient_is_warned_of_once_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = trainer("term", "return loss.detach().sum(), {}", tmp_path)
    with caplog.at_level(logging.WARNING):
        metrics = [made.update(k, *random_batch(seed=k, step=k - 1)).metrics for k in (1, 2)]
    assert [m["terms_without_gradient"] for m in metrics] == [1.0, 1.0]
    assert caplog.text.count("the loss term has no gradient, so that it trains nothing: term=Mine") == 1
    (tmp_path / "fine").mkdir()
    fine = trainer("term", "return loss.sum(), {}", tmp_path / "fine")
    assert "terms_without_gradient" not in fine.update(1, *random_batch()).metrics
