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


class TorchRunner:
    """Implements `runner.Runner` with the built-in forward pass and a preallocated cache of `slots` sequences."""

    reuse = PrefixReuse.ANY

    def __init__(self, spec: ModelSpec, *, slots: int, context_max: int, device: str, dtype: torch.dtype) -> None:
        self.spec, self.device, self.dtype = spec, torch.device(device), dtype
        self.vocab_size = spec.vocab_size
        self._rotary = rotary_table(spec, context_max, self.device)
        self.cache = empty_cache(spec, slots, context_max, dtype, self.device)

    def lay_out(self, state: dict[str, Tensor]) -> Weights:
        return lay_out(self.spec, state, self.dtype, self.device)

    def copy_prefix(self, source: int, targets: list[int], num_tokens: int) -> None:
        """Copy the first `num_tokens` positions of `source` to other slots."""
        rows = torch.tensor(targets, device=self.device)
        self.cache[:, :, rows, :, :num_tokens] = self.cache[:, :, source : source + 1, :, :num_tokens]

    def decode(self, weights: Weights, tokens: Ints, positions: Ints, slots: Ints, rules: RowRules) -> Drawn:
        """Feed one token per row, `tokens` [B] at `positions`, to ascending `slots`, and draw the next ones."""
        first, count = int(slots[0]), int(slots[-1] - slots[0]) + 1
        in_place = count <= 2 * len(slots)  # copying rows out costs about as much as attending to them
        rows = count if in_place else len(slots)
        batch = PackedStep(
            tokens=self._ints(tokens),
            positions=self._ints(positions),
            cache_rows=self._cache_rows(self.cache, slots, positions),
            queries=None if rows == len(slots) else self._ints(slots - first),
            rows=slice(first, first + count) if in_place else self._ints(slots),
            num_rows=rows,
            width=1,
            kv_len=self._kv_len(self.cache, int(positions.max()) + 1),
        )
        return self._draw(weights, batch, None, rules)

    def prefill(self, weights: Weights, spans: list[Span], drawing: Ints, rules: RowRules) -> Drawn:
        """Compute keys and values of the spans, and draw the token after the spans numbered `drawing` (`rules` are
        theirs)."""
        batch = self._span_batch(self.cache, spans)
        ends = np.cumsum([len(span.tokens) for span in spans]) - 1
        return self._draw(weights, batch, self._ints(ends[drawing]), rules)

    def score(
        self, weights: Weights, sequences: list[NDArray[np.int32]], outputs: tuple[str, ...] = (), num_top: int = 0
    ) -> list[Columns]:
        """Return the columns of each sequence in one temporary cache, computed `_SCORE_SPAN` positions at a time."""
        longest = max(len(sequence) for sequence in sequences)
        cache = empty_cache(self.spec, len(sequences), longest, self.dtype, self.device)
        parts: list[list[Columns]] = [[] for _ in sequences]
        for start in range(0, longest, _SCORE_SPAN):
            live = [row for row, sequence in enumerate(sequences) if len(sequence) > start]
            spans = [Span(slot=row, start=start, tokens=sequences[row][start : start + _SCORE_SPAN]) for row in live]
            following = np.concatenate([np.roll(sequences[row], -1)[start : start + _SCORE_SPAN] for row in live])
            columns = self._measured(weights, cache, spans, self._ints(following), outputs, num_top)
            ends = np.cumsum([len(span.tokens) for span in spans]).tolist()
            host = {name: values.cpu().numpy() for name, values in columns.items()}
            for row, begin, end in zip(live, [0, *ends], ends, strict=False):
                parts[row].append({name: rows[begin:end] for name, rows in host.items()})
        return [shifted({name: np.concatenate([part[name] for part in row]) for name in row[0]}) for row in parts]

    @torch.inference_mode()
    def _measured(
        self,
        weights: Weights,
        cache: Tensor,
        spans: list[Span],
        following: Tensor,
        outputs: tuple[str, ...],
        num_top: int,
    ) -> dict[str, Tensor]:
        """Return columns of the distribution after each of the N tokens of the spans, as `measure` does for the tokens
        `following` [N].

        Logits exist for a block of tokens at a time, because [N, vocab] can exceed the memory."""
        normed = self._normed(weights, forward(weights, self.spec, self._rotary, cache, self._span_batch(cache, spans)))
        block = max(1, _LOGITS_MAX // self.vocab_size)
        parts = [
            measure((normed[at : at + block] @ weights.head).float(), following[at : at + block], outputs, num_top)
            for at in range(0, len(normed), block)
        ]
        columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return columns | ({"hidden": half(normed)} if "hidden" in outputs else {})

    @torch.inference_mode()
    def _draw(self, weights: Weights, batch: PackedStep, picks: Tensor | None, rules: RowRules) -> Drawn:
        """Run the forward pass, and draw the token after each of the packed tokens numbered `picks` [B], or after all
        of them."""
        hidden = forward(weights, self.spec, self._rotary, self.cache, batch)
        normed = self._normed(weights, hidden if picks is None else hidden.index_select(0, picks))
        tokens, columns = sample((normed @ weights.head).float(), sampling_rules(rules, self.device))
        return drawn(tokens, columns | ({"hidden": half(normed)} if "hidden" in rules.outputs else {}))

    def _normed(self, weights: Weights, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, hidden.shape[1:], weights.norm, self.spec.rms_eps)

    def _span_batch(self, cache: Tensor, spans: list[Span]) -> PackedStep:
        """Return a batch whose rows are the spans; `cache` has their slots."""
        lengths = [len(span.tokens) for span in spans]
        width = max(lengths)
        slots = np.array([span.slot for span in spans], np.int64)
        queries = [row * width + np.arange(length) for row, length in enumerate(lengths)]
        positions = np.concatenate([np.arange(span.start, span.start + len(span.tokens)) for span in spans])
        return PackedStep(
            tokens=self._ints(np.concatenate([span.tokens for span in spans])),
            positions=self._ints(positions),
            cache_rows=self._cache_rows(cache, np.repeat(slots, lengths), positions),
            queries=None if min(lengths) == width else self._ints(np.concatenate(queries)),
            rows=self._ints(slots),
            num_rows=len(spans),
            width=width,
            kv_len=self._kv_len(cache, int(positions.max()) + 1),
        )

    def _cache_rows(self, cache: Tensor, slots: Ints, positions: Ints) -> Tensor:
        """Return `PackedStep.cache_rows`: the rows of a layer [2, slots, kv_heads, context] as one axis, for each token
        the rows of its keys and values."""
        num_slots, kv_heads, context = cache.shape[2:5]
        parts = np.arange(2)[:, None] * (num_slots * kv_heads * context) + np.arange(kv_heads) * context
        return self._ints(((slots * (kv_heads * context) + positions)[:, None] + parts.ravel()).ravel())

    def _ints(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(self.device)

    def _kv_len(self, cache: Tensor, needed: int) -> int:
        return min(cache.shape[4], -(-needed // _KV_ALIGN) * _KV_ALIGN)
