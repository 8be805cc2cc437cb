"""Losses against numbers computed by hand, and the gradients that remain after clipping."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.errors import ConfigError, LossFailed
from rollmesh.trainer.config import LossTermChoice, Normalization, UpdateConfig
from rollmesh.trainer.losses import LossInputs, LossSum, token_weights


def logs(*values: float) -> Tensor:
    return torch.tensor([math.log(v) for v in values])


def gradient_of(loss: Tensor, at: Tensor) -> Tensor:
    return torch.autograd.grad(loss, at)[0]


def inputs(pi: Tensor, mu: Tensor, advantages: list[float], proximal: Tensor | None = None) -> LossInputs:
    n = len(advantages)
    columns = {"behavior": mu, "advantages": torch.tensor(advantages), "token_weight": torch.full((n,), 1 / n)}
    return LossInputs(pi, columns if proximal is None else columns | {"proximal": proximal})


def loss_of(term: str, **options: Any) -> LossSum:
    return LossSum([LossTermChoice(term, options)])


def test_ppo_clip_equals_the_hand_computed_value() -> None:
    # ratios 1.5, 1.5, 0.5, 0.5 with A = +1, -1, +1, -1; bounds 0.8 and 1.28:
    # min(1.5, 1.28) = 1.28; min(-1.5, -1.28) = -1.5; min(0.5, 0.8) = 0.5; min(-0.5, -0.8) = -0.8; mean = -0.13
    pi = logs(0.6, 0.6, 0.2, 0.2).requires_grad_()
    loss, stats = loss_of("ppo_clip")(inputs(pi, logs(0.4, 0.4, 0.4, 0.4), [1, -1, 1, -1]))
    assert loss.item() == pytest.approx(0.13, abs=1e-6)
    assert stats["clipped"].tolist() == [1, 0, 0, 1]
    assert stats["clipped_high"].tolist() == [1, 0, 0, 0]
    # d(-w r A)/d log pi = -w r A where not clipped
    torch.testing.assert_close(gradient_of(loss, pi), torch.tensor([0.0, 1.5 / 4, -0.5 / 4, 0.0]))


def test_ppo_clip_bounds_are_asymmetric() -> None:
    pi = logs(0.5, 0.5)
    _, stats = loss_of("ppo_clip")(inputs(pi, logs(0.5 / 1.25, 0.5 / 0.78), [1, -1]))
    assert stats["clipped"].tolist() == [0, 1]  # 1.25 < 1.28 passes above, 0.78 < 0.8 is clipped below


def test_decoupled_ppo_equals_the_hand_computed_value() -> None:
    # prox/mu = 0.3/0.2 = 1.5 and 0.6/0.2 = 3 -> 2; pi/prox = 0.36/0.3 = 1.2 and 0.9/0.6 = 1.5 -> 1.28
    # loss = -(1.5 * 1.2 * 1 + 2 * 1.28 * 2) / 2 = -(1.8 + 5.12) / 2 = -3.46
    pi = logs(0.36, 0.9).requires_grad_()
    batch = inputs(pi, logs(0.2, 0.2), [1, 2], proximal=logs(0.3, 0.6))
    loss, stats = loss_of("decoupled_ppo")(batch)
    assert loss.item() == pytest.approx(-3.46, abs=1e-5)
    assert stats["weight_capped"].tolist() == [0, 1]
    torch.testing.assert_close(gradient_of(loss, pi), torch.tensor([-0.9, 0.0]))
    masked, _ = loss_of("decoupled_ppo", outside="mask")(batch)
    assert masked.item() == pytest.approx(-0.9, abs=1e-5)


def test_decoupled_ppo_stops_tokens_that_have_moved_far_from_the_sampler() -> None:
    # mu = 0.2, prox = pi = 0.3, 0.3, 0.1, 0.1, 0.22: pi/prox = 1 is not clipped; pi/mu = 1.5, 1.5, 0.5, 0.5, 1.1
    # weights prox/mu = pi/mu; d(-w r A / 5)/d log pi = -w A / 5, except where pi/mu has left [0.8, 1.28] along A
    prox = logs(0.3, 0.3, 0.1, 0.1, 0.22)
    pi = prox.clone().requires_grad_()
    batch = inputs(pi, logs(*[0.2] * 5), [1, -1, 1, -1, 1], proximal=prox)
    free, _ = loss_of("decoupled_ppo")(batch)
    torch.testing.assert_close(gradient_of(free, pi), torch.tensor([-1.5, 1.5, -0.5, 0.5, -1.1]) / 5)
    held, stats = loss_of("decoupled_ppo", behavior_clip_low=0.2, behavior_clip_high=0.28)(batch)
    torch.testing.assert_close(gradient_of(held, pi), torch.tensor([0.0, 1.5, -0.5, 0.0, -1.1]) / 5)
    assert stats["behavior_clipped"].tolist() == [1, 0, 0, 1, 0]
    assert held.item() == pytest.approx(free.item(), abs=1e-6), "a token without gradient keeps its loss"
    above, stats = loss_of("decoupled_ppo", behavior_clip_high=0.28)(batch)
    torch.testing.assert_close(gradient_of(above, pi), torch.tensor([0.0, 1.5, -0.5, 0.5, -1.1]) / 5)
    assert stats["behavior_clipped"].tolist() == [1, 0, 0, 0, 0]


def test_decoupled_ppo_on_fresh_data_is_ppo_clip() -> None:
    pi, mu = logs(0.5, 0.2, 0.7), logs(0.4, 0.4, 0.4)
    decoupled, _ = loss_of("decoupled_ppo")(inputs(pi, mu, [1, -1, 2], proximal=mu))
    clipped, _ = loss_of("ppo_clip")(inputs(pi, mu, [1, -1, 2]))
    assert decoupled.item() == pytest.approx(clipped.item(), abs=1e-6)


def test_decoupled_ppo_is_rejected_without_proximal() -> None:
    with pytest.raises(
        LossFailed,
        match=r"decoupled_ppo failed: ValueError: the loss reads the column `proximal`, which does not exist",
    ):
        loss_of("decoupled_ppo")(inputs(logs(0.5), logs(0.5), [1]))


def test_a_term_that_raises_is_reported_with_the_users_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "class Bad:\n    needs = ()\n    def __call__(self, inputs):\n        return inputs.logprobz.sum(), {}\n"
    )
    loss = LossSum([LossTermChoice("mine.py:Bad")], tmp_path)
    with pytest.raises(LossFailed) as caught:
        loss(inputs(logs(0.5), logs(0.5), [1]))
    cause, _, frames = str(caught.value).partition("\n")
    assert cause.startswith("the loss term Bad failed: AttributeError: 'LossInputs' object has no attribute 'logprobz'")
    assert "return inputs.logprobz.sum(), {}" in frames
    assert "losses/terms.py" not in frames


def test_tis_equals_the_hand_computed_value() -> None:
    # weights 0.6/0.4 = 1.5 and 0.9/0.3 = 3 -> 2: loss = -(1.5 * 1 * ln 0.6 + 2 * -1 * ln 0.9) / 2
    pi = logs(0.6, 0.9).requires_grad_()
    loss, stats = loss_of("policy_gradient")(inputs(pi, logs(0.4, 0.3), [1, -1]))
    assert loss.item() == pytest.approx(-(1.5 * math.log(0.6) - 2 * math.log(0.9)) / 2, abs=1e-6)
    assert stats["weight_capped"].tolist() == [0, 1]
    torch.testing.assert_close(gradient_of(loss, pi), torch.tensor([-0.75, 1.0]))  # the weight carries no gradient


def test_high_entropy_equals_the_hand_computed_value() -> None:
    # share 0.5 of 4 tokens: the threshold is 2.0, reached by tokens 0 and 3; their weights 0.1 and 0.3 are scaled by 1
    # / 0.4. token 0: ratio 1.5 -> 1.28, A = 1; token 3: ratio 0.5, A = 2 -> 1.0: loss = -(0.25 * 1.28 + 0.75 * 1.0) =
    # -1.07
    pi = logs(0.6, 0.6, 0.9, 0.2).requires_grad_()
    columns = {
        "behavior": logs(0.4, 0.4, 0.4, 0.4),
        "advantages": torch.tensor([1.0, 1.0, -1.0, 2.0]),
        "token_weight": torch.tensor([0.1, 0.2, 0.4, 0.3]),
        "entropy": torch.tensor([2.0, 1.9, 0.0, 3.0]),
    }
    term = loss_of("high_entropy", share=0.5)
    columns |= term.prepare(columns)
    loss, stats = term(LossInputs(pi, columns))
    assert loss.item() == pytest.approx(-1.07, abs=1e-6)
    assert stats["high_entropy"].tolist() == [1, 0, 0, 1]
    torch.testing.assert_close(gradient_of(loss, pi), torch.tensor([0.0, 0.0, 0.0, -0.75]))


def test_high_entropy_with_share_1_is_ppo_clip() -> None:
    batch = inputs(logs(0.5, 0.2, 0.7), logs(0.4, 0.4, 0.4), [1, -1, 2])
    columns = {**batch.columns, "entropy": torch.tensor([0.3, 0.1, 0.2])}
    term = loss_of("high_entropy", share=1.0)
    loss, _ = term(LossInputs(batch.logprobs, columns | term.prepare(columns)))
    assert loss.item() == pytest.approx(loss_of("ppo_clip")(batch)[0].item(), abs=1e-6)


@pytest.mark.row("S017")
def test_token_normalization_counts_every_token_alike() -> None:
    weights = token_weights([1, 3], [1.0, 0.5], Normalization.TOKEN)
    assert weights.tolist() == pytest.approx([0.25, 0.125, 0.125, 0.125])


def test_sequence_mean_counts_every_sample_alike() -> None:
    weights = token_weights([1, 4], [1.0, 1.0], Normalization.SEQUENCE_MEAN)
    assert weights.tolist() == pytest.approx([0.5, 0.125, 0.125, 0.125, 0.125])


def test_extreme_ratios_stay_finite() -> None:
    for term in ("ppo_clip", "policy_gradient"):
        pi = torch.tensor([-1.0, -400.0]).requires_grad_()
        loss, _ = loss_of(term)(inputs(pi, torch.tensor([-400.0, -1.0]), [-1, 1]))
        gradient = gradient_of(loss, pi)
        assert torch.isfinite(loss)
        assert torch.isfinite(gradient).all()


def test_a_token_whose_ratio_is_held_counts_as_clipped() -> None:
    """Its gradient is zero, although the clip alone does not clip a bad token with a rising ratio."""
    pi = torch.tensor([-1.0, -1.0, -1.0]).requires_grad_()
    loss, stats = loss_of("ppo_clip")(inputs(pi, torch.tensor([-1.1, -3.0, -40.0]), [-1, -1, -1]))
    gradient = gradient_of(loss, pi)
    assert (gradient != 0).tolist() == [True, True, False]
    assert stats["clipped"].tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("term", "options", "message"),
    [
        ("ppo_clip", {"clip_low": 1.0}, r"`clip_low` must be in \(0, 1\)"),
        ("ppo_clip", {"clip_high": 0.0}, "`clip_high` must be > 0"),
        ("decoupled_ppo", {"weight_max": 0.5}, "`weight_max` must be >= 1"),
        ("policy_gradient", {"weight_max": 0.5}, "`weight_max` must be >= 1"),
        ("policy_gradient", {"clip_low": 0.2}, "`clip_low`: unknown key; known keys: level"),
        ("ppo_klip", {}, "there is no loss term `ppo_klip`.*did you mean `ppo_clip`"),
    ],
)
def test_a_wrong_name_or_option_is_an_error_that_names_it(term: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loss_of(term, **options)


def test_a_configuration_file_lists_the_terms() -> None:
    terms = [{"name": "decoupled_ppo", "weight": 0.5, "options": {"weight_max": 3.0}}, "mine.py:Kl"]
    config = config_from_dict(UpdateConfig, {"loss": terms})
    assert config.loss[0] == LossTermChoice("decoupled_ppo", {"weight_max": 3.0}, weight=0.5)
    assert config.loss[1].short_name == "Kl"
    for wrong in ([], [{"name": "policy_gradient"}, {"name": "policy_gradient"}]):
        with pytest.raises(ConfigError, match="at least one term"):
            config_from_dict(UpdateConfig, {"loss": wrong})


def test_the_loss_is_the_weighted_sum_of_its_terms() -> None:
    """By hand, ratio 1.5 and A = 1: -min(1.5, 1.28) from the clip; -1.5 ln 0.6 from tis, whose gradient is -1.5."""
    pi = logs(0.6).requires_grad_()
    both = LossSum([LossTermChoice("ppo_clip", weight=2.0), LossTermChoice("policy_gradient", weight=0.5)])
    loss, stats = both(inputs(pi, logs(0.4), [1]))
    assert loss.item() == pytest.approx(2.0 * -1.28 + 0.5 * -1.5 * math.log(0.6), abs=1e-6)
    torch.testing.assert_close(gradient_of(loss, pi), torch.tensor([0.5 * -1.5]))  # the clip has no gradient here
    assert {name: values.tolist() for name, values in stats.items()} == {
        "ppo_clip/clipped": [1.0],
        "ppo_clip/clipped_high": [1.0],
        "policy_gradient/weight_capped": [0.0],
    }
    assert both.needs == ()
    assert LossSum([LossTermChoice("ppo_clip"), LossTermChoice("decoupled_ppo")]).needs == ("proximal",)
