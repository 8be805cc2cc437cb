"""Run any causal language model through its transformers forward, one sequence at a time.

It serves models that the built-in forward pass does not compute. With the model's cache, a step feeds new tokens only. Without it,
every step feeds the whole sequence again, which is slow, but correct for every model whose forward is causal.
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
from rollmesh.services.inference.engines.runner import Drawn, Ints, RowRules, Span, drawn, sampling_rules
from rollmesh.services.inference.engines.sampling import sample
from rollmesh.services.inference.engines.slots import PrefixReuse
from rollmesh.trainer.model_config import use_whole_attention

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
            last = [self._feed(weights, span, number in wanted) for number, span in enumerate(spans)]
            logits = [last[number] for number in drawing.tolist()]
            if not logits:
                return drawn(torch.empty(0, device=self._device), {})
            return drawn(*sample(torch.stack(logits), sampling_rules(rules, self._device)))

    def score(self, weights: Any, sequences: list[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        with torch.inference_mode():
            return [teacher_forced(weights, sequence.tolist(), self._device) for sequence in sequences]

    def _feed(self, model: Any, span: Span, wanted: bool) -> Tensor:
        """Feed a span. Return the logits after it (float32 [vocab]) if they are wanted."""
        slot, tokens = span.slot, span.tokens.tolist()
        self._tokens[slot][span.start :] = tokens
        if not self._cached:
            return self._forward(model, self._tokens[slot], {})[0] if wanted else torch.empty(0)
        if span.start == 0:
            self._caches[slot] = {}
        logits, self._caches[slot] = self._forward(model, tokens, {**self._caches[slot], "use_cache": True})
        return logits

    def _forward(self, model: Any, tokens: list[int], cache: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        extra: dict[str, Any] = {"logits_to_keep": 1} if self._last_only else {}
        if not cache:
            extra["use_cache"] = False
        out = model(torch.tensor([tokens], device=self._device), **cache, **extra)
        kept = {name: out[name] for name in _CACHE_FIELDS if name in out and out[name] is not None}
        return out.logits[0, -1].float(), kept


def teacher_forced(model: Any, tokens: list[int], device: torch.device) -> NDArray[np.float32]:
    """Return the log-prob of each token given those before it, from one forward of the sequence alone; entry 0 is 0."""
    ids = torch.tensor(tokens, device=device)
    logits = model(ids[None], use_cache=False).logits[0, :-1].float()
    picked = torch.log_softmax(logits, dim=-1).gather(1, ids[1:, None])[:, 0]
    return np.concatenate((np.zeros(1, np.float32), picked.cpu().numpy()))


def model_of_state(model_class: Any, config: Any, state: Mapping[str, Tensor], dtype: torch.dtype) -> Any:
    """A model in evaluation mode with the weights of a state dict, under the names of its modules or of its files.

    Raises WeightsRejected if the state dict lacks a tensor of the model, or has one that the model does not use as it is.
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
                f"{problem.split('_')[0]} tensors {', '.join(names[:8])}: send the whole state dict of the configured model"
            )
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    tied = model.config.get_text_config().tie_word_embeddings and model._tied_weights_keys
    if tied and outputs is not None and outputs.weight is not inputs.weight:
        raise WeightsMismatch(
            "the output layer differs from the embedding, but config.json ties them: send them equal or untie the config"
        )
    use_whole_attention(model)
    return model.eval()
