"""The loss terms of ROVER, DRPO and SIREN: the checks of their papers, values by hand, and gradients."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rollmesh.trainer.config import LossTermChoice
from rollmesh.trainer.losses.siren import Siren, peak_shares

from .gradient_check import Ragged, check_gradient, loss_of_logits, plugins_of, ragged

DOUBLE = torch.float64


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=DOUBLE)


# ROVER ----------------------------------------------------------------------------------------------------------------


@pytest.mark.row("S030")
def test_rover_at_the_start_is_the_mean_squared_advantage() -> None:
    batch = ragged()
    batch = replace(batch, start=batch.logits)
    loss = loss_of_logits(plugins_of(LossTermChoice("rover")), batch, batch.logits)
    torch.testing.assert_close(loss, batch.columns["advantages"].square().mean())


def test_rover_equals_the_hand_computed_value() -> None:
    """Two tokens of one sample, two words. pi = (1/2, 1/2) then (3/4, 1/4); old is uniform and the words are 0 and 1; A
    = 0.1.

    Q = 0 then ln(1/2); the mean over the words in the second state is (ln(3/2) + ln(1/2)) / 2; the state after the last
    token has 0.
    """
    batch = ragged(lengths=(2,), vocabulary=2)
    logits = torch.stack([doubles(0.5, 0.5), doubles(0.75, 0.25)]).log()
    batch = replace(batch, start=torch.zeros(2, 2, dtype=DOUBLE), token_ids=torch.tensor([0, 1]))
    batch = batch.with_columns(advantages=doubles(0.1, 0.1))
    loss = loss_of_logits(plugins_of(LossTermChoice("rover")), batch, logits)
    after = (math.log(1.5) + math.log(0.5)) / 2
    assert loss.item() == pytest.approx(((0 - 0.1 - after) ** 2 + (math.log(0.5) - 0.1) ** 2) / 2)


def test_rover_has_the_gradient_of_its_error_alone() -> None:
    assert check_gradient(plugins_of(LossTermChoice("rover", {"rho": 0.7})), ragged(), frozen=True).abs().max() > 1e-3


@pytest.mark.row("S030")
def test_rover_finds_the_right_leaf_of_a_tree() -> None:
    """Two choices of two words; only the leaf (1, 0) has the reward 1. Every path is a sample, and its states share
    logits."""
    paths = [(a, b) for a in (0, 1) for b in (0, 1)]
    states = torch.tensor([s for a, _ in paths for s in (0, 1 + a)])
    reward = doubles(*(float(path == (1, 0)) for path in paths for _ in path))
    batch = replace(
        ragged(lengths=(2, 2, 2, 2), vocabulary=2),
        start=torch.zeros(8, 2, dtype=DOUBLE),
        token_ids=torch.tensor([word for path in paths for word in path]),
    ).with_columns(advantages=reward - 0.25)
    table = torch.zeros(3, 2, dtype=DOUBLE, requires_grad=True)
    optimizer = torch.optim.SGD([table], lr=0.3)
    for _ in range(60):
        optimizer.zero_grad()
        loss_of_logits(plugins_of(LossTermChoice("rover")), batch, table[states]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert int(table[0].argmax()) == 1
    assert int(table[2].argmax()) == 0


# DRPO -----------------------------------------------------------------------------------------------------------------

WITHOUT_PENALTY = {"beta": 0.0, "length_max": 10, "tau": 2.0}


def test_drpo_equals_the_hand_computed_value() -> None:
    """One group: right samples of 1 and 2 tokens with mean log-probs ln(1/2) and ln(1/4), wrong ones of 1 token with
    ln(1/2) and ln(1/8)."""
    batch = ragged(lengths=(1, 2, 1, 1), vocabulary=8)
    probabilities = doubles(0.5, 0.25, 0.25, 0.5, 0.125)
    rest = (1 - probabilities) / 7
    logits = torch.cat([probabilities[:, None], rest[:, None].expand(-1, 7)], dim=1).log()
    batch = replace(batch, token_ids=torch.zeros(5, dtype=torch.long)).with_columns(
        reward=doubles(1, 1, 1, 0, 0), group=torch.zeros(5, dtype=torch.long)
    )
    options = WITHOUT_PENALTY | {"length_temperature": 0.5}
    loss = loss_of_logits(plugins_of(LossTermChoice("drpo", options)), batch, logits)
    against = 2 * math.log((0.5**0.5 + 0.125**0.5) / 2)
    short, long = math.exp(0.9 / 0.5), math.exp(0.8 / 0.5)
    gain = (short * (math.log(0.5) - against) + long * (math.log(0.25) - against)) / (short + long)
    assert loss.item() == pytest.approx(-gain)


@pytest.mark.row("S043")
def test_drpo_never_pushes_a_right_answer_down_whatever_its_length() -> None:
    """The gradient by its log-probs is negative in the loss, and the weights of lengths 2 and 9 have the ratio exp(7 /
    (lambda L))."""
    batch = ragged(lengths=(9, 2, 4), vocabulary=6)
    batch = batch.with_columns(reward=(batch.columns["sample"] < 2).double())
    logprobs = batch.logits.log_softmax(-1).gather(-1, batch.token_ids[:, None]).squeeze(-1).requires_grad_()
    term: Any = plugins_of(LossTermChoice("drpo", WITHOUT_PENALTY)).loss.terms["drpo"]
    value, _ = term.value(logprobs, batch.columns | {"proximal": logprobs.detach()})
    (gradient,) = torch.autograd.grad(value, logprobs)
    right = batch.columns["reward"] > 0
    assert (gradient[right] < 0).all()
    assert (gradient[~right] > 0).all()
    per_sample = [float(-gradient[batch.columns["sample"] == n].sum()) for n in (0, 1)]
    assert per_sample[1] / per_sample[0] == pytest.approx(math.exp(7 / (0.1 * 10)))


@pytest.mark.row("S043")
def test_a_group_of_right_answers_contributes_nothing() -> None:
    batch = ragged()
    batch = batch.with_columns(reward=torch.ones_like(batch.columns["reward"]))
    assert loss_of_logits(plugins_of(LossTermChoice("drpo", WITHOUT_PENALTY)), batch, batch.logits).item() == 0


def test_drpo_penalizes_only_the_divergence_above_delta() -> None:
    """In beta * (K - delta) * K only the last K has a gradient."""
    batch = ragged()
    batch = batch.with_columns(reward=torch.ones_like(batch.columns["reward"]))

    def chosen(logits: Tensor) -> Tensor:
        return logits.log_softmax(-1).gather(-1, batch.token_ids[:, None]).squeeze(-1)

    ratio = chosen(batch.logits) - chosen(batch.start)
    mean = float((ratio.exp() - 1 - ratio).mean())
    for delta, expected in ((2 * mean, 0.0), (mean / 2, 3.0 * (mean / 2) * mean)):
        plugins = plugins_of(LossTermChoice("drpo", {"beta": 3.0, "delta": delta}))
        assert loss_of_logits(plugins, batch, batch.logits).item() == pytest.approx(expected)


def test_the_gradient_of_drpo_equals_finite_differences() -> None:
    assert check_gradient(plugins_of(LossTermChoice("drpo", WITHOUT_PENALTY)), ragged()).abs().max() > 1e-3


# SIREN ----------------------------------------------------------------------------------------------------------------


def anchored(batch: Ragged, **options: Any) -> Any:
    """Return the plugins of a SIREN term after its first step on the batch."""
    plugins = plugins_of(LossTermChoice("siren", options))
    assert loss_of_logits(plugins, batch, batch.logits).item() == 0
    return plugins


def test_peaks_are_the_tokens_above_the_quantile_of_their_sample() -> None:
    entropy = doubles(0.1, 0.2, 0.9, 0.3, 1.5, 2.0)
    sample = torch.tensor([0, 0, 0, 0, 1, 1])
    shares = peak_shares(entropy, sample, 0.5)  # the median of sample 0 is 0.25, that of sample 1 is 1.75
    assert shares.tolist() == [0, 0, 0.25, 0.25, 0, 0.5]


@pytest.mark.row("S042")
def test_at_the_anchor_the_gradient_is_zero() -> None:
    batch = ragged()
    plugins = anchored(batch, quantile=0.5)
    logits = batch.logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of_logits(plugins, batch, logits), logits)
    assert gradient.abs().max() < 1e-12


def test_the_gradient_of_siren_equals_finite_differences() -> None:
    batch = ragged()
    plugins = anchored(batch, quantile=0.5, top_p=0.9)
    moved = replace(batch, logits=batch.logits * 1.5)
    assert check_gradient(plugins, moved).abs().max() > 1e-4


@pytest.mark.row("S042")
def test_tokens_outside_the_nucleus_change_nothing() -> None:
    """A third of the mass in the tail of 4 words, moved between them, leaves the loss equal."""
    batch = ragged(lengths=(2, 2), vocabulary=6)
    plugins = anchored(batch, top_p=0.6, quantile=0.0)
    one = doubles(0.4, 0.28, 0.08, 0.08, 0.08, 0.08).log().expand(4, 6)
    other = doubles(0.4, 0.28, 0.2, 0.1, 0.01, 0.01).log().expand(4, 6)
    one, other = (x + doubles(0, 0.1, 0.2, 0.3)[:, None] * doubles(1, 0, 0, 0, 0, 0) for x in (one, other))
    losses = [float(loss_of_logits(plugins, batch, logits)) for logits in (one, other)]
    assert losses[0] == pytest.approx(losses[1])
    assert losses[0] > 0


@pytest.mark.row("S042")
def test_the_entropy_stays_in_a_band_around_the_anchor_while_the_policy_sharpens() -> None:
    """80 on-policy steps that raise the likeliest word of each state."""
    found = {}
    for weight in (0.0, 5.0):
        batch = ragged(lengths=(4, 4, 4), vocabulary=6)
        siren = LossTermChoice("siren", {"quantile": 0.0, "top_p": 0.95}, weight=weight)
        plugins = plugins_of(LossTermChoice("policy_gradient"), siren)
        words = batch.logits.argmax(-1)
        logits = batch.logits.clone().requires_grad_()
        optimizer = torch.optim.SGD([logits], lr=2.0)
        entropies = []
        for _ in range(80):
            now = logits.detach().log_softmax(-1)
            entropies.append(float(-(now.exp() * now).sum(-1).mean()))
            behavior = now.gather(-1, words[:, None]).squeeze(-1)
            step = replace(batch, token_ids=words).with_columns(behavior=behavior, advantages=torch.ones_like(behavior))
            optimizer.zero_grad()
            loss_of_logits(plugins, step, logits).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        found[weight] = [entropy / entropies[0] for entropy in entropies]
    assert min(found[0.0]) < 0.3, "without the term it collapses"
    assert 0.75 < min(found[5.0]) <= max(found[5.0]) < 1.25


def test_the_anchor_is_part_of_the_memory() -> None:
    plugins = anchored(ragged())
    again = plugins_of(LossTermChoice("siren"))
    again.load_state(plugins.state())
    term: Any = again.loss.terms["siren"]
    assert isinstance(term, Siren)
    assert term.anchor is not None
    assert term.anchor > 0
