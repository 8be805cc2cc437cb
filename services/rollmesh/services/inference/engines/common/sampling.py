"""Draw tokens with a counter-based random stream per (seed, absolute position).

The tokens of a request depend only on weights, prefix and seed. This module has no state across steps or rows. Logits
may differ in the last bits between batch sizes, because matrix kernels sum in another order. So results are equal
across batch compositions except where two candidates tie to within rounding.

The stream is SplitMix64 (Steele, Lea, Flood 2014) started at a hash of (seed, position); entry i is the number for
vocabulary item i. The draw is the exponential race: argmax p_i / E_i with E_i ~ Exp(1), the Gumbel-max trick with one
logarithm less. Scriptable tensor code, like `torch_model`.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from rollmesh.shared.domain.outputs import NO_LOGPROB, NO_TOKEN


class Rules(NamedTuple):
    """Sampling rules of B rows. The switches are true if any row needs that work."""

    seeds: Tensor  # [B] int64
    positions: Tensor  # [B] int64, of the token to be drawn
    temperature: Tensor  # [B] float32; 0 = greedy
    top_p: Tensor  # [B] float32
    top_k: Tensor  # [B] int64; 0 = off
    any_tempered: bool
    any_truncated: bool
    any_greedy: bool
    outputs: list[str]  # names of `rollmesh.shared.domain.outputs` that some row wants
    num_top: int  # largest k of `top_k` that some row wants


def mix64(z: Tensor) -> Tensor:
    """Return SplitMix64's finalizer of int64 that hold the bits of uint64. The masks turn arithmetic into logical shifts."""
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


def uniforms(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Return [B, vocab] float32 in [0, 1] of 32 bits each, a pure function of (seed, position, vocabulary index)."""
    gamma = -7046029254386353131
    start = mix64(mix64(seeds + gamma) + positions * gamma)
    counter = torch.arange(1, vocab_size + 1, device=seeds.device) * gamma
    bits = (mix64(start[:, None] + counter) >> 32) & 0xFFFFFFFF
    return (bits.to(torch.float32) + 0.5) * 2.0**-32


def truncate(scaled: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Return tempered logits [B, vocab] with -inf outside top-k and the nucleus.

    The nucleus is the smallest set of most likely tokens, after top-k, whose mass reaches top_p (arXiv:1904.09751).
    """
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(scaled.shape[1], device=scaled.device)
    ordered = ordered.masked_fill((top_k[:, None] > 0) & (ranks >= top_k[:, None]), float("-inf"))
    probs = torch.softmax(ordered, dim=-1)
    before = probs.cumsum(dim=-1) - probs
    outside = (before >= top_p[:, None]) & (top_p[:, None] < 1.0) & (ranks > 0)
    ordered = ordered.masked_fill(outside, float("-inf"))
    return torch.empty_like(ordered).scatter_(1, order, ordered)


def most_likely(
    scores: Tensor, num: int, no_token: int = NO_TOKEN, no_logprob: float = NO_LOGPROB
) -> tuple[Tensor, Tensor]:
    """Return ids [B, num] int32 and log-probs [B, num] float32 of the most likely entries of softmax(scores), descending.

    `scores` [B, vocab] is -inf for tokens that cannot be drawn. Places without a token have the last two arguments, which are
    arguments because TorchScript does not read constants of a module.
    """
    values, ids = scores.topk(min(num, scores.shape[1]), dim=-1)
    logprobs = values - scores.logsumexp(dim=-1, keepdim=True)
    empty = torch.isinf(logprobs)
    lacking = [0, num - ids.shape[1]]
    return (
        F.pad(ids.to(torch.int32).masked_fill(empty, no_token), lacking, value=float(no_token)),
        F.pad(logprobs.masked_fill(empty, no_logprob), lacking, value=no_logprob),
    )


def mean_logprob(logits: Tensor, no_logprob: float = NO_LOGPROB) -> Tensor:
    """Return the mean [B] over the vocabulary of the log-probs of softmax(logits), finite also if a token has no probability."""
    return torch.log_softmax(logits, dim=-1).mean(dim=-1).clamp(min=no_logprob)


def half(states: Tensor) -> Tensor:
    """Return states in float16, with the largest finite number in place of what exceeds it."""
    return states.clamp(min=-65504.0, max=65504.0).to(torch.float16)


def measure(logits: Tensor, tokens: Tensor, outputs: list[str], num_top: int) -> dict[str, Tensor]:
    """Return columns [N] or [N, k] of the plain softmax of float32 logits [N, vocab]: `logprobs` of `tokens` [N] int64, and the
    arrays of `outputs` that follow from logits."""
    every = torch.log_softmax(logits, dim=-1)
    columns = {"logprobs": every.gather(1, tokens[:, None])[:, 0]}
    if "entropy" in outputs:
        columns["entropy"] = torch.special.entr(every.exp()).sum(dim=-1)
    if "top_k" in outputs:
        columns["top_k_ids"], columns["top_k_logprobs"] = most_likely(logits, num_top)
    if "mean_logprob" in outputs:
        columns["mean_logprob"] = mean_logprob(logits)
    return columns


def sample(logits: Tensor, rules: Rules) -> tuple[Tensor, dict[str, Tensor]]:
    """Draw one token per row of float32 logits [B, vocab].

    Returns the ids [B] int64 and columns [B] or [B, k] by name: `logprobs` float32 under the sampling distribution (the plain
    model for greedy rows), `logprobs_model` under the plain softmax, and the arrays of `rules.outputs` that follow from logits.
    Not a named tuple, for which TorchScript would create a new Python class at every call (0.2 ms).
    """
    plain = torch.softmax(logits, dim=-1)
    probs, whole, scores = plain, logits, logits
    if rules.any_tempered or rules.any_truncated:
        heat = torch.where(rules.temperature > 0, rules.temperature, torch.ones_like(rules.temperature))
        whole = scores = logits / heat[:, None]
        if rules.any_truncated:
            greedy = rules.temperature <= 0
            scores = truncate(whole, rules.top_p.masked_fill(greedy, 1.0), rules.top_k.masked_fill(greedy, 0))
        probs = torch.softmax(scores, dim=-1)
    race = probs / -torch.log1p(-uniforms(rules.seeds, rules.positions, logits.shape[1]))
    tokens = race.argmax(dim=-1)
    if rules.any_greedy:
        tokens = torch.where(rules.temperature > 0, tokens, logits.argmax(dim=-1))
    picked = tokens[:, None]
    columns = {"logprobs": probs.gather(1, picked)[:, 0].log(), "logprobs_model": plain.gather(1, picked)[:, 0].log()}
    if "entropy" in rules.outputs:
        columns["entropy"] = torch.special.entr(probs).sum(dim=-1)
    if "kept_mass" in rules.outputs:
        columns["kept_mass"] = (scores.logsumexp(dim=-1) - whole.logsumexp(dim=-1)).exp().clamp(max=1.0)
    if "top_k" in rules.outputs:
        columns["top_k_ids"], columns["top_k_logprobs"] = most_likely(scores, rules.num_top)
    if "mean_logprob" in rules.outputs:
        columns["mean_logprob"] = mean_logprob(logits)
    return tokens, columns
