"""The loss term of single-token rollouts, against expectations by hand."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import GroupContext, Source, TrainingSample
from rollmesh.trainer.config import ComputeConfig, LossTermChoice, OptimizerConfig, PackingConfig, UpdateConfig
from rollmesh.trainer.losses.one_token_rollout import uniform
from rollmesh.trainer.model_files import published_state
from rollmesh.trainer.update import BatchTrainer, UpdateOutcome

from .builders import minibatches, random_batch
from .gradient_check import Ragged, check_gradient, loss_of_logits, plugins_of, ragged

SMALL = TinyModelConfig(hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48, num_layers=1)


def given(batch: Ragged) -> Ragged:
    """Return the batch with tokens that were not sampled."""
    nothing = torch.full_like(batch.columns["behavior"], torch.nan)
    return batch.with_columns(behavior=nothing, source=torch.full_like(batch.token_ids, int(Source.DATASET)))


def gradient(batch: Ragged, **options: Any) -> Tensor:
    logits = batch.logits.clone().requires_grad_()
    loss = loss_of_logits(plugins_of(LossTermChoice("one_token_rollout", options=options)), batch, logits)
    (found,) = torch.autograd.grad(loss, logits)
    return found


@pytest.mark.row("S112")
@pytest.mark.parametrize("miss_reward", [0.0, -0.5])
def test_with_many_draws_the_gradient_is_that_of_imitation_times_the_probability(miss_reward: float) -> None:
    batch = given(ragged())
    probs, weight = batch.logits.softmax(-1), batch.columns["token_weight"][:, None]
    at = torch.nn.functional.one_hot(batch.token_ids, 6).double()
    # -pi(x) grad log pi(x) = -pi(x) (1[a = x] - pi(a)); a constant reward has no expected gradient at temperature 1
    expected = -weight * (1 - miss_reward) * (probs * at).sum(-1, keepdim=True) * (at - probs)
    found = gradient(batch, draws=40_000, temperature=1.0, miss_reward=miss_reward)
    error = 1.5 * 5 / 40_000**0.5  # five deviations of a mean of 40000 draws, each of at most 1.5
    assert float(((found - expected) / weight).abs().max()) < error
    assert float((expected / weight).abs().max()) > 5 * error, "the bound can fail"


def test_the_draws_are_from_the_flattened_policy() -> None:
    batch = given(ragged())
    flat = (batch.logits / 2.0).softmax(-1)
    at = torch.nn.functional.one_hot(batch.token_ids, 6).double()
    rewards = at - 0.25 * (1 - at)
    # - sum over a of flat(a) R(a) (1[a = b] - pi(b))
    mean = (flat * rewards).sum(-1, keepdim=True)
    expected = -(flat * rewards - mean * batch.logits.softmax(-1)) * batch.columns["token_weight"][:, None]
    found = gradient(batch, draws=40_000, temperature=2.0, miss_reward=-0.25)
    torch.testing.assert_close(found, expected, rtol=0, atol=5 * 1.25 / 40_000**0.5 / len(batch.token_ids))


def test_one_draw_is_the_policy_gradient_of_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = given(ragged())
    plugins = plugins_of(LossTermChoice("one_token_rollout", options={"draws": 1, "miss_reward": -0.5}))
    monkeypatch.setattr(plugins.loss.terms["one_token_rollout"], "prepare", lambda _: {})  # the draws stay
    found = check_gradient(plugins, batch)
    # of each token the gradient is -R / M (1[a = drawn] - pi), with R = 1 if the drawn token is the given one
    rows = (found * len(batch.token_ids)).abs().sum(-1) / 2  # R (1 - pi(drawn))
    assert (rows > 0).all()
    drawn = found.abs().argmax(-1)
    reward = torch.where(drawn == batch.token_ids, 1.0, 0.5)
    torch.testing.assert_close(rows, reward * (1 - batch.logits.softmax(-1).gather(-1, drawn[:, None]).squeeze(-1)))


def given_batch(seed: int) -> tuple[list[TrainingSample], list[GroupContext]]:
    """Return samples whose actions are given, as those of `rollmesh sft`."""
    from msgspec.structs import replace

    samples, groups = random_batch(num_groups=2, group_size=2, seed=seed)
    as_given = [
        replace(
            sample,
            segments=tuple(
                replace(s, source=Source.DATASET, logprobs=None, version=None, arrays={}) if s.num_trainable else s
                for s in sample.segments
            ),
        )
        for sample in samples
    ]
    return as_given, groups


def trainer(micro_batch_tokens: int = 4096, chunk: int = 0) -> BatchTrainer:
    config = UpdateConfig(
        estimator=Extension("none"),
        loss=(LossTermChoice("one_token_rollout", options={"draws": 32}),),
        update_rule=minibatches(1),
        optimizer=OptimizerConfig(lr=1e-2, warmup_updates=0),
        packing=PackingConfig(row_tokens=64, micro_batch_tokens=micro_batch_tokens),
        compute=ComputeConfig(logprob_chunk_tokens=chunk),
    )
    return BatchTrainer(build_tiny_model(SMALL, seed=1), config, seed=0, sources=[Source.DATASET])


def test_it_trains_given_tokens_draws_again_in_every_step_and_resumes_bit_for_bit() -> None:
    whole, parts = trainer(), trainer(micro_batch_tokens=64, chunk=7)
    shares = []
    for k in (1, 2, 3):
        left, right = whole.update(k, *given_batch(0)), parts.update(k, *given_batch(0))
        assert left.outcome is UpdateOutcome.APPLIED
        if k == 1:
            assert left.metrics["loss"] == pytest.approx(right.metrics["loss"], rel=1e-5), "whatever the split"
        shares.append(left.metrics["hit_share"])
    assert shares[0] != shares[1]
    assert shares[-1] is not None
    state = whole.plugins.state()
    assert state["loss term one_token_rollout"] == {"steps": 3}
    again = trainer()
    again.step = 3
    again.model.load_state_dict(whole.model.state_dict())
    again.optimizer.load_state_dict(copy.deepcopy(whole.optimizer.state_dict()))  # it shares the tensors otherwise
    again.load_memory(whole.memory())
    for one in (whole, again):
        one.update(4, *given_batch(0))
    weights = [published_state(one.model) for one in (whole, again)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_uniform_numbers_depend_on_every_key_and_fill_the_interval() -> None:
    keys = np.arange(40)
    found: Any = uniform(np.array([[3]]), keys[:, None], np.arange(500)[None, :])
    assert len(np.unique(found)) == found.size
    assert 0 <= found.min() < 0.001
    assert 0.999 < found.max() < 1
    # the counts of 20 bins over 20000 numbers: mean 1000, deviation 31
    assert np.abs(np.histogram(found, bins=20, range=(0, 1))[0] - 1000).max() < 5 * 31
    assert np.abs(np.corrcoef(found)[np.triu_indices(40, 1)]).max() < 5 / 500**0.5
    assert not np.isin(found, uniform(np.array([[4]]), keys[:, None], np.arange(500)[None, :])).any()
    assert np.array_equal(found[7:9], uniform(np.array([[3]]), keys[7:9, None], np.arange(500)[None, :]))
