"""The loss of values that are regressed on noisy outcomes, and where it is used."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollmesh.trainer.config import LossTermChoice
from rollmesh.trainer.losses import LossInputs
from rollmesh.trainer.regression import regression_loss
from rollmesh.trainer.turn_critic import CriticPair, td_loss

from .gradient_check import plugins_of


def test_the_loss_is_squared_up_to_the_limit_and_linear_beyond() -> None:
    error = torch.tensor([0.0, 0.25, -0.5, 0.75, -3.0], dtype=torch.float64, requires_grad=True)
    # beyond 0.5: 2 * 0.5 * |e| - 0.25
    found = regression_loss(error, 0.5)
    assert found.tolist() == pytest.approx([0.0, 0.0625, 0.25, 0.5, 2.75])
    (gradient,) = torch.autograd.grad(found.sum(), error)
    assert gradient.tolist() == pytest.approx([0.0, 0.5, -1.0, 1.0, -1.0])
    squared = regression_loss(error, 0.0)
    assert squared.tolist() == regression_loss(error, 9.0).tolist() == error.square().tolist()
    # RIQL: with sigma 2, beta = 1 / 4, 0.5 e^2 / beta inside and |e| - beta / 2 beyond
    theirs = [0.0, 0.125, 0.375, 0.625, 2.875]
    assert (regression_loss(error, 0.25) / (2 * 0.25)).tolist() == pytest.approx(theirs)


@pytest.mark.row("S167")
def test_with_corrupted_rewards_the_huber_loss_finds_the_values_that_the_squared_loss_misses() -> None:
    """The head of `progress` on samples of one token whose reward is 2 x, and 30 in one of ten."""
    rng = torch.Generator().manual_seed(0)
    states = torch.rand(200, 1, generator=rng)
    reward = torch.where(torch.arange(200) % 10 == 0, 30.0, 2 * states[:, 0])
    number = torch.arange(200)
    columns = {"sample": number, "turn": 0 * number, "reward": reward, "token_weight": torch.full((200,), 1 / 200)}
    errors = {}
    for huber in (0.0, 0.1):
        plugins = plugins_of(LossTermChoice("progress", options={"huber": huber}))
        head: Any = plugins.make_modules(lambda: 1, seed=0)["progress"]
        term = plugins.loss.terms["progress"]
        optimizer = torch.optim.Adam(head.parameters(), lr=0.05)
        for _ in range(400):
            inputs = LossInputs(torch.zeros(200), columns | dict(term.prepare(columns)), states, states)
            loss, _ = term(inputs)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        errors[huber] = float((head(states).squeeze(-1) - 2 * states[:, 0]).abs().mean().detach())
    # the mean of the outliers is about 3 above the values; the Huber loss sees a tenth of the samples pull with 0.2
    assert errors[0.0] > 2.0
    assert errors[0.1] < 0.1


def test_the_critic_of_turns_has_bounded_gradients() -> None:
    torch.manual_seed(0)
    pair = CriticPair(3)
    turns = {name: torch.randn(5, 3) for name in ("state", "action", "next")}
    ones = torch.ones(5)
    turns |= {"reward": 0.1 * ones, "done": ones, "q": ones, "v": ones}
    for wrong, grows in ((0.0, True), (1.0, False)):
        norms = []
        for outlier in (100.0, 1000.0):
            turns["reward"][0] = outlier
            loss = td_loss(pair, turns, 0.9, wrong)
            found = torch.autograd.grad(loss, list(pair.critic.parameters()))
            norms.append(float(torch.cat([g.flatten() for g in found]).norm()))
        assert (norms[1] > 5 * norms[0]) is grows
    turns["reward"][0] = 0.1
    assert td_loss(pair, turns, 0.9).item() == pytest.approx(td_loss(pair, turns, 0.9, 50.0).item())
