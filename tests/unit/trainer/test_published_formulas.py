"""The loss terms against the published formulas of TRL, verl, AReaL and KernelGYM: values and gradients, on random
ragged batches.

The formulas are stated here in plain torch over padded [B, T] tensors with a mask m, as those libraries compute them,
and were compared with these files. tests/peers compares with TRL 1.16.0 itself, the installed library.

- TRL: huggingface/trl f2cd577 (2026-07-24), trl/trainer/grpo_trainer.py, `GRPOTrainer._compute_loss`,
  `GRPOTrainer._generate_and_score_completions` (sampler correction), `GRPOTrainer.get_off_policy_mask`
- verl: volcengine/verl b178a3c (2026-01-29), verl/trainer/ppo/core_algos.py, `agg_loss`, `compute_policy_loss_vanilla`,
  `_gspo`, `_geo_mean`, `_cispo`, `_kl_cov`, `_clip_cov`, `_reinforce`, `_bypass_mode`, `kl_penalty`;
  verl/trainer/ppo/rollout_corr_helper.py; verl/trainer/ppo/ray_trainer.py, `apply_kl_penalty`
- AReaL: inclusionAI/AReaL 4aef98d (2026-05-21), areal/utils/functional/functional.py, `ppo_actor_loss_fn`,
  `apply_rejection_sampling`
- KernelGYM: hkust-nlp/KernelGYM 3a84417 (2026-02-07), drkernel/verl_patch/trainer/code/ppo/mismatch_helper.py

Of these libraries, verl and AReaL call the policy before the update `old` or `proximal`, and the sampler `rollout` or
`behave`. TRL calls them `old` and `sampling`. Here they are `proximal` and `mu`. Each test says where a definition
differs from that of the term.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rollmesh.mesh.config import MeshConfig
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.trainer.config import LossTermChoice, Normalization
from rollmesh.trainer.estimators import make_estimator
from rollmesh.trainer.losses import LossInputs, LossSum, token_weights

from .builders import group, member

SEEDS = range(3)
HORIZON = 12
"""Padded length T."""
LONGEST = 20
"""Longest possible response, in tokens, for averages over a constant."""


@dataclass(frozen=True)
class Padded:
    """Log-probs, advantages and mask [B, T] of B responses."""

    policy: Tensor
    mu: Tensor
    """Log-probs of the sampler."""
    proximal: Tensor
    reference: Tensor
    advantages: Tensor
    mask: Tensor

    @property
    def counts(self) -> Tensor:
        """[B, 1]"""
        return self.mask.sum(-1, keepdim=True)

    def rows(self, *indices: int) -> "Padded":
        """Return some of the responses."""
        return Padded(*(getattr(self, name)[list(indices)] for name in self.__dataclass_fields__))


def padded(seed: int, *, per_token: bool = False, spread: float = 0.5) -> Padded:
    """Return 6 responses of 1 to 12 tokens. `spread` is the standard deviation of log-ratios."""
    rng = torch.Generator().manual_seed(seed)
    policy = -3 * torch.rand(6, HORIZON, generator=rng, dtype=torch.float64)

    def near() -> Tensor:
        return policy.detach() + spread * torch.randn(6, HORIZON, generator=rng, dtype=torch.float64)

    lengths = torch.randint(1, HORIZON + 1, (6,), generator=rng)
    advantages = torch.randn(6, HORIZON if per_token else 1, generator=rng, dtype=torch.float64).expand(6, HORIZON)
    mask = (torch.arange(HORIZON) < lengths[:, None]).double()
    return Padded(policy.requires_grad_(), near(), near(), near(), advantages, mask)


def token_mean(values: Tensor, mask: Tensor) -> Tensor:
    """`dapo` and `cispo` of TRL, `token-mean` of verl, and AReaL: the sum over all tokens of the step divided by their
    number."""
    return (values * mask).sum() / mask.sum()


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """`grpo` of TRL, `seq-mean-token-mean` of verl."""
    return ((values * mask).sum(-1) / mask.sum(-1)).mean()


def constant_sum(values: Tensor, mask: Tensor) -> Tensor:
    """`dr_grpo` of TRL with completions of at most `LONGEST` tokens."""
    return (values * mask).sum() / (len(mask) * LONGEST)


AVERAGES = {
    Normalization.TOKEN: token_mean,
    Normalization.SEQUENCE_MEAN: sequence_mean,
    Normalization.CONSTANT: constant_sum,
}


def ours(
    batch: Padded, *terms: LossTermChoice, normalization: Normalization = Normalization.TOKEN, constant: int = LONGEST
) -> Tensor:
    """Return the loss of the terms on the flat tokens of the batch."""
    chosen = batch.mask.bool()
    lengths = chosen.sum(-1).tolist()
    columns = {
        "behavior": batch.mu[chosen],
        "proximal": batch.proximal[chosen],
        "reference": batch.reference[chosen],
        "current": batch.policy[chosen].detach(),
        "advantages": batch.advantages[chosen],
        "token_weight": token_weights(lengths, [1.0] * len(lengths), normalization, constant).double(),
        "sample": torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
    }
    loss = LossSum(terms)
    columns |= loss.prepare(columns)
    return loss(LossInputs(batch.policy[chosen], columns))[0]


def assert_same(batch: Padded, found: Tensor, expected: Tensor) -> None:
    """Assert equal values, and equal gradients by the log-probs of the policy."""
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    gradients = [torch.autograd.grad(value, batch.policy, retain_graph=True)[0] for value in (found, expected)]
    assert gradients[1].abs().max() > 0
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-7)


def compare(
    batch: Padded,
    formula: Callable[[Padded], Tensor],
    *terms: LossTermChoice,
    normalization: Normalization = Normalization.TOKEN,
) -> None:
    assert_same(batch, ours(batch, *terms, normalization=normalization), formula(batch))


def clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """PPO's loss per token, as a maximum of losses."""
    return torch.maximum(-advantages * ratio, -advantages * torch.clamp(ratio, 1 - low, 1 + high))


def geometric_ratio(b: Padded, other: Tensor) -> Tensor:
    """The ratio of whole sequences [B, 1], per token of the sequence."""
    return torch.exp(((b.policy - other) * b.mask).sum(-1, keepdim=True) / b.counts)


# Averages -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "normalization", "constant", "factor"),
    [
        ("token-mean", Normalization.TOKEN, 1, 1.0),
        ("seq-mean-token-mean", Normalization.SEQUENCE_MEAN, 1, 1.0),
        ("seq-mean-token-sum", Normalization.CONSTANT, 1, 1.0),
        ("seq-mean-token-sum-norm", Normalization.CONSTANT, LONGEST, 6.0),
    ],
)
def test_averages_of_verl(mode: str, normalization: Normalization, constant: int, factor: float) -> None:
    """`agg_loss`. `seq-mean-token-sum-norm` divides the sum by a length and not by the number of sequences, in spite of
    its name, so that it is ours times the number of samples, 6. All of verl's counts are of the optimizer step, as ours
    are."""
    b = padded(0)
    values = (-b.advantages * torch.exp(b.policy - b.mu)) * b.mask
    per_sequence = values.sum(-1)
    expected = {
        "token-mean": values.sum() / b.mask.sum(),
        "seq-mean-token-mean": (per_sequence / b.mask.sum(-1)).mean(),
        "seq-mean-token-sum": per_sequence.mean(),
        "seq-mean-token-sum-norm": per_sequence.sum() / LONGEST,
    }[mode]
    wide = LossTermChoice("ppo_clip", {"clip_low": 0.999, "clip_high": 1e6})
    assert_same(b, factor * ours(b, wide, normalization=normalization, constant=constant), expected)


def test_averages_of_trl_over_micro_batches() -> None:
    """`dapo` divides by the tokens of the optimizer step, as ours does. If a generated batch has several steps, TRL
    1.16 divides by the mean number of their tokens (tests/peers). `bnpo` divides by those of each micro-batch and then
    averages the micro-batches, so that it equals ours for one micro-batch only; `grpo` is the same for sequences, if
    micro-batches have equal numbers."""
    b = padded(0)
    term = LossTermChoice("ppo_clip", {"clip_low": 0.2, "clip_high": 0.28})

    def losses(part: Padded) -> Tensor:
        return clipped(torch.exp(part.policy - part.mu), part.advantages, 0.2, 0.28) * part.mask

    halves = [b.rows(0, 1, 2), b.rows(3, 4, 5)]
    assert len({float(half.mask.sum()) for half in halves}) == 2
    dapo = torch.stack([losses(half).sum() / b.mask.sum() for half in halves]).sum()
    assert_same(b, ours(b, term), dapo)
    bnpo = torch.stack([losses(half).sum() / half.mask.sum() for half in halves]).mean()
    assert (ours(b, term) - bnpo).abs() > 1e-4
    assert_same(b, ours(b, term), losses(b).sum() / b.mask.sum())
    grpo = torch.stack([sequence_mean(losses(half), half.mask) for half in halves]).mean()
    assert_same(b, ours(b, term, normalization=Normalization.SEQUENCE_MEAN), grpo)


def test_dr_grpo_has_both_halves() -> None:
    """Dr. GRPO (arXiv:2503.20783), TRL's `scale_rewards: none` with `loss_type: dr_grpo`: rewards minus the mean of
    their group, without a deviation, and the sum over tokens divided by sequences x the longest completion. The recipe
    sets both, with 1024 tokens."""
    learner = config_from_dict(MeshConfig, {"recipe": "dr_grpo", "learner": {"normalization_tokens": LONGEST}}).learner
    assert config_from_dict(MeshConfig, {"recipe": "dr_grpo"}).learner.normalization_tokens == 1024
    rewards = [1.0, 0.0, 0.0, 0.25, 0.0, 0.0]
    found = make_estimator(learner.estimator).of_group(
        group("g", *(member(f"s{n}", {"r": r}) for n, r in enumerate(rewards)))
    )
    b = padded(0)
    advantages = torch.tensor([found[f"s{n}"] for n in range(6)], dtype=torch.float64)[:, None].expand(6, HORIZON)
    centered = torch.tensor(rewards, dtype=torch.float64) - sum(rewards) / 6
    losses = clipped(torch.exp(b.policy - b.mu), centered[:, None], 0.2, 0.28)
    b = replace(b, advantages=advantages)
    loss = ours(b, *learner.loss, normalization=learner.normalization, constant=learner.normalization_tokens)
    assert_same(b, loss, (losses * b.mask).sum() / (6 * LONGEST))


# Clipped surrogates ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalization", list(AVERAGES))
@pytest.mark.parametrize("seed", SEEDS)
def test_clipped_surrogate_with_kl_penalty_of_trl(seed: int, normalization: Normalization) -> None:
    """`loss_type` grpo, dapo and dr_grpo: the clipped loss plus beta times k3 to the reference.

    TRL's ratio is against the policy before the update, or, without a sampler correction, the sampler; ours is against
    the sampler.
    """

    def formula(b: Padded) -> Tensor:
        losses = clipped(torch.exp(b.policy - b.mu), b.advantages, 0.2, 0.28)
        kl = torch.exp(b.reference - b.policy) - (b.reference - b.policy) - 1
        return AVERAGES[normalization](losses + 0.04 * kl, b.mask)

    terms = (
        LossTermChoice("ppo_clip", {"clip_low": 0.2, "clip_high": 0.28}),
        LossTermChoice("kl", {"kind": "k3"}, weight=0.04),
    )
    compare(padded(seed), formula, *terms, normalization=normalization)


@pytest.mark.parametrize("seed", SEEDS)
def test_two_sided_clip_of_trl(seed: int) -> None:
    """`delta`: the unclipped ratio is at most delta, for advantages of both signs. With delta > 1 + clip_high this is a
    dual clip."""

    def formula(b: Padded) -> Tensor:
        ratio = torch.exp(b.policy - b.mu)
        most = ratio.clamp(max=1.5)
        assert bool(((ratio != most) & (b.advantages < 0) & b.mask.bool()).any())
        return token_mean(-torch.minimum(most * b.advantages, ratio.clamp(0.8, 1.28) * b.advantages), b.mask)

    compare(padded(seed, spread=1.0), formula, LossTermChoice("ppo_clip", {"dual_clip": 1.5}))


@pytest.mark.parametrize("seed", SEEDS)
def test_dual_clip_of_verl(seed: int) -> None:
    """`compute_policy_loss_vanilla`: for A < 0 the loss is at most -c A. Its default is c = 3; ours does not clip
    twice."""

    def formula(b: Padded) -> Tensor:
        once = clipped(torch.exp(torch.clamp(b.policy - b.mu, -20, 20)), b.advantages, 0.2, 0.2)
        twice = torch.where(b.advantages < 0, torch.min(-b.advantages * 1.5, once), once)
        assert bool(((once != twice) & b.mask.bool()).any())
        return token_mean(twice, b.mask)

    term = LossTermChoice("ppo_clip", {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 1.5})
    compare(padded(seed, spread=1.0), formula, term)


@pytest.mark.parametrize("to", ["behavior", "proximal"])
@pytest.mark.parametrize("normalization", [Normalization.TOKEN, Normalization.SEQUENCE_MEAN])
@pytest.mark.parametrize("seed", SEEDS)
def test_gspo_of_trl(seed: int, normalization: Normalization, to: str) -> None:
    """`importance_sampling_level: sequence`: the gradient passes through the ratio of the sequence, whose loss counts
    at each token."""

    def formula(b: Padded) -> Tensor:
        ratio = geometric_ratio(b, b.mu if to == "behavior" else b.proximal)
        return AVERAGES[normalization](clipped(ratio.expand_as(b.mask), b.advantages, 0.1, 0.15), b.mask)

    term = LossTermChoice("gspo", {"clip_low": 0.1, "clip_high": 0.15, "to": to})
    compare(padded(seed), formula, term, normalization=normalization)


@pytest.mark.parametrize("to", ["behavior", "proximal"])
@pytest.mark.parametrize("seed", SEEDS)
def test_two_sided_clip_of_sequences_of_trl(seed: int, to: str) -> None:
    """`importance_sampling_level: sequence` with `delta`: the unclipped ratio of the sequence is at most delta. Here
    errors have the ratios exp(0.5), beyond delta, and exp(0.1), within it."""
    b = padded(seed)
    for row, drift in ((0, 0.5), (1, 0.1)):
        for other in (b.mu, b.proximal):
            other[row] = b.policy[row].detach() - drift
    advantages = b.advantages.clone()
    advantages[:2] = -1.0

    def formula(b: Padded) -> Tensor:
        ratio = geometric_ratio(b, b.mu if to == "behavior" else b.proximal).expand_as(b.mask)
        most = ratio.clamp(max=1.4)
        assert bool(((ratio != most) & b.mask.bool())[0].any())
        return sequence_mean(-torch.minimum(most * b.advantages, ratio.clamp(0.8, 1.3) * b.advantages), b.mask)

    term = LossTermChoice("gspo", {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 1.4, "to": to})
    compare(replace(b, advantages=advantages), formula, term, normalization=Normalization.SEQUENCE_MEAN)


@pytest.mark.parametrize("seed", SEEDS)
def test_gspo_per_token_of_verl(seed: int) -> None:
    """`compute_policy_loss_gspo`: sg[s] pi / sg[pi], with an advantage per token, always averaged over sequences."""

    def formula(b: Padded) -> Tensor:
        log_ratio = b.policy - b.policy.detach() + torch.log(geometric_ratio(b, b.mu)).detach()
        losses = clipped(torch.exp(torch.clamp(log_ratio, max=10.0)), b.advantages, 0.1, 0.15)
        return sequence_mean(losses, b.mask)

    term = LossTermChoice("gspo", {"clip_low": 0.1, "clip_high": 0.15})
    batch = padded(seed, per_token=True)
    compare(batch, formula, term, normalization=Normalization.SEQUENCE_MEAN)


@pytest.mark.parametrize("to", ["behavior", "proximal"])
@pytest.mark.parametrize("seed", SEEDS)
def test_gmpo_of_verl(seed: int, to: str) -> None:
    """`compute_policy_loss_geo_mean`: one loss per sequence, from the mean of log-ratios that are clipped on the side
    of the advantage."""

    def formula(b: Padded) -> Tensor:
        log_ratio = b.policy - (b.mu if to == "behavior" else b.proximal)
        sign = torch.sign(b.advantages)
        least = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-0.3, 0.4))
        assert bool(((least != log_ratio) & b.mask.bool()).any())
        ratio = torch.exp((least * b.mask).sum(-1) / b.mask.sum(-1))
        return (-b.advantages[:, 0] * ratio).mean()

    term = LossTermChoice("gmpo", {"clip_low": 0.3, "clip_high": 0.4, "to": to})
    compare(padded(seed), formula, term, normalization=Normalization.SEQUENCE_MEAN)


def covariance(b: Padded) -> Tensor:
    """The product of the deviations of advantage and log-prob from their means over all tokens, [B, T]; -inf at
    padding."""
    means = [(v * b.mask).sum() / b.mask.sum() for v in (b.advantages, b.policy.detach())]
    value = (b.advantages - means[0]) * (b.policy.detach() - means[1])
    return value.masked_fill(b.mask == 0, -torch.inf)


@pytest.mark.parametrize("seed", SEEDS)
def test_kl_cov_of_verl(seed: int) -> None:
    """`compute_policy_loss_kl_cov`: no clip, and the penalty |log r| at the share of the tokens with the largest
    covariance."""

    def formula(b: Padded) -> Tensor:
        value = covariance(b)
        least = value[b.mask.bool()].sort(descending=True).values[int(0.2 * float(b.mask.sum())) - 1]
        log_ratio = b.policy - b.mu
        return token_mean(-b.advantages * log_ratio.exp() + 0.7 * (value >= least) * log_ratio.abs(), b.mask)

    compare(padded(seed), formula, LossTermChoice("covariance", {"kind": "kl", "share": 0.2, "coefficient": 0.7}))


@pytest.mark.parametrize("seed", SEEDS)
def test_clip_cov_of_verl(seed: int) -> None:
    """`compute_policy_loss_clip_cov`: tokens in a band of covariance that the clip spares have no loss. All in the band
    are drawn here."""

    def formula(b: Padded) -> Tensor:
        ratio = torch.exp(b.policy - b.mu)
        losses = clipped(ratio, b.advantages, 0.2, 0.28)
        spared = losses.detach() <= -(b.advantages * ratio).detach()
        value = covariance(b)
        drawn = (value > 0.1) & (value < 1.0) & spared
        assert drawn.any()
        return token_mean(losses * ~drawn, b.mask)

    options = {"kind": "clip", "share": 1.0, "cov_min": 0.1, "cov_max": 1.0}
    compare(padded(seed), formula, LossTermChoice("covariance", options))


# Policy gradient ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.5), (0.8, 1.2)])
@pytest.mark.parametrize("seed", SEEDS)
def test_cispo_of_trl_and_verl(seed: int, low: float, high: float) -> None:
    """TRL's `loss_type: cispo` limits the detached ratio to `epsilon_high`, verl's `compute_policy_loss_cispo` to [1 -
    low, 1 + high]."""

    def formula(b: Padded) -> Tensor:
        weight = torch.clamp(torch.exp(b.policy - b.mu), low, high).detach()
        return token_mean(-weight * b.advantages * b.policy, b.mask)

    compare(padded(seed), formula, LossTermChoice("policy_gradient", {"weight_min": low, "weight_max": high}))


@pytest.mark.parametrize("seed", SEEDS)
def test_off_policy_mask_of_trl(seed: int) -> None:
    """`off_policy_mask_threshold` (DeepSeek-V3.2): a sequence with A < 0 has no loss if the mean of log mu - log pi
    exceeds the threshold."""
    delta = 0.05

    def formula(b: Padded) -> Tensor:
        divergence = ((b.mu - b.policy.detach()) * b.mask).sum(-1, keepdim=True) / b.counts
        keep = (b.advantages >= 0) | (divergence <= delta)
        assert keep.any()
        assert not keep.all()
        weight = torch.exp(b.policy - b.mu).clamp(max=2.0).detach()
        return token_mean(-weight * b.advantages * b.policy * keep, b.mask)

    least = float(torch.exp(torch.tensor(-delta, dtype=torch.float64)))
    options = {"reject_level": "geometric", "reject_min": least, "reject_max": 1e9, "reject_only": "negative"}
    compare(padded(seed, spread=1.0), formula, LossTermChoice("policy_gradient", options))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("seed", SEEDS)
def test_topr_of_the_paper_and_of_roll(seed: int, level: str) -> None:
    """Equation 8 of the paper: the weight 1 for a positive sequence, and the ratio of the sequence limited to [0, 1]
    for a negative one. ROLL's `_compute_topr_loss` (8eb27cc) has the ratio of each token."""

    def formula(b: Padded) -> Tensor:
        log_ratio = (b.policy - b.mu) * b.mask
        ratio = torch.exp(log_ratio if level == "token" else log_ratio.sum(-1, keepdim=True).expand_as(b.mask))
        tapered = torch.clamp(ratio, min=0.0, max=1.0).detach()
        assert bool(((tapered != ratio) & (b.advantages < 0) & b.mask.bool()).any())
        assert bool(((tapered == ratio) & (b.advantages < 0) & b.mask.bool()).any())
        positive = -b.advantages * b.policy * (b.advantages >= 0)
        negative = -tapered * b.advantages * b.policy * (b.advantages < 0)
        return constant_sum(positive + negative, b.mask)

    b = padded(seed)
    signs = torch.tensor([1.0, -1, -1, 1, -1, -1], dtype=torch.float64)[:, None].expand(6, HORIZON)
    b = replace(b, advantages=b.advantages.abs() * signs)
    for row, drift in ((1, 0.3), (2, -0.3)):
        b.mu[row] = b.policy[row].detach() - drift
    compare(b, formula, LossTermChoice("topr", {"level": level}), normalization=Normalization.CONSTANT)


def binary_kl(b: Padded) -> Tensor:
    pi, mu = b.policy.exp(), b.mu.exp()
    return mu * (b.mu - b.policy) + (1 - mu) * torch.log((1.0 - mu + 1e-8) / (1.0 - pi + 1e-8))


@pytest.mark.parametrize("divergence", ["tv", "kl"])
@pytest.mark.parametrize("seed", SEEDS)
def test_dppo_of_verl(seed: int, divergence: str) -> None:
    """`compute_policy_loss_dppo_tv` and `_dppo_kl` (1dda039): valid is what does not leave the region in the direction
    of the advantage. A weight above 1.6 is truncated."""
    low, high = (0.05, 0.08) if divergence == "tv" else (0.02, 0.03)

    def formula(b: Padded) -> Tensor:
        ratio = torch.exp(torch.clamp(b.policy - b.mu, -20, 20))
        pi, mu = b.policy.exp(), b.mu.exp()
        if divergence == "tv":
            positive, negative = (pi - mu) <= high, (pi - mu) >= -low
        else:
            positive, negative = (binary_kl(b) <= high) | (pi <= mu), (binary_kl(b) <= low) | (pi >= mu)
        valid = torch.where(b.advantages > 0, positive, negative)
        for sign in (b.advantages > 0, b.advantages < 0):
            assert 0 < int((valid & sign & b.mask.bool()).sum()) < int((sign & b.mask.bool()).sum())
        weight = ratio.clamp(max=1.6).detach()
        assert bool(((weight != ratio) & valid & b.mask.bool()).any())
        return token_mean(-b.advantages * weight * b.policy * valid.detach().double(), b.mask)

    term = LossTermChoice("dppo", {"divergence": divergence, "low": low, "high": high, "weight_max": 1.6})
    b = padded(seed, per_token=True)
    mu = torch.minimum(b.mu, torch.tensor(-0.05, dtype=torch.float64))
    compare(replace(b, mu=mu), formula, term)


BOUNDS = (0.6, 1.6)
REJECTION_SPREADS = {"token_k1": 0.5, "seq_sum_k1": 0.3, "seq_mean_k1": 1.5}
"""Spreads of the log-ratios at which some of the tokens or sequences are inside the bounds."""


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("token_k1", {"outside": "mask", "weight_min": BOUNDS[0], "weight_max": BOUNDS[1]}),
        ("seq_sum_k1", {"reject_level": "sequence", "reject_min": BOUNDS[0], "reject_max": BOUNDS[1]}),
        ("seq_mean_k1", {"reject_level": "geometric", "reject_min": BOUNDS[0], "reject_max": BOUNDS[1]}),
    ],
)
def test_rejection_of_verl(mode: str, options: dict[str, Any]) -> None:
    """`rollout_rs` with `loss_type: reinforce`: truncated weights times -A log pi, over the tokens that remain.

    Three differences. verl bounds mu / pi, so that its thresholds are the inverse of ours. It divides by the remaining
    tokens, ours by all of them. `token_k1` removes tokens, which is `outside: mask` here; `reject_level: token` removes
    the sample of such a token. verl also rejects by k2 and k3, and by their maximum over a sequence, which is not
    implemented here.
    """
    b = padded(0, spread=REJECTION_SPREADS[mode])
    log_inverse = (b.mu - b.policy).detach()
    of_mode = {
        "token_k1": log_inverse,
        "seq_sum_k1": (log_inverse * b.mask).sum(-1, keepdim=True),
        "seq_mean_k1": (log_inverse * b.mask).sum(-1, keepdim=True) / b.counts,
    }[mode]
    low, high = (torch.tensor(1 / bound, dtype=torch.float64).log() for bound in reversed(BOUNDS))
    kept = b.mask * ((of_mode >= low) & (of_mode <= high))
    assert 0 < float(kept.sum()) < float(b.mask.sum())
    weight = torch.exp(b.policy - b.mu).clamp(max=2.0).detach()
    expected = (-weight * b.advantages * b.policy * kept).sum() / kept.sum()
    term = LossTermChoice("policy_gradient", options)
    assert_same(b, ours(b, term) * float(b.mask.sum() / kept.sum()), expected)


@pytest.mark.parametrize("veto", [1e-4, 0.0])
def test_geometric_rejection_with_a_token_veto_of_kernelgym(veto: float) -> None:
    """A sequence is removed if the geometric mean of prox / mu leaves [0.999, 1.001], or if a token has a ratio below
    1e-4. There is no weight, and the clipped loss is around prox. The average is over the remaining sequences, ours is
    over all of them."""
    b = padded(0)
    small = 0.004 * torch.randn(b.mask.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    longest = int(b.mask.sum(-1).argmax())
    small[longest] = 0.0
    small[longest, :2] = torch.tensor(
        [-9.5, 9.5]
    )  # ratios of 7e-5 and its inverse: the geometric mean does not see them
    b = replace(b, mu=b.proximal - small)
    log_ratio = (b.proximal - b.mu) * b.mask
    mean = torch.exp(log_ratio.sum(-1) / b.mask.sum(-1))
    kept = (mean >= 0.999) & (mean <= 1.001)
    assert kept[longest]
    assert not kept.all()
    if veto:
        kept = kept & ~((log_ratio < torch.log(torch.tensor(veto))) & b.mask.bool()).any(-1)
        assert not kept[longest]
    losses = clipped(torch.exp(b.policy - b.proximal), b.advantages, 0.2, 0.28) * b.mask
    expected = (losses.sum(-1) * kept).sum() / kept.sum()
    options = {"weight_min": 1.0, "weight_max": 1.0, "clip_low": 0.2, "clip_high": 0.28, "veto_min": veto}
    term = LossTermChoice(
        "decoupled_ppo", options | {"reject_level": "geometric", "reject_min": 0.999, "reject_max": 1.001}
    )
    found = ours(b, term, normalization=Normalization.CONSTANT, constant=1)
    assert_same(b, found * float(len(kept) / kept.sum()), expected)


# Decoupled losses: corrections of the sampler -------------------------------------------------------------------------

CORRECTION = {"clip_low": 0.2, "clip_high": 0.28}


def sampler_weight(b: Padded, level: str) -> Tensor:
    """The ratio of the policy before the update to the sampler, at a level."""
    log_ratio = (b.proximal - b.mu) * b.mask
    if level == "token":
        return torch.exp(log_ratio)
    total = log_ratio.sum(-1, keepdim=True)
    return torch.exp(total if level == "sequence" else total / b.counts).expand_as(log_ratio)


@pytest.mark.parametrize("bounds", [(0.0, 1.2), (0.7, 1.2)])
@pytest.mark.parametrize(
    ("ratio", "mode"),
    [
        ("token", "token_truncate"),
        ("token", "token_mask"),
        ("token", "sequence_truncate"),
        ("token", "sequence_mask"),
        ("geometric", "sequence_truncate"),
        ("geometric", "sequence_mask"),
    ],
)
@pytest.mark.parametrize("seed", SEEDS)
def test_sampler_correction_of_trl(seed: int, ratio: str, mode: str, bounds: tuple[float, float]) -> None:
    """`vllm_importance_sampling_mode` with its two bounds; the sequence weight is the product of the ratios, not their
    geometric mean.

    The clip is that of tokens, or of sequences (`importance_sampling_level`). Masked tokens stay in the average. The KL
    penalty has no weight. With the clip of sequences and weights of tokens, the value equals ours, but TRL
    differentiates the ratio of the sequence, so that every token has the mean weight of its sequence, while ours and
    verl's have its weight.
    """
    level, outside = mode.split("_")
    low, high = bounds

    def formula(b: Padded) -> Tensor:
        weight = sampler_weight(b, level)
        inside = (weight >= low) & (weight <= high)
        assert not inside[b.mask.bool()].all()
        weight = weight.clamp(low, high) if outside == "truncate" else weight * inside
        of_token, of_sequence = torch.exp(b.policy - b.proximal), geometric_ratio(b, b.proximal).expand_as(b.mask)
        losses = clipped(of_token if ratio == "token" else of_sequence, b.advantages, 0.2, 0.28) * weight
        kl = torch.exp(b.reference - b.policy) - (b.reference - b.policy) - 1
        return token_mean(losses + 0.04 * kl, b.mask)

    options = {"level": level, "weight_min": low, "weight_max": high, "outside": outside, "ratio": ratio}
    compare(
        padded(seed), formula, LossTermChoice("decoupled_ppo", CORRECTION | options), LossTermChoice("kl", weight=0.04)
    )


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("ratio", ["token", "geometric"])
@pytest.mark.parametrize("seed", SEEDS)
def test_rollout_correction_of_verl(seed: int, ratio: str, level: str) -> None:
    """`rollout_is` of prox / mu at `rollout_is_threshold`: truncated above only, and multiplied to the loss of
    `vanilla` with its dual clip, or to that of `gspo`, which has none.

    verl can divide the weights by their mean over the batch (`rollout_is_batch_normalize`, off by default), which we do
    not.
    """

    def formula(b: Padded) -> Tensor:
        if ratio == "token":
            losses = clipped(torch.exp(b.policy - b.proximal), b.advantages, 0.2, 0.28)
            losses = torch.where(b.advantages < 0, torch.min(-3.0 * b.advantages, losses), losses)
        else:
            log_ratio = b.policy - b.policy.detach() + torch.log(geometric_ratio(b, b.proximal)).detach()
            losses = clipped(torch.exp(log_ratio), b.advantages, 0.2, 0.28)
        return sequence_mean(losses * sampler_weight(b, level).clamp(max=2.0), b.mask)

    options: dict[str, Any] = {"level": level, "weight_max": 2.0, "dual_clip": 3.0 * (ratio == "token"), "ratio": ratio}
    term = LossTermChoice("decoupled_ppo", CORRECTION | options)
    compare(padded(seed, spread=0.8), formula, term, normalization=Normalization.SEQUENCE_MEAN)


AREAL = [("token", (0.0, 1.4)), ("token", (0.6, 1.4)), ("geometric", (0.9, 1.1))]


@pytest.mark.parametrize("action", ["mask", "clamp"])
@pytest.mark.parametrize(("level", "bounds"), AREAL)
@pytest.mark.parametrize("seed", SEEDS)
def test_decoupled_ppo_of_areal(seed: int, level: str, bounds: tuple[float, float], action: str) -> None:
    """`ppo_actor_loss_fn` with `RejectionSamplingConfig(metric="ratio", agg="mean")`: clip and dual clip around prox,
    times a weight that is masked or clamped to its bounds. The weight of a sequence is the geometric mean. The
    denominator counts masked tokens, as ours does. The former `behave_imp_weight_cap` is the case of tokens, `mask`,
    and an upper bound."""
    low, high = bounds

    def formula(b: Padded) -> Tensor:
        losses = clipped(torch.exp(b.policy - b.proximal), b.advantages, 0.2, 0.28)
        losses = torch.min(losses, torch.sign(b.advantages) * 1.5 * b.advantages)
        weight = sampler_weight(b, level)
        inside = (weight >= low) & (weight <= high)
        assert not inside[b.mask.bool()].all()
        weight = weight * inside if action == "mask" else weight.clamp(low, high)
        return token_mean(losses * weight, b.mask)

    outside = "mask" if action == "mask" else "truncate"
    chosen = {"level": level, "weight_min": low, "weight_max": high, "outside": outside, "dual_clip": 1.5}
    compare(padded(seed), formula, LossTermChoice("decoupled_ppo", CORRECTION | chosen))


@pytest.mark.parametrize(
    ("agg", "reject"),
    [
        ("sum", {"reject_level": "sequence", "reject_min": 0.4, "reject_max": 2.5}),
        ("max", {"reject_level": "token", "reject_min": 0.0, "reject_max": 2.5}),
    ],
)
def test_rejection_of_areal_by_the_product_and_by_the_largest_ratio(agg: str, reject: dict[str, Any]) -> None:
    """`level: sequence` with `agg` sum or max: the weight is still the geometric mean, and the other quantity decides
    what is masked."""

    def formula(b: Padded) -> Tensor:
        log_ratio = (b.proximal - b.mu) * b.mask
        total = log_ratio.sum(-1, keepdim=True)
        largest = (b.proximal - b.mu).masked_fill(b.mask == 0, -torch.inf).max(-1, keepdim=True).values
        value = torch.exp(total if agg == "sum" else largest)
        keep = (value >= reject["reject_min"]) & (value <= 2.5)
        assert keep.any()
        assert not keep.all()
        losses = clipped(torch.exp(b.policy - b.proximal), b.advantages, 0.2, 0.28)
        return token_mean(losses * sampler_weight(b, "geometric") * keep, b.mask)

    wide = {"level": "geometric", "weight_min": 0.0, "weight_max": 1e9}
    compare(padded(2), formula, LossTermChoice("decoupled_ppo", CORRECTION | wide | reject))


@pytest.mark.parametrize("seed", SEEDS)
def test_gspo_of_areal(seed: int) -> None:
    """`importance_sampling_level: sequence` without rejection: every token has the mean advantage of its sequence, and
    the loss is a mean over tokens. Ours takes each token's advantage as it is. AReaL's ratio also leaves out the tokens
    that its rejection masks."""

    def formula(b: Padded) -> Tensor:
        mean = ((b.advantages * b.mask).sum(-1, keepdim=True) / b.counts).expand_as(b.mask)
        return token_mean(clipped(geometric_ratio(b, b.proximal).expand_as(b.mask), mean, 0.1, 0.15), b.mask)

    batch = padded(seed, per_token=True)
    mean = ((batch.advantages * batch.mask).sum(-1, keepdim=True) / batch.counts).expand_as(batch.mask)
    term = LossTermChoice("gspo", {"clip_low": 0.1, "clip_high": 0.15, "to": "proximal"})
    assert_same(batch, ours(replace(batch, advantages=mean), term), formula(batch))


# KL penalties ---------------------------------------------------------------------------------------------------------


def verl_kl(kind: str, log_ratio: Tensor) -> Tensor:
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return 0.5 * log_ratio.square()
    return torch.clamp(torch.exp(-log_ratio) + log_ratio - 1, -10, 10)


@pytest.mark.parametrize("straight_through", [False, True])
@pytest.mark.parametrize("to", ["reference", "proximal", "behavior"])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_penalties_of_verl(kind: str, to: str, straight_through: bool) -> None:
    """`kl_penalty` of the kinds k1 (`kl`), k2 (`mse`) and k3 (`low_var_kl`, limited to 10). With a plus sign the
    gradient is that of k2; in the version above, the function describes this formula but raises for these names."""

    def formula(b: Padded) -> Tensor:
        other = {"reference": b.reference, "proximal": b.proximal, "behavior": b.mu}[to]
        value = verl_kl(kind, b.policy - other)
        if straight_through:
            backward = verl_kl("k2", b.policy - other)
            value = backward - backward.detach() + value.detach()
        return token_mean(value, b.mask)

    compare(padded(0), formula, LossTermChoice("kl", {"kind": kind, "to": to, "straight_through": straight_through}))


def test_corrected_kl_of_trl() -> None:
    """`use_bias_correction_kl`: k3 times the ratio of the token, with gradient through both. TRL's ratio is against the
    policy before the update and, with GSPO, that of the sequence; ours is pi / mu of the token."""

    def formula(b: Padded) -> Tensor:
        kl = torch.exp(b.reference - b.policy) - (b.reference - b.policy) - 1
        return token_mean(kl * torch.exp(b.policy - b.mu), b.mask)

    compare(padded(0), formula, LossTermChoice("kl", {"corrected": True}))
