"""Losses against numbers computed by hand, and the gradients that remain after clipping."""

import math

import pytest
import torch
from torch import Tensor

from rollmesh.shared.config import config_from_dict
from rollmesh.trainer.losses import (
    DecoupledPpoConfig,
    LossInputs,
    Normalization,
    PpoClipConfig,
    TisConfig,
    make_loss,
    token_weights,
)
from rollmesh.trainer.update import UpdateConfig


def logs(*values: float) -> Tensor:
    return torch.tensor([math.log(v) for v in values])


def gradient_of(loss: Tensor, at: Tensor) -> Tensor:
    return torch.autograd.grad(loss, at)[0]


def inputs(pi: Tensor, mu: Tensor, advantages: list[float], proximal: Tensor | None = None) -> LossInputs:
    n = len(advantages)
    columns = {"behavior": mu, "advantages": torch.tensor(advantages), "token_weight": torch.full((n,), 1 / n)}
    return LossInputs(pi, columns if proximal is None else columns | {"proximal": proximal})


def test_ppo_clip_equals_the_hand_computed_value() -> None:
    # ratios 1.5, 1.5, 0.5, 0.5 with A = +1, -1, +1, -1; bounds 0.8 and 1.28:
    # min(1.5, 1.28) = 1.28; min(-1.5, -1.28) = -1.5; min(0.5, 0.8) = 0.5; min(-0.5, -0.8) = -0.8; mean = -0.13
    pi = logs(0.6, 0.6, 0.2, 0.2).requires_grad_()
    loss, stats = make_loss(PpoClipConfig())(inputs(pi, logs(0.4, 0.4, 0.4, 0.4), [1, -1, 1, -1]))
    assert loss.item() == pytest.approx(0.13, abs=1e-6)
    assert stats["clipped"].tolist() == [1, 0, 0, 1]
    assert stats["clipped_high"].tolist() == [1, 0, 0, 0]
    # d(-w r A)/d log pi = -w r A where not clipped
    torch.testing.assert_close(gradient_of(loss, pi), torch.tensor([0.0, 1.5 / 4, -0.5 / 4, 0.0]))


def test_ppo_clip_bounds_are_asymmetric() -> None:
    pi = logs(0.5, 0.5)
    _, stats = make_loss(PpoClipConfig())(inputs(pi, logs(0.5 / 1.25, 0.5 / 0.78), [1, -1]))
    assert stats["clipped"].tolist() == [0, 1]  # 1.25 < 1.28 passes above, 0.78 < 0.8 is clipped below


def test_decoupled_ppo_equals_the_hand_computed_value() -> None:
    # prox/mu = 0.3/0.2 = 1.5 and 0.6/0.2 = 3 -> 2; pi/prox = 0.36/0.3 = 1.2 and 0.9/0.6 = 1.5 -> 1.28
    # loss = -(1.5 * 1.2 * 1 + 2 * 1.28 * 2) / 2 = -(1.8 + 5.12) / 2 = -3.46
    pi = logs(0.36, 0.9).requires_grad_()
    batch = inputs(pi, logs(0.2, 0.2), [1, 2], proximal=logs(0.3, 0.6))
    loss, stats = make_loss(DecoupledPpoConfig())(batch)
    assert loss.item() == pytest.approx(-3.46, abs=1e-5)
    assert stats["weight_capped"].tolist() == [0, 1]
    torch.testing.assert_close(gradient_of(loss, pi), torch.tensor([-0.9, 0.0]))
    masked, _ = make_loss(DecoupledPpoConfig(over_max="mask"))(batch)
    assert masked.item() == pytest.approx(-0.9, abs=1e-5)


def test_decoupled_ppo_on_fresh_data_is_ppo_clip() -> None:
    pi, mu = logs(0.5, 0.2, 0.7), logs(0.4, 0.4, 0.4)
    decoupled, _ = make_loss(DecoupledPpoConfig())(inputs(pi, mu, [1, -1, 2], proximal=mu))
    clipped, _ = make_loss(PpoClipConfig())(inputs(pi, mu, [1, -1, 2]))
    assert decoupled.item() == pytest.approx(clipped.item(), abs=1e-6)


def test_decoupled_ppo_refuses_to_run_without_proximal() -> None:
    with pytest.raises(ValueError, match="reads the column `proximal`"):
        make_loss(DecoupledPpoConfig())(inputs(logs(0.5), logs(0.5), [1]))


def test_tis_equals_the_hand_computed_value() -> None:
    # weights 0.6/0.4 = 1.5 and 0.9/0.3 = 3 -> 2: loss = -(1.5 * 1 * ln 0.6 + 2 * -1 * ln 0.9) / 2
    pi = logs(0.6, 0.9).requires_grad_()
    loss, stats = make_loss(TisConfig())(inputs(pi, logs(0.4, 0.3), [1, -1]))
    assert loss.item() == pytest.approx(-(1.5 * math.log(0.6) - 2 * math.log(0.9)) / 2, abs=1e-6)
    assert stats["weight_capped"].tolist() == [0, 1]
    torch.testing.assert_close(gradient_of(loss, pi), torch.tensor([-0.75, 1.0]))  # the weight carries no gradient


def test_token_normalization_counts_every_token_alike() -> None:
    weights = token_weights([1, 3], [1.0, 0.5], Normalization.TOKEN)
    assert weights.tolist() == pytest.approx([0.25, 0.125, 0.125, 0.125])


def test_sequence_mean_counts_every_sample_alike() -> None:
    weights = token_weights([1, 4], [1.0, 1.0], Normalization.SEQUENCE_MEAN)
    assert weights.tolist() == pytest.approx([0.5, 0.125, 0.125, 0.125, 0.125])


def test_extreme_ratios_stay_finite() -> None:
    for config in (PpoClipConfig(), TisConfig()):
        pi = torch.tensor([-1.0, -400.0]).requires_grad_()
        loss, _ = make_loss(config)(inputs(pi, torch.tensor([-400.0, -1.0]), [-1, 1]))
        gradient = gradient_of(loss, pi)
        assert torch.isfinite(loss)
        assert torch.isfinite(gradient).all()


def test_a_token_whose_ratio_is_held_counts_as_clipped() -> None:
    """Its gradient is zero, although the clip itself leaves a rising bad token alone."""
    pi = torch.tensor([-1.0, -1.0, -1.0]).requires_grad_()
    loss, stats = make_loss(PpoClipConfig())(inputs(pi, torch.tensor([-1.1, -3.0, -40.0]), [-1, -1, -1]))
    gradient = gradient_of(loss, pi)
    assert (gradient != 0).tolist() == [True, True, False]
    assert stats["clipped"].tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: PpoClipConfig(clip_low=1.0), "clip_low = 1.0"),
        (lambda: PpoClipConfig(clip_high=0.0), "clip_high = 0.0"),
        (lambda: DecoupledPpoConfig(weight_max=0.5), "weight_max = 0.5"),
        (lambda: TisConfig(weight_max=0.5), "weight_max = 0.5"),
        (lambda: UpdateConfig(num_minibatches=0), "num_minibatches = 0"),
    ],
)
def test_loss_config_refuses_values_out_of_range(build: object, message: str) -> None:
    assert callable(build)
    with pytest.raises(ValueError, match=message):
        build()


def test_config_file_picks_a_loss_by_name() -> None:
    config = config_from_dict(UpdateConfig, {"loss": {"name": "decoupled_ppo", "weight_max": 3.0}})
    assert config.loss == DecoupledPpoConfig(weight_max=3.0)
