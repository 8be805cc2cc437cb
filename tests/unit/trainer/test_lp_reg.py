"""Lp-Reg: the checks of its paper, values by hand, and gradients."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.shared.domain.trajectory import SamplingParams
from rollmesh.trainer.config import LossTermChoice, PackingConfig
from rollmesh.trainer.feature_pass import computed_features
from rollmesh.trainer.forward import ForwardMode, ForwardPlan
from rollmesh.trainer.losses.lp_reg import lowest
from rollmesh.trainer.samples import build_table

from .builders import action, prompt, training_sample
from .gradient_check import Ragged, check_gradient, loss_of_logits, plugins_of, ragged

DOUBLE = torch.float64
ALL = {"share": 1.0, "threshold": 0.1, "kind": "fixed"}
"""All tokens with a negative advantage may be protected, and tokens below 0.1 are noise."""


def one_token(probabilities: list[float], *, token: int, advantage: float) -> Ragged:
    """Return a batch of one token, sampled by the policy that is trained."""
    logits = torch.tensor([probabilities], dtype=DOUBLE).log()
    made = replace(
        ragged(lengths=(1,), vocabulary=len(probabilities)),
        logits=logits,
        start=logits,
        token_ids=torch.tensor([token]),
    )
    return made.with_columns(
        advantages=torch.tensor([advantage], dtype=DOUBLE), behavior=logits.log_softmax(-1)[:, token]
    )


def loss_and_gradient(batch: Ragged, **options: Any) -> tuple[float, Tensor]:
    logits = batch.logits.clone().requires_grad_()
    loss = loss_of_logits(plugins_of(LossTermChoice("lp_reg", options)), batch, logits)
    (gradient,) = torch.autograd.grad(loss, logits)
    return float(loss.detach()), gradient[0]


def test_a_protected_token_equals_the_hand_computed_value() -> None:
    """p = 0.12; without the token of 0.08 the proxy has 0.12 / 0.92. r = 1, A = -0.5."""
    loss, _ = loss_and_gradient(one_token([0.8, 0.12, 0.08], token=1, advantage=-0.5), **ALL, beta=2.0)
    d = -math.log(0.92)
    assert loss == pytest.approx(0.5 + 2.0 * (math.exp(d) - 1 - d))


@pytest.mark.row("S040")
def test_a_token_above_the_threshold_is_restored_and_noise_is_not() -> None:
    """The gradient by the token's log-prob is -r A + beta (1 - proxy / pi): the second part raises the token, the first
    one lowers it."""

    def by_token(token: int, advantage: float, beta: float) -> float:
        batch = one_token([0.8, 0.12, 0.08], token=token, advantage=advantage)
        return float(loss_and_gradient(batch, **ALL, beta=beta)[1][token])

    chain = 1 - 0.12  # d log p / d logit
    restoring = by_token(1, -0.01, 1.0)
    assert restoring == pytest.approx(chain * (0.01 + (1 - 1 / 0.92)))
    assert restoring < 0, "descent raises the token although its advantage is negative"
    assert by_token(1, -0.01, 0.0) > 0
    assert by_token(2, -0.01, 1.0) == pytest.approx(by_token(2, -0.01, 0.0)), "noise has no protection"
    assert by_token(2, -0.01, 1.0) > 0
    assert by_token(1, 0.01, 1.0) == pytest.approx(by_token(1, 0.01, 0.0)), "nor has a token with a positive advantage"


def test_a_relative_threshold_follows_the_most_likely_token() -> None:
    batch = one_token([0.8, 0.12, 0.08], token=2, advantage=-0.01)
    kept = {"share": 1.0, "kind": "relative"}
    assert loss_and_gradient(batch, **kept, threshold=0.09)[0] == pytest.approx(0.01), (
        "0.08 > 0.072: the proxy is the policy"
    )
    assert loss_and_gradient(batch, **kept, threshold=0.11)[0] == pytest.approx(0.01), "0.08 < 0.088: noise"
    other = one_token([0.8, 0.12, 0.08], token=1, advantage=-0.01)
    assert loss_and_gradient(other, **kept, threshold=0.11)[0] > 0.01


def test_other_tokens_have_the_clipped_loss() -> None:
    """With no protection the loss is that of `ppo_clip` with the same bounds."""
    batch = ragged()
    bounds = {"clip_low": 0.1, "clip_high": 0.1}
    found = loss_of_logits(plugins_of(LossTermChoice("lp_reg", {**ALL, **bounds, "share": 0.0})), batch, batch.logits)
    expected = loss_of_logits(plugins_of(LossTermChoice("ppo_clip", bounds)), batch, batch.logits)
    torch.testing.assert_close(found, expected)


def test_the_lowest_share_is_that_of_the_whole_optimizer_step() -> None:
    values = torch.tensor([-1.0, -5.0, -2.0, -4.0, -3.0, -5.0, -9.0])
    among = torch.tensor([True, True, True, True, True, True, False])
    assert lowest(values, among, 0.5).tolist() == [False, True, False, True, False, True, False]
    assert lowest(values, among, 0.2).tolist() == [False, True, False, False, False, False, False], (
        "the first of equals"
    )
    assert not lowest(values, among, 0.1).any(), "less than one token"
    assert not lowest(values, torch.zeros(7, dtype=torch.bool), 1.0).any()


def test_the_split_into_micro_batches_changes_nothing() -> None:
    batch = ragged(lengths=(3, 5, 2, 6))
    plugins = plugins_of(LossTermChoice("lp_reg", {"share": 0.5, "threshold": 0.05}))
    whole, parts = (loss_of_logits(plugins, batch, batch.logits, parts=n) for n in (1, 4))
    torch.testing.assert_close(whole, parts)


@pytest.mark.parametrize("kind", ["fixed", "relative"])
def test_the_gradient_of_lp_reg_equals_finite_differences(kind: str) -> None:
    batch = ragged()
    options = {"share": 0.6, "threshold": 0.1, "kind": kind, "beta": 0.7}
    plugins = plugins_of(LossTermChoice("lp_reg", options))
    gradient = check_gradient(plugins, batch)
    without = check_gradient(plugins_of(LossTermChoice("lp_reg", options | {"beta": 0.0})), batch)
    assert (gradient - without).abs().max() > 1e-4, "some tokens are protected"


@pytest.mark.row("S040")
def test_the_proxy_is_that_of_the_sampling_temperature() -> None:
    model = build_tiny_model(TinyModelConfig(hidden_size=32, num_layers=1), seed=1).train(False)
    segments = [prompt([20, 21]), action([30, 31, 32], [-1.0] * 3)]
    sample = training_sample("s", segments, params=SamplingParams(temperature=0.5))
    plugins = plugins_of(LossTermChoice("lp_reg", {"threshold": 0.005, "kind": "fixed"}))
    (request,) = (found for name, found in plugins.requests.items() if "proxy" in name)
    plan = ForwardPlan(ForwardMode.UNPACKED, PackingConfig(row_tokens=64, micro_batch_tokens=64))
    (proxy,) = computed_features(model, build_table([sample], update=1), {"proxy": request}, plan).values()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[20, 21, 30, 31, 32]])).logits[0, 1:4]
    p = (logits / 0.5).softmax(-1)
    kept = torch.where(p < 0.005, 0.0, p)
    expected = (kept / kept.sum(-1, keepdim=True))[torch.arange(3), [30, 31, 32]].log()
    torch.testing.assert_close(torch.as_tensor(proxy), expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(kept.sum(-1), torch.ones(3)), "the threshold removes some words"
