"""The further loss terms against numbers computed by hand, and their gradients against finite differences."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rollmesh.shared.errors import ConfigError
from rollmesh.trainer.config import LossTermChoice, Normalization
from rollmesh.trainer.losses import LossInputs, LossSum, token_weights

from .gradient_check import check_gradient, loss_of_logits, plugins_of, ragged


def logs(*values: float) -> Tensor:
    return torch.tensor([math.log(v) for v in values], dtype=torch.float64)


def loss_of(name: str, **options: Any) -> LossSum:
    return LossSum([LossTermChoice(name, options)])


def inputs(pi: Tensor, mu: Tensor, advantages: list[float], sample: list[int], **columns: Tensor) -> LossInputs:
    n = len(advantages)
    every = {
        "behavior": mu,
        "advantages": torch.tensor(advantages, dtype=torch.float64),
        "token_weight": torch.full((n,), 1 / n, dtype=torch.float64),
        "sample": torch.tensor(sample),
    }
    return LossInputs(pi, every | columns)


def gradient_of(loss: Tensor, at: Tensor) -> list[float]:
    return [float(g) for g in torch.autograd.grad(loss, at)[0]]


# Policy gradient with importance weights ------------------------------------------------------------------------------

TWO_SAMPLES = [0, 0, 1]
"""Tokens 0 and 1 are of one sample, with the ratios 0.5 and 8: product 4, geometric mean 2. Token 2 is alone, with the
ratio 0.5."""


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({"weight_max": 100.0}, [0.5, 8.0, 0.5]),
        ({"level": "sequence", "weight_max": 100.0}, [4.0, 4.0, 0.5]),
        ({"level": "geometric", "weight_max": 100.0}, [2.0, 2.0, 0.5]),
        ({"weight_max": 3.0}, [0.5, 3.0, 0.5]),
        ({"weight_min": 0.6, "weight_max": 3.0}, [0.6, 3.0, 0.6]),
        ({"weight_max": 3.0, "outside": "mask"}, [0.5, 0.0, 0.5]),
        ({"weight_min": 0.6, "weight_max": 9.0, "outside": "mask"}, [0.0, 8.0, 0.0]),
        ({"level": "sequence", "weight_max": 3.0, "outside": "mask"}, [0.0, 0.0, 0.5]),
        ({"weight_max": 9.0, "reject_level": "token", "reject_min": 0.4, "reject_max": 7.0}, [0.0, 0.0, 0.5]),
        ({"weight_max": 9.0, "reject_level": "sequence", "reject_min": 0.4, "reject_max": 5.0}, [0.5, 8.0, 0.5]),
        ({"weight_max": 9.0, "reject_level": "geometric", "reject_min": 0.6, "reject_max": 2.1}, [0.5, 8.0, 0.0]),
        ({"weight_max": 9.0, "veto_min": 0.4}, [0.5, 8.0, 0.5]),
        ({"weight_max": 9.0, "veto_min": 0.6}, [0.0, 0.0, 0.0]),
        ({"level": "geometric", "weight_min": 1.0, "weight_max": 1.0}, [1.0, 1.0, 1.0]),
        (
            {"weight_max": 9.0, "reject_level": "geometric", "reject_max": 1.5, "reject_only": "negative"},
            [0.5, 8.0, 0.5],
        ),
    ],
)
def test_importance_weights_equal_the_hand_computed_values(options: dict[str, Any], weights: list[float]) -> None:
    """The gradient of -mean(w A log pi) with A = 3 is -w."""
    pi = logs(0.1, 0.8, 0.2).requires_grad_()
    loss, stats = loss_of("policy_gradient", **options)(inputs(pi, logs(0.2, 0.1, 0.4), [3, 3, 3], TWO_SAMPLES))
    assert gradient_of(loss, pi) == pytest.approx([-w for w in weights])
    if "rejected" in stats:
        assert stats["rejected"].tolist() == [float(w == 0) for w in weights]


def test_rejection_of_errors_alone_keeps_the_other_tokens_of_the_sample() -> None:
    """Sample 0 has the geometric mean 2 > 1.5; only its token with A < 0 loses its gradient, -w A / 3."""
    pi = logs(0.1, 0.8, 0.2).requires_grad_()
    options = {"weight_max": 9.0, "reject_level": "geometric", "reject_max": 1.5, "reject_only": "negative"}
    loss, stats = loss_of("policy_gradient", **options)(inputs(pi, logs(0.2, 0.1, 0.4), [3, -3, -3], TWO_SAMPLES))
    assert gradient_of(loss, pi) == pytest.approx([-0.5, 0.0, 0.5])
    assert stats["rejected"].tolist() == [0, 1, 0]


def test_a_veto_finds_a_token_that_the_geometric_mean_hides() -> None:
    """Ratios 1e-5 and 1e5 of one sample have the geometric mean 1; the sample with the ratio 1 stays."""
    pi = logs(1e-5, 0.5, 0.2).requires_grad_()
    made = inputs(pi, logs(1.0, 0.5e-5, 0.2), [3, 3, 3], TWO_SAMPLES, proximal=pi.detach())
    bounds = {"reject_level": "geometric", "reject_min": 0.999, "reject_max": 1.001}
    for veto, weights in ((0.0, [1.0, 1.0, 1.0]), (1e-4, [0.0, 0.0, 1.0])):
        options = {"weight_min": 1.0, "weight_max": 1.0, "veto_min": veto, **bounds}
        loss, _ = loss_of("decoupled_ppo", **options)(made)
        assert gradient_of(loss, pi) == pytest.approx([-w for w in weights])


# Clipped surrogates ---------------------------------------------------------------------------------------------------


def test_dual_clip_stops_a_bad_token_that_has_grown() -> None:
    """Ratios 2, 4 and 4 with A = -1, -1 and 1: 2, then 3 instead of 4, then -1.28."""
    pi = logs(0.2, 0.4, 0.4).requires_grad_()
    made = inputs(pi, logs(0.1, 0.1, 0.1), [-1, -1, 1], [0, 0, 0])
    loss, stats = loss_of("ppo_clip", dual_clip=3.0)(made)
    assert loss.item() == pytest.approx((2 + 3 - 1.28) / 3)
    assert gradient_of(loss, pi) == pytest.approx([2 / 3, 0, 0])
    assert stats["clipped"].tolist() == [0, 1, 1]
    assert loss_of("ppo_clip")(made)[0].item() == pytest.approx((2 + 4 - 1.28) / 3), "off by default"


@pytest.mark.parametrize("term", ["ppo_clip", "decoupled_ppo", "high_entropy"])
def test_a_dual_clip_inside_the_clip_is_rejected(term: str) -> None:
    with pytest.raises(ConfigError, match=r"`dual_clip` must be 0 or > 1 \+ clip_high = 1.28, got 1.1"):
        loss_of(term, dual_clip=1.1)


def test_gspo_clips_whole_samples() -> None:
    """Geometric ratios 2 and 0.5. A = 1: min(2, 1.2) per token of sample 0; A = 1: 0.5 in sample 1, whose token has the
    gradient -0.5/3."""
    pi = logs(0.1, 0.8, 0.2).requires_grad_()
    made = inputs(pi, logs(0.2, 0.1, 0.4), [1, 1, 1], TWO_SAMPLES)
    loss, stats = loss_of("gspo", clip_low=0.2, clip_high=0.2)(made)
    assert loss.item() == pytest.approx(-(1.2 + 1.2 + 0.5) / 3)
    assert gradient_of(loss, pi) == pytest.approx([0, 0, -0.5 / 3])
    assert stats["clipped"].tolist() == [1, 1, 0]


def test_gspo_may_clip_around_the_policy_before_the_update() -> None:
    """As above, with mu and prox exchanged: ratios of `to` alone count."""
    pi = logs(0.1, 0.8, 0.2).requires_grad_()
    made = inputs(pi, pi.detach(), [1, 1, 1], TWO_SAMPLES, proximal=logs(0.2, 0.1, 0.4))
    term = loss_of("gspo", clip_low=0.2, clip_high=0.2, to="proximal")
    assert term.needs == ("proximal",)
    assert term(made)[0].item() == pytest.approx(-(1.2 + 1.2 + 0.5) / 3)
    assert loss_of("gspo").needs == ()


def test_decoupled_ppo_with_geometric_ratios_is_gspo_with_weights() -> None:
    """prox / mu is 2, 2 and 1/2, the last two truncated to 1.5 and 0.8; the sample ratios to prox are 2 and 0.5 as
    above."""
    pi = logs(0.1, 0.8, 0.2).requires_grad_()
    made = inputs(pi, logs(0.1, 0.05, 0.8), [1, 1, 1], TWO_SAMPLES, proximal=logs(0.2, 0.1, 0.4))
    options = {"ratio": "geometric", "clip_low": 0.2, "clip_high": 0.2, "weight_min": 0.8, "weight_max": 1.5}
    loss, stats = loss_of("decoupled_ppo", **options)(made)
    assert loss.item() == pytest.approx(-(1.5 * 1.2 + 1.5 * 1.2 + 0.8 * 0.5) / 3)
    assert gradient_of(loss, pi) == pytest.approx([0, 0, -0.8 * 0.5 / 3])
    assert stats["clipped"].tolist() == [1, 1, 0]


def test_gmpo_equals_the_hand_computed_value() -> None:
    """Ratios 0.5 and 8 in one sample, bounds ln 1.5: with A = 1 the second becomes 1.5, and s = sqrt(0.5 * 1.5); with A
    = -1 the first becomes 1 / 1.5, and s = sqrt(8 / 1.5). Only the token that is not clipped has a gradient, -A s / 3
    for three tokens in all."""
    pi = logs(0.1, 0.8, 0.2).requires_grad_()
    bound = math.log(1.5)
    for advantage, ratio, gradient, clipped in (
        (1, math.sqrt(0.5 * 1.5), [-1, 0], [0, 1, 0]),
        (-1, math.sqrt(8 / 1.5), [0, 1], [1, 0, 0]),
    ):
        made = inputs(pi, logs(0.2, 0.1, 0.2), [advantage, advantage, 0], TWO_SAMPLES)
        loss, stats = loss_of("gmpo", clip_low=bound, clip_high=bound)(made)
        assert loss.item() == pytest.approx(-advantage * 2 * ratio / 3)
        assert gradient_of(loss, pi) == pytest.approx([g * ratio / 3 for g in gradient] + [0])
        assert stats["clipped"].tolist() == clipped


@pytest.mark.row("S032")
def test_a_limit_of_the_log_ratio_bounds_the_loss_before_the_clip() -> None:
    """Log-ratios 1000 and log 900 with A = -1 and the limit log 1000: losses 1000 and 900, and no gradient for the
    first."""
    pi = torch.tensor([-1.0, -1.0], dtype=torch.float64).requires_grad_()
    made = inputs(pi, torch.tensor([-1001.0, -1 - math.log(900)], dtype=torch.float64), [-1, -1], [0, 0])
    loss, stats = loss_of("ppo_clip", log_ratio_max=math.log(1000))(made)
    assert loss.item() == pytest.approx((1000 + 900) / 2)
    assert gradient_of(loss, pi) == pytest.approx([0, 900 / 2])
    assert stats["clipped"].tolist() == [1, 0]


@pytest.mark.parametrize("term", ["ppo_clip", "high_entropy"])
def test_a_limit_of_the_log_ratio_inside_the_clip_is_rejected(term: str) -> None:
    with pytest.raises(ConfigError, match=r"`log_ratio_max` must be > 0.2469, which the clip reaches, got 0.2"):
        loss_of(term, log_ratio_max=0.2)


def test_the_penalty_at_large_covariances_equals_the_hand_computed_value() -> None:
    """A = 1, -1, 0 and log pi = 0, ln 1/4, ln 1/2 with the means 0 and ln 1/2: cov = ln 2, ln 2 and 0, of which a third
    of 3 is one token.

    With mu = pi / 2 everywhere, the first has the loss -2 + 0.5 ln 2 and the others 2 and 0."""
    pi = logs(1.0, 0.25, 0.5).requires_grad_()
    made = inputs(pi, pi.detach() - math.log(2), [1, -1, 0], [0, 0, 1], current=logs(1.0, 0.2500001, 0.5))
    term = loss_of("covariance", share=0.34, coefficient=0.5)
    prepared = term.prepare(made.columns)
    assert prepared["covariance_chosen"].tolist() == [1, 0, 0]
    assert prepared["covariance_value"].tolist() == pytest.approx([math.log(2), math.log(2), 0], abs=1e-6)
    loss, _ = term(LossInputs(pi, {**made.columns, **prepared}))
    assert loss.item() == pytest.approx((-2 + 0.5 * math.log(2) + 2) / 3)
    assert gradient_of(loss, pi) == pytest.approx([(-2 + 0.5) / 3, 2 / 3, 0])


def test_the_draw_of_clip_cov_has_the_share_and_repeats() -> None:
    """About half of 400 tokens are in the band; 40 of these are drawn, the same ones again for the same batch."""
    rng = torch.Generator().manual_seed(0)
    pi, advantages = (torch.randn(400, generator=rng, dtype=torch.float64) for _ in range(2))
    columns = {"current": pi, "behavior": pi, "advantages": advantages}
    term = loss_of("covariance", kind="clip", share=0.1, cov_min=0.0, cov_max=100.0)
    chosen, again = (term.prepare(columns)["covariance_chosen"] for _ in range(2))
    assert int(chosen.sum()) == 40
    assert torch.equal(chosen, again)
    assert (term.prepare(columns)["covariance_value"][chosen == 1] > 0).all()
    with pytest.raises(ConfigError, match=r"`cov_min` must be < cov_max = 5.0, got 6.0"):
        loss_of("covariance", cov_min=6.0)


# Penalties ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "value", "slope"),
    [("k1", math.log(2), 1.0), ("k2", math.log(2) ** 2 / 2, math.log(2)), ("k3", math.log(2) - 0.5, 0.5)],
)
def test_kl_estimates_equal_the_hand_computed_values(kind: str, value: float, slope: float) -> None:
    """pi / q = 2: d = ln 2, and exp(-d) - 1 + d = 0.5 - 1 + ln 2."""
    pi = logs(0.4).requires_grad_()
    loss, stats = loss_of("kl", kind=kind)(inputs(pi, logs(0.1), [1], [0], reference=logs(0.2)))
    assert loss.item() == pytest.approx(value)
    assert stats["kl"].item() == pytest.approx(value)
    assert gradient_of(loss, pi) == pytest.approx([slope])
    through, _ = loss_of("kl", kind=kind, straight_through=True)(inputs(pi, logs(0.1), [1], [0], reference=logs(0.2)))
    assert through.item() == pytest.approx(value)
    assert gradient_of(through, pi) == pytest.approx([math.log(2)])


def test_the_penalty_needs_the_policy_that_it_names() -> None:
    assert loss_of("kl").needs == ("reference",)
    assert loss_of("kl", to="proximal").needs == ("proximal",)
    assert loss_of("kl", to="behavior").needs == ()


def test_the_expected_gradient_of_k1_is_zero_and_that_of_k2_is_that_of_the_divergence() -> None:
    """Exact, over a vocabulary of 5: the expectation under pi of the gradients of the estimates."""
    rng = torch.Generator().manual_seed(0)
    logits, other = (torch.randn(5, generator=rng, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    probabilities = logits.softmax(-1).detach()

    def expected(kind: str) -> Tensor:
        pi, reference = logits.log_softmax(-1), other.log_softmax(-1)
        made = inputs(pi, pi.detach(), [0] * 5, [0] * 5, reference=reference, token_weight=probabilities)
        return torch.autograd.grad(loss_of("kl", kind=kind)(made)[0], logits)[0]

    divergence = (logits.softmax(-1) * (logits.log_softmax(-1) - other.log_softmax(-1))).sum()
    (exact,) = torch.autograd.grad(divergence, logits)
    torch.testing.assert_close(expected("k1"), torch.zeros(5, dtype=torch.float64))
    torch.testing.assert_close(expected("k2"), exact)
    assert (expected("k3") - exact).abs().max() > 0.01


def test_the_entropy_bonus_equals_the_hand_computed_value() -> None:
    """The entropy of (1/2, 1/4, 1/8, 1/8) is 1.75 ln 2; its gradient by logit v is -p_v (ln p_v + H)."""
    batch = ragged(lengths=(1,), vocabulary=4)
    logits = logs(0.5, 0.25, 0.125, 0.125)[None].requires_grad_()
    loss = loss_of_logits(plugins_of(LossTermChoice("entropy")), batch, logits)
    assert loss.item() == pytest.approx(-1.75 * math.log(2))
    expected = [p * (math.log(p) + 1.75 * math.log(2)) for p in (0.5, 0.25, 0.125, 0.125)]
    assert torch.autograd.grad(loss, logits)[0][0].tolist() == pytest.approx(expected)


def test_the_constant_normalizer_gives_every_token_the_same_weight() -> None:
    weights = token_weights([1, 3], [1.0, 0.5], Normalization.CONSTANT, 10)
    assert weights.tolist() == pytest.approx([0.05, 0.025, 0.025, 0.025])


# Gradients ------------------------------------------------------------------------------------------------------------

DIFFERENTIABLE = [
    LossTermChoice("ppo_clip"),
    LossTermChoice("ppo_clip", {"dual_clip": 1.5}),
    LossTermChoice("ppo_clip", {"log_ratio_max": 0.3}),
    LossTermChoice("decoupled_ppo", {"reject_level": "geometric", "reject_min": 0.95, "veto_min": 0.1}),
    LossTermChoice("decoupled_ppo", {"level": "sequence", "weight_max": 1.5}),
    LossTermChoice("kl", {"kind": "k1"}),
    LossTermChoice("kl", {"kind": "k2", "to": "proximal"}),
    LossTermChoice("kl", {"kind": "k3", "corrected": True}),
    LossTermChoice("entropy"),
    LossTermChoice("covariance", {"kind": "kl", "share": 0.3}),
    LossTermChoice("covariance", {"kind": "clip", "share": 0.5, "cov_min": 0.0, "clip_low": 0.3, "clip_high": 0.3}),
]
WITH_CONSTANTS = [
    LossTermChoice("policy_gradient", {"level": "geometric"}),
    LossTermChoice("policy_gradient", {"reject_level": "sequence"}),
    LossTermChoice("policy_gradient", {"reject_level": "geometric", "reject_min": 1.0, "reject_only": "negative"}),
    LossTermChoice("gspo", {"clip_low": 0.3, "clip_high": 0.3}),
    LossTermChoice("gspo", {"clip_low": 0.3, "clip_high": 0.3, "to": "proximal"}),
    LossTermChoice("decoupled_ppo", {"ratio": "geometric", "weight_max": 1.5}),
    LossTermChoice("gmpo", {"clip_low": 0.2, "clip_high": 0.2}),
    LossTermChoice("kl", {"kind": "k3", "straight_through": True}),
]
"""Terms that treat a function of the policy as a constant."""


@pytest.mark.parametrize("term", DIFFERENTIABLE, ids=str)
def test_gradients_equal_finite_differences(term: LossTermChoice) -> None:
    assert check_gradient(plugins_of(term), ragged()).abs().max() > 1e-3


@pytest.mark.parametrize("term", WITH_CONSTANTS, ids=str)
def test_gradients_with_constants_equal_finite_differences(term: LossTermChoice) -> None:
    assert check_gradient(plugins_of(term), ragged(), frozen=True).abs().max() > 1e-3
    with pytest.raises(AssertionError):
        check_gradient(plugins_of(term), ragged())
