"""Run any causal language model through its transformers forward, one sequence at a time.

It serves models that the built-in forward pass does not compute. With the model's cache, a step feeds new tokens only.
Without it, every step feeds the whole sequence again, which is slow, but correct for every model whose forward is
causal.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.utils import logging

from rollmesh.services.inference.engine import WeightsMismatch
from rollmesh.services.inference.engines.common.sampling import measure, sample
from rollmesh.services.inference.engines.torch.plain_outputs import observed
from rollmesh.services.inference.engines.torch.runner import Drawn, Ints, RowRules, Span, drawn, sampling_rules, shifted
from rollmesh.services.inference.engines.torch.slots import PrefixReuse
from rollmesh.shared.domain.trajectory import Columns
from rollmesh.trainer.model_config import use_whole_attention

_LOGITS_MAX = 1 << 24
"""Most logits that `score` has in memory at once, if the model has a cache: 64 MiB in float32."""
_SPAN_MIN = 64
"""Fewest tokens of a span of `score`, however large the vocabulary."""
_CACHE_FIELDS = ("past_key_values", "cache_params", "state")
"""Fields in which models return their cache, and the arguments that take it."""


class PlainRunner:
    """Implements `runner.Runner`. Weights are a whole transformers model."""

    def __init__(
        self, model_class: Any, config: Any, *, slots: int, device: str, dtype: torch.dtype, cached: bool
    ) -> None:
        self.vocab_size = int(config.get_text_config().vocab_size)
        self.reuse = PrefixReuse.WHOLE if cached else PrefixReuse.NONE
        self._model_class, self._config = model_class, config
        self._device, self._dtype, self._cached = torch.device(device), dtype, cached
        self._tokens: list[list[int]] = [[] for _ in range(slots)]
        self._caches: list[dict[str, Any]] = [{} for _ in range(slots)]
        self._last_only = "logits_to_keep" in inspect.signature(model_class.forward).parameters

    def lay_out(self, state: dict[str, Tensor]) -> Any:
        return model_of_state(self._model_class, self._config, state, self._dtype).to(self._device)

    def copy_prefix(self, source: int, targets: list[int], num_tokens: int) -> None:
        raise AssertionError("the state of a plain model is not copied")

    def decode(self, weights: Any, tokens: Ints, positions: Ints, slots: Ints, rules: RowRules) -> Drawn:
        spans = [
            Span(slot=slot, start=position, tokens=np.array([token], np.int32))
            for slot, position, token in zip(slots.tolist(), positions.tolist(), tokens.tolist(), strict=True)
        ]
        return self.prefill(weights, spans, np.arange(len(spans)), rules)

    def prefill(self, weights: Any, spans: list[Span], drawing: Ints, rules: RowRules) -> Drawn:
        with torch.inference_mode():
            wanted = set(drawing.tolist())
            after = [self._feed(weights, span, number in wanted, rules.outputs) for number, span in enumerate(spans)]
            last = [after[number] for number in drawing.tolist()]
            if not last:
                return drawn(torch.empty(0, device=self._device), {})
            columns = {name: torch.stack([row[name] for row in last]) for name in last[0]}
            tokens, sampled = sample(columns.pop("logits"), sampling_rules(rules, self._device))
            return drawn(tokens, {**sampled, **columns})

    def score(
        self, weights: Any, sequences: list[NDArray[np.int32]], outputs: tuple[str, ...] = (), num_top: int = 0
    ) -> list[Columns]:
        with torch.inference_mode():
            return [shifted(self._score(weights, sequence.tolist(), list(outputs), num_top)) for sequence in sequences]

    def _feed(self, model: Any, span: Span, wanted: bool, outputs: tuple[str, ...]) -> dict[str, Tensor]:
        """Feed a span. Return `logits` (float32 [vocab]) and the observed outputs after it, if they are wanted."""
        slot, tokens = span.slot, span.tokens.tolist()
        self._tokens[slot][span.start :] = tokens
        if not self._cached and not wanted:
            return {}
        if span.start == 0:
            self._caches[slot] = {}
        fed, cache = (tokens, self._caches[slot]) if self._cached else (self._tokens[slot], None)
        with observed(model, outputs if wanted else ()) as seen:
            logits, cache = self._forward(model, fed, cache, last_only=self._last_only)
        self._caches[slot] = cache or {}
        return {"logits": logits[-1].float(), **{name: rows[-1] for name, rows in seen.items()}}

    def _score(self, model: Any, tokens: list[int], outputs: list[str], num_top: int) -> Columns:
        """Return the columns after each token. Logits exist for one span at a time if the model has a cache, and for
        the whole sequence in the dtype of the model if not."""
        block = max(_SPAN_MIN, _LOGITS_MAX // self.vocab_size)
        step = block if self._cached else len(tokens)
        following = torch.tensor([*tokens[1:], 0], device=self._device)
        parts: list[dict[str, Tensor]] = []
        cache: dict[str, Any] | None = {} if len(tokens) > step else None
        for start in range(0, len(tokens), step):
            with observed(model, tuple(outputs)) as seen:
                logits, cache = self._forward(model, tokens[start : start + step], cache, last_only=False)
            for begin in range(0, len(logits), block):
                targets = following[start + begin : start + begin + block]
                parts.append(measure(logits[begin : begin + block].float(), targets, outputs, num_top))
            for name, rows in seen.items():
                parts[-1][name] = rows
        names = list(dict.fromkeys(name for part in parts for name in part))
        return {name: torch.cat([part[name] for part in parts if name in part]).cpu().numpy() for name in names}

    def _forward(
        self, model: Any, tokens: list[int], cache: dict[str, Any] | None, *, last_only: bool
    ) -> tuple[Tensor, dict[str, Any] | None]:
        """Return the logits [n, vocab] of the tokens, or only of the last one, and the cache after them (None: without
        a cache)."""
        extra: dict[str, Any] = {"use_cache": cache is not None, **(cache or {})}
        if last_only:
            extra["logits_to_keep"] = 1
        out = model(torch.tensor([tokens], device=self._device), **extra)
        if cache is not None:
            cache = {name: out[name] for name in _CACHE_FIELDS if name in out and out[name] is not None}
        return out.logits[0], cache


def model_of_state(model_class: Any, config: Any, state: Mapping[str, Tensor], dtype: torch.dtype) -> Any:
    """A model in evaluation mode with the weights of a state dict, under the names of its modules or of its files.

    Raises WeightsMismatch if the state dict lacks a tensor of the model, or has one that the model does not use as it
    is.
    """
    progress: Any = logging
    shown = progress.is_progress_bar_enabled()
    progress.disable_progress_bar()
    try:
        model, info = model_class.from_pretrained(
            None,
            config=config,
            state_dict=dict(state),
            dtype=dtype,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except (ValueError, KeyError, RuntimeError) as error:
        raise WeightsMismatch(f"transformers cannot load these weights: {error}") from error
    finally:
        if shown:
            progress.enable_progress_bar()
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(map(str, info[problem])):
            raise WeightsMismatch(
                f"{problem.split('_')[0]} tensors {', '.join(names[:8])}: send the whole state dict of the configured "
                "model"
            )
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    tied = model.config.tie_word_embeddings and model._tied_weights_keys
    if tied and outputs is not None and outputs.weight is not inputs.weight:
        raise WeightsMismatch(
            "the output layer differs from the embedding, but config.json ties them: send them equal or untie the "
            "config"
        )
    use_whole_attention(model)
    return model.eval()
