"""Run the model with the built-in forward pass: build packed batches from host arrays, own the key-value cache, return
host arrays.

Invariants: one call runs under one set of weights, and only `_draw` and `copy_prefix` write the cache. Used from the
compute thread alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from rollmesh.services.inference.engines.common.sampling import half, measure, sample
from rollmesh.services.inference.engines.torch.model import PackedStep, Weights, empty_cache, forward, rotary_table
from rollmesh.services.inference.engines.torch.model_spec import ModelSpec
from rollmesh.services.inference.engines.torch.runner import Drawn, Ints, RowRules, Span, drawn, sampling_rules, shifted
from rollmesh.services.inference.engines.torch.slots import PrefixReuse
from rollmesh.services.inference.engines.torch.weight_layout import lay_out
from rollmesh.shared.domain.trajectory import Columns

_KV_ALIGN = 16
"""Attention length is rounded up to a multiple of this, so that kernels specialize on fewer shapes."""
_SCORE_SPAN = 1024
"""Most tokens of a sequence that `score` computes in one forward, because the mask has this many rows."""
_LOGITS_MAX = 1 << 24
"""Most logits that `score` has in memory at once: 64 MiB in float32."""


@functools.lru_cache(maxsize=8)
def _compiled(function: Callable[..., Any], torchscript: bool) -> Callable[..., Any]:
    if not torchscript:
        return function
    with warnings.catch_warnings():
        # Its successors need a C++ compiler on the node (torch.compile) or fixed shapes (torch.export).
        warnings.filterwarnings("ignore", message=".*torch.jit.script.*", category=DeprecationWarning)
        return torch.jit.script(function)  # type: ignore[no-any-return, no-untyped-call, unused-ignore]


class TorchRunner:
    """Implements `runner.Runner` with the built-in forward pass and a preallocated cache of `slots` sequences."""

    reuse = PrefixReuse.ANY

    def __init__(
        self, spec: ModelSpec, *, slots: int, context_max: int, device: str, dtype: torch.dtype, torchscript: bool
    ) -> None:
        self.spec, self.device, self.dtype = spec, torch.device(device), dtype
        self.vocab_size = spec.vocab_size
        self._shape = _shape(spec, dtype)
        self._rotary = _rotary(spec, context_max, self.device)
        self.keys = self._cache(slots, context_max)
        self.values = self._cache(slots, context_max)
        self._context_max = context_max
        self._sample_step = _compiled(sample_step, torchscript)
        self._score_step = _compiled(score_step, torchscript)

    def _cache(self, slots: int, context: int) -> Tensor:
        """[layers, slots, kv_heads, context, head_dim]; zeros, because masked garbage could be NaN, and 0 * NaN is NaN."""
        spec = self.spec
        size = (spec.num_layers, slots, spec.num_kv_heads, context, spec.head_dim)
        return torch.zeros(size, dtype=self.dtype, device=self.device)

    def lay_out(self, state: dict[str, Tensor]) -> Weights:
        return lay_out(self.spec, state, self.dtype, self.device)

    def copy_prefix(self, source: int, targets: list[int], num_tokens: int) -> None:
        """Copy the first `num_tokens` positions of `source` to other slots."""
        rows = torch.tensor(targets, device=self.device)
        for cache in (self.keys, self.values):
            cache[:, rows, :, :num_tokens] = cache[:, source : source + 1, :, :num_tokens]

    def decode(self, weights: Weights, tokens: Ints, positions: Ints, slots: Ints, rules: RowRules) -> Drawn:
        """Feed one token per row, `tokens` [B] at `positions`, to ascending `slots`, and draw the next ones."""
        first, count = int(slots[0]), int(slots[-1] - slots[0]) + 1
        in_place = count <= 2 * len(slots)  # copying rows out costs about as much as attending to them
        queries = slots - first if in_place else np.arange(len(slots))
        rows = count if in_place else len(slots)
        batch = PackedStep(
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
        """Compute keys and values of the spans, and draw the token after the spans numbered `drawing` (`rules` are theirs)."""
        batch = self._span_batch(spans, [span.slot for span in spans], self._context_max)
        ends = np.cumsum([len(span.tokens) for span in spans]) - 1
        return self._draw(weights, batch, ends[drawing], rules)

    def score(
        self, weights: Weights, sequences: list[NDArray[np.int32]], outputs: tuple[str, ...] = (), num_top: int = 0
    ) -> list[Columns]:
        """Return the columns of each sequence in one temporary cache, computed `_SCORE_SPAN` positions at a time."""
        longest = max(len(sequence) for sequence in sequences)
        keys, values = self._cache(len(sequences), longest), self._cache(len(sequences), longest)
        parts: list[list[Columns]] = [[] for _ in sequences]
        for start in range(0, longest, _SCORE_SPAN):
            live = [row for row, sequence in enumerate(sequences) if len(sequence) > start]
            spans = [Span(slot=row, start=start, tokens=sequences[row][start : start + _SCORE_SPAN]) for row in live]
            following = np.concatenate([np.roll(sequences[row], -1)[start : start + _SCORE_SPAN] for row in live])
            with torch.inference_mode():
                columns = self._score_step(
                    weights,
                    self._shape,
                    self._rotary,
                    keys,
                    values,
                    self._span_batch(spans, live, longest),
                    self._ints(following.astype(np.int64)),
                    list(outputs),
                    num_top,
                    max(1, _LOGITS_MAX // self.vocab_size),
                )
            ends = np.cumsum([len(span.tokens) for span in spans]).tolist()
            host = {name: values.cpu().numpy() for name, values in columns.items()}
            for row, begin, end in zip(live, [0, *ends], ends, strict=False):
                parts[row].append({name: rows[begin:end] for name, rows in host.items()})
        return [shifted({name: np.concatenate([part[name] for part in row]) for name in row[0]}) for row in parts]

    def _span_batch(self, spans: list[Span], rows: list[int], context: int) -> PackedStep:
        lengths = [len(span.tokens) for span in spans]
        width = max(lengths)
        queries = [row * width + np.arange(length) for row, length in enumerate(lengths)]
        positions = [np.arange(span.start, span.start + length) for span, length in zip(spans, lengths, strict=True)]
        return PackedStep(
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

    def _draw(self, weights: Weights, batch: PackedStep, picks: Ints, rules: RowRules) -> Drawn:
        tensors = sampling_rules(rules, self.device)
        with torch.inference_mode():
            tokens, columns = self._sample_step(
                weights, self._shape, self._rotary, self.keys, self.values, batch, self._ints(picks), tensors
            )
        return drawn(tokens, columns)

    def _ints(self, array: Ints) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(self.device)

    def _kv_len(self, needed: int, context: int) -> int:
        return min(context, -(-needed // _KV_ALIGN) * _KV_ALIGN)


def _shape(spec: ModelSpec, dtype: torch.dtype) -> Shape:
    return Shape(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rms_eps=spec.rms_eps,
        layer_kinds=list(spec.layer_kinds),
        windows=[kind.window for kind in spec.kinds],
        gelu=spec.activation == "gelu_pytorch_tanh",
        num_chosen=spec.experts.num_chosen if spec.experts else 0,
        normalized=spec.experts is not None and spec.experts.normalized,
        embed_scale=torch.tensor(spec.embed_scale, dtype=dtype).item(),  # as transformers rounds it
        attn_scale=spec.attn_scale,
        attn_softcap=spec.attn_softcap,
        logit_divisor=spec.logit_divisor,
        logit_softcap=spec.logit_softcap,
    )


def _rotary(spec: ModelSpec, context_max: int, device: torch.device) -> Rotary:
    tables = [
        rotary_table(list(kind.frequencies), kind.magnitude, spec.head_dim, context_max, device) for kind in spec.kinds
    ]
    return Rotary(cos=[cos for cos, _ in tables], sin=[sin for _, sin in tables])
