"""The regression of the relative future: by hand, and until the loss is the noise of the returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollmesh.trainer.config import LossTermChoice

from .gradient_check import check_gradient, plugins_of, ragged

DOUBLE = torch.float64


def term(eta: float = 1.0) -> Any:
    return plugins_of(LossTermChoice("refuel", {"eta": eta})).loss.terms["refuel"]


def test_the_loss_of_a_pair_equals_the_value_by_hand() -> None:
    """Samples of 2 and 1 tokens with log-ratios 0.1 + 0.2 and -0.4, rewards 1 and 0.5, eta 2; a third one is alone."""
    columns = {
        "sample": torch.tensor([4, 4, 6, 9]),
        "episode": torch.tensor([1, 1, 1, 2]),
        "reward": torch.tensor([1.0, 1.0, 0.5, 7.0], dtype=DOUBLE),
        "proximal": torch.zeros(4, dtype=DOUBLE),
    }
    logprobs = torch.tensor([0.1, 0.2, -0.4, 3.0], dtype=DOUBLE, requires_grad=True)
    value, stats = term(2.0).value(logprobs, columns)
    error = (0.3 + 0.4) / 2 - 0.5
    assert value.item() == pytest.approx(error**2)
    (gradient,) = torch.autograd.grad(value, logprobs)
    assert gradient.tolist() == pytest.approx([error, error, -error, 0.0])
    assert stats["squared_error"].tolist() == pytest.approx([error**2] * 3 + [0.0])


def test_the_gradient_is_exact_and_samples_without_a_partner_have_none() -> None:
    batch = ragged()
    sample = batch.columns["sample"]
    batch = batch.with_columns(episode=torch.where(sample < 4, sample // 2, sample))
    gradient = check_gradient(plugins_of(LossTermChoice("refuel", {"eta": 0.5})), batch)
    assert gradient[sample < 4].abs().max() > 1e-3
    assert gradient[sample >= 4].abs().max() == 0


@pytest.mark.row("S110")
def test_the_loss_falls_to_the_noise_of_the_returns() -> None:
    """Four answers with mean returns 0, 1, 2 and -1 and noise of deviation 0.3, under a policy that is not uniform. The
    difference of two returns has the variance 2 * 0.09, and the policy becomes prox exp(eta Q) / Z."""
    rng = torch.Generator().manual_seed(0)
    returns, eta, deviation, num = torch.tensor([0.0, 1.0, 2.0, -1.0], dtype=DOUBLE), 1.5, 0.3, 2000
    start = torch.tensor([0.5, 0.0, -0.5, 0.2], dtype=DOUBLE).log_softmax(0)
    answers = torch.multinomial(start.exp(), 2 * num, replacement=True, generator=rng)
    noise = deviation * torch.randn(2 * num, generator=rng, dtype=DOUBLE)
    columns = {
        "sample": torch.arange(2 * num),
        "episode": torch.arange(2 * num) // 2,
        "reward": returns[answers] + noise,
        "proximal": start[answers],
    }
    logits = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([logits], max_iter=50)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value, _ = term(eta).value(logits.log_softmax(0)[answers], columns)
        value.backward()
        found: torch.Tensor = value
        return found

    before = loss().item()
    optimizer.step(loss)  # type: ignore[no-untyped-call]
    level = 2 * deviation**2
    assert before > 5 * level
    assert loss().item() == pytest.approx(level, rel=0.1)
    found = (logits.log_softmax(0) - start).detach()
    assert (found - found[0]).tolist() == pytest.approx((eta * returns).tolist(), abs=0.1)
