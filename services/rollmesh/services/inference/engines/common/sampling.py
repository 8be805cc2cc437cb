"""Draw tokens with a counter-based random stream per (seed, absolute position).

The tokens of a request depend only on weights, prefix and seed. This module has no state across steps or rows. Logits
may differ in the last bits between batch sizes, because matrix kernels sum in another order. So results are equal
across batch compositions except where two candidates tie to within rounding.

The stream is SplitMix64 (Steele, Lea, Flood 2014) started at a hash of (seed, position); entry i is the number for
vocabulary item i. The draw is the exponential race: argmax p_i / E_i with E_i ~ Exp(1), the Gumbel-max trick with one
logarithm less.
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

_GAMMA = -7046029254386353131
_Ints = TypeVar("_Ints", Tensor, NDArray[np.int64])


class Rules(NamedTuple):
    """Sampling rules of B rows. The switches are true if any row needs that work."""

    streams: Tensor  # [B] int64, `stream_starts` of the seed and the position of the token to be drawn
    temperature: Tensor  # [B] float32; 0 = greedy
    top_p: Tensor  # [B] float32
    top_k: Tensor  # [B] int64; 0 = off
    any_tempered: bool
    any_truncated: bool
    any_greedy: bool
    outputs: Collection[str]  # names of `rollmesh.shared.domain.outputs` that some row wants
    num_top: int  # largest k of `top_k` that some row wants


def mix64(z: _Ints) -> _Ints:
    """Return SplitMix64's finalizer of int64 that hold the bits of uint64. The masks turn arithmetic into logical
    shifts."""
    z = z ^ ((z >> 30) & 0x3FFFFFFFF)
    z *= -4658895280553007687
    z ^= (z >> 27) & 0x1FFFFFFFFF
    z *= -7723592293110705685
    z ^= (z >> 31) & 0x1FFFFFFFF
    return z


def stream_starts(seeds: _Ints, positions: _Ints) -> _Ints:
    """Return the start of the random stream of each (seed, position), [B] int64 from arrays or tensors [B] int64."""
    return mix64(mix64(seeds + _GAMMA) + positions * _GAMMA)


@functools.lru_cache(maxsize=8)
def _counters(vocab_size: int, device: torch.device) -> Tensor:
    return torch.arange(1, vocab_size + 1, device=device) * _GAMMA


def uniforms(streams: Tensor, vocab_size: int) -> Tensor:
    """Return [B, vocab] float32 in [0, 1] of 32 bits each, a pure function of (stream, vocabulary index)."""
    bits = (mix64(streams[:, None] + _counters(vocab_size, streams.device)) >> 32) & 0xFFFFFFFF
    return bits.to(torch.float32).add_(0.5).mul_(2.0**-32)


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


def most_likely(scores: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Return ids [B, num] int32 and log-probs [B, num] float32 of the most likely entries of softmax(scores),
    descending.

    `scores` [B, vocab] is -inf for tokens that cannot be drawn. Places without a token have NO_TOKEN and NO_LOGPROB.
    """
    values, ids = scores.topk(min(num, scores.shape[1]), dim=-1)
    logprobs = values - scores.logsumexp(dim=-1, keepdim=True)
    empty = torch.isinf(logprobs)
    lacking = [0, num - ids.shape[1]]
    return (
        F.pad(ids.to(torch.int32).masked_fill(empty, NO_TOKEN), lacking, value=float(NO_TOKEN)),
        F.pad(logprobs.masked_fill(empty, NO_LOGPROB), lacking, value=NO_LOGPROB),
    )


def mean_logprob(logits: Tensor) -> Tensor:
    """Return the mean [B] over the vocabulary of the log-probs of softmax(logits), finite also if a token has no
    probability."""
    return torch.log_softmax(logits, dim=-1).mean(dim=-1).clamp(min=NO_LOGPROB)


def half(states: Tensor) -> Tensor:
    """Return states in float16, with the largest finite number in place of what exceeds it."""
    return states.clamp(min=-65504.0, max=65504.0).to(torch.float16)


def measure(logits: Tensor, tokens: Tensor, outputs: Collection[str], num_top: int) -> dict[str, Tensor]:
    """Return columns [N] or [N, k] of the plain softmax of float32 logits [N, vocab]: `logprobs` of `tokens` [N] int64,
    and the arrays of `outputs` that follow from logits."""
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

    Returns the ids [B] int64 and columns [B] or [B, k] by name: `logprobs` float32 under the sampling distribution (the
    plain model for greedy rows), `logprobs_model` under the plain softmax, and the arrays of `rules.outputs` that
    follow from logits.
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
    tokens = (probs / uniforms(rules.streams, logits.shape[1]).neg_().log1p_()).argmin(dim=-1)
    if rules.any_greedy:
        tokens = torch.where(rules.temperature > 0, tokens, logits.argmax(dim=-1))
    picked = tokens[:, None]
    model = plain.gather(1, picked)[:, 0].log()
    columns = {"logprobs": model if probs is plain else probs.gather(1, picked)[:, 0].log(), "logprobs_model": model}
    if "entropy" in rules.outputs:
        columns["entropy"] = torch.special.entr(probs).sum(dim=-1)
    if "kept_mass" in rules.outputs:
        columns["kept_mass"] = (scores.logsumexp(dim=-1) - whole.logsumexp(dim=-1)).exp().clamp(max=1.0)
    if "top_k" in rules.outputs:
        columns["top_k_ids"], columns["top_k_logprobs"] = most_likely(scores, rules.num_top)
    if "mean_logprob" in rules.outputs:
        columns["mean_logprob"] = mean_logprob(logits)
    return tokens, columns
