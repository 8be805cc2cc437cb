"""Runs the model: builds packed batches from host arrays, owns the key-value cache, returns host arrays.

The seam between scheduling (numpy, slots) and tensors (device). Invariants: one call runs under one set of weights;
cache contents are written by `step` and `copy_prefix` only. Used from the compute thread alone.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollmesh.services.inference.engines.model_spec import ModelSpec
from rollmesh.services.inference.engines.sampling import Rules
from rollmesh.services.inference.engines.torch_model import Batch, Shape, Weights, rotary_tables
from rollmesh.services.inference.engines.torch_steps import sample_step, score_step

Ints = NDArray[np.int64]
_KV_ALIGN = 16
"""Attention length is rounded up to this: fewer shapes for the kernels to specialise on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Consecutive tokens of one sequence: `tokens` go to `slot` from position `start` on."""

    slot: int
    start: int
    tokens: NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRules:
    """Sampling per row, host arrays [B]; `positions` are those of the tokens to be drawn."""

    seeds: Ints
    positions: Ints
    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    top_k: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Host arrays [B]."""

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    logprobs_model: NDArray[np.float32]


@functools.lru_cache(maxsize=8)
def _compiled(function: Callable[..., Any], torchscript: bool) -> Callable[..., Any]:
    if not torchscript:
        return function
    with warnings.catch_warnings():
        # Its successors need a C++ compiler on the node (torch.compile) or fixed shapes (torch.export).
        warnings.filterwarnings("ignore", message=".*torch.jit.script.*", category=DeprecationWarning)
        return torch.jit.script(function)  # type: ignore[no-any-return, no-untyped-call, unused-ignore]


class TorchRunner:
    """One model on one device with a preallocated cache of `slots` sequences."""

    def __init__(
        self, spec: ModelSpec, *, slots: int, context_max: int, device: str, dtype: torch.dtype, torchscript: bool
    ) -> None:
        self.spec, self.device, self.dtype = spec, torch.device(device), dtype
        self._shape = Shape(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.rms_eps)
        self._rotary = rotary_tables(spec.head_dim, spec.rope_theta, context_max, self.device)
        self.keys = self._cache(slots, context_max)
        self.values = self._cache(slots, context_max)
        self._context_max = context_max
        self._sample_step = _compiled(sample_step, torchscript)
        self._score_step = _compiled(score_step, torchscript)

    def _cache(self, slots: int, context: int) -> Tensor:
        """[layers, slots, kv_heads, context, head_dim]; zeros, since masked garbage could be NaN and 0 * NaN is NaN."""
        spec = self.spec
        size = (spec.num_layers, slots, spec.num_kv_heads, context, spec.head_dim)
        return torch.zeros(size, dtype=self.dtype, device=self.device)

    def copy_prefix(self, source: int, targets: list[int], num_tokens: int) -> None:
        """Give other slots the first `num_tokens` positions of `source`."""
        rows = torch.tensor(targets, device=self.device)
        for cache in (self.keys, self.values):
            cache[:, rows, :, :num_tokens] = cache[:, source : source + 1, :, :num_tokens]

    def decode(self, weights: Weights, tokens: Ints, positions: Ints, slots: Ints, rules: RowRules) -> Drawn:
        """One token per row: feed `tokens` [B] at `positions` to ascending `slots`, draw the next ones."""
        first, count = int(slots[0]), int(slots[-1] - slots[0]) + 1
        in_place = count <= 2 * len(slots)  # copying rows out costs about as much as attending to them
        queries = slots - first if in_place else np.arange(len(slots))
        rows = count if in_place else len(slots)
        batch = Batch(
            tokens=self._ints(tokens),
            positions=self._ints(positions),
            slots=self._ints(slots),
            queries=self._ints(queries),
            rows=self._ints(slots),
            first_slot=first if in_place else -1,
            num_rows=rows,
            width=1,
            kv_len=self._kv_len(int(positions.max()) + 1, self._context_max),
            packed=rows == len(slots),
        )
        return self._draw(weights, batch, np.arange(len(slots)), rules)

    def prefill(self, weights: Weights, spans: list[Span], drawing: Ints, rules: RowRules) -> Drawn:
        """Compute the spans' keys and values; draw the token after the spans numbered `drawing` (`rules` are theirs)."""
        batch = self._span_batch(spans, [span.slot for span in spans], self._context_max)
        ends = np.cumsum([len(span.tokens) for span in spans]) - 1
        return self._draw(weights, batch, ends[drawing], rules)

    def score(self, weights: Weights, sequences: list[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        """Log-prob of each token given those before it, plain softmax; entry 0 is 0. Uses a cache of its own."""
        spans = [Span(slot=row, start=0, tokens=sequence) for row, sequence in enumerate(sequences)]
        longest = max(len(sequence) for sequence in sequences)
        keys, values = self._cache(len(sequences), longest), self._cache(len(sequences), longest)
        batch = self._span_batch(spans, range(len(spans)), longest)
        with torch.inference_mode():
            picked = self._score_step(weights, self._shape, self._rotary, keys, values, batch).cpu().numpy()
        scores = []
        for part in np.split(picked, np.cumsum([len(sequence) for sequence in sequences])[:-1]):
            scores.append(np.concatenate((np.zeros(1, np.float32), part[:-1])))
        return scores

    def _span_batch(self, spans: list[Span], rows: list[int] | range, context: int) -> Batch:
        lengths = [len(span.tokens) for span in spans]
        width = max(lengths)
        queries = [row * width + np.arange(length) for row, length in enumerate(lengths)]
        positions = [np.arange(span.start, span.start + length) for span, length in zip(spans, lengths, strict=True)]
        return Batch(
            tokens=self._ints(np.concatenate([span.tokens for span in spans]).astype(np.int64)),
            positions=self._ints(np.concatenate(positions)),
            slots=self._ints(np.repeat(np.asarray(rows, dtype=np.int64), lengths)),
            queries=self._ints(np.concatenate(queries)),
            rows=self._ints(np.asarray(rows, dtype=np.int64)),
            first_slot=-1,
            num_rows=len(spans),
            width=width,
            kv_len=self._kv_len(max(span.start + n for span, n in zip(spans, lengths, strict=True)), context),
            packed=min(lengths) == width,
        )

    def _draw(self, weights: Weights, batch: Batch, picks: Ints, rules: RowRules) -> Drawn:
        device = self.device
        tensors = Rules(
            seeds=self._ints(rules.seeds),
            positions=self._ints(rules.positions),
            temperature=torch.from_numpy(rules.temperature).to(device),
            top_p=torch.from_numpy(rules.top_p).to(device),
            top_k=self._ints(rules.top_k),
            any_tempered=bool((rules.temperature != 1.0).any()),
            any_truncated=bool((rules.top_p < 1.0).any() or (rules.top_k > 0).any()),
            any_greedy=bool((rules.temperature <= 0.0).any()),
        )
        with torch.inference_mode():
            tokens, logprobs, logprobs_model = self._sample_step(
                weights, self._shape, self._rotary, self.keys, self.values, batch, self._ints(picks), tensors
            )
        return Drawn(
            tokens=tokens.to(dtype=torch.int32, device="cpu").numpy(),
            logprobs=logprobs.cpu().numpy(),
            logprobs_model=logprobs_model.cpu().numpy(),
        )

    def _ints(self, array: Ints) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(self.device)

    def _kv_len(self, needed: int, context: int) -> int:
        return min(context, -(-needed // _KV_ALIGN) * _KV_ALIGN)
