"""Compare a runner with the plain transformers forward, on a small model of the same configuration with random weights.

It compares the scores of a batch, and the log-probs of drawn tokens when a prefix is computed in two chunks, copied to
another slot, and continued token by token. The weights are spread, and a large model is cut (`spread_model`). Windows
are made shorter than the sequences.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollmesh.services.inference.engines.torch.runner import Drawn, LoadedWeights, RowRules, Runner, Span
from rollmesh.services.inference.engines.torch.slots import PrefixReuse
from rollmesh.shared.weights.model_folder import positions_max
from rollmesh.trainer.model_config import auto_class, use_whole_attention
from rollmesh.trainer.spread_model import spread_model

TOLERANCE = 1e-3
"""Largest allowed difference of a log-prob in float32, in nats. Correct runners differ by less than 1e-4, wrong ones by
more than 1e-2."""
SLOTS = 4
LENGTHS = (40, 23, 6)
_CONTEXT = 64
_WINDOW = 12


def reference_model(config: Any) -> Any:
    """Return a small float32 model of the configuration with random weights, in evaluation mode."""
    model = spread_model(_with_short_windows(config), auto_class(config).from_config)
    use_whole_attention(model)
    return model


def _with_short_windows(config: Any) -> Any:
    config = copy.deepcopy(config)
    text = config.get_text_config()
    for name in ("sliding_window", "attention_window_size", "window_size", "attention_chunk_size"):
        if isinstance(value := getattr(text, name, None), int) and value > _WINDOW:
            setattr(text, name, _WINDOW)
    return config


class SelfCheck:
    """Random sequences and their log-probs under the plain forward of one model."""

    def __init__(self, model: Any, device: torch.device) -> None:
        text = model.config.get_text_config()
        numbers = np.random.default_rng(0)
        self.model = model.to(device)
        self.context_max = min(_CONTEXT, positions_max(text.to_dict()) or _CONTEXT)
        lengths = [min(length, self.context_max) for length in LENGTHS]
        self._sequences = [numbers.integers(1, text.vocab_size, length).astype(np.int32) for length in lengths]
        with torch.inference_mode():
            self._logprobs = [self._plain(sequence, device) for sequence in self._sequences]

    def _plain(self, sequence: NDArray[np.int32], device: torch.device) -> NDArray[np.float32]:
        """Return log-probs [length, vocab] of the sequence alone, without a cache."""
        ids = torch.tensor(sequence.astype(np.int64), device=device)[None]
        logits = self.model(ids, use_cache=False).logits[0].float()
        return np.asarray(torch.log_softmax(logits, dim=-1).cpu().numpy())

    def difference(self, runner: Runner, weights: LoadedWeights) -> float:
        """Return the largest difference of a log-prob, in nats; infinite if one is not a number."""
        worst = 0.0
        for sequence, plain, columns in zip(
            self._sequences, self._logprobs, runner.score(weights, self._sequences), strict=True
        ):
            expected = np.concatenate(([0.0], plain[np.arange(len(sequence) - 1), sequence[1:]]))
            worst = max(worst, _distance(columns["logprobs"], expected))
        return max(worst, self._of_generation(runner, weights))

    def _of_generation(self, runner: Runner, weights: LoadedWeights) -> float:
        """Run all sequences side by side: two chunks, then token by token, with one sequence copied to another slot."""
        texts, plain = dict(enumerate(self._sequences)), dict(enumerate(self._logprobs))
        ends = dict.fromkeys(texts, 0)
        worst = 0.0

        def judge(slots: list[int], drawn: Drawn) -> float:
            expected = [plain[slot][ends[slot] - 1, token] for slot, token in zip(slots, drawn.tokens, strict=True)]
            return max(worst, _distance(drawn.columns["logprobs_model"], np.array(expected)))

        for share in (0.4, 0.6):
            spans = []
            for slot, text in texts.items():
                start, ends[slot] = ends[slot], max(ends[slot] + 1, int(share * len(text)))
                spans.append(Span(slot=slot, start=start, tokens=text[start : ends[slot]]))
            drawn = runner.prefill(weights, spans, np.arange(len(spans)), _rules(list(ends.values())))
            worst = judge(list(texts), drawn)
        if runner.reuse is PrefixReuse.ANY:
            copied = len(texts)
            runner.copy_prefix(0, [copied], ends[0])
            texts[copied], plain[copied], ends[copied] = texts[0], plain[0], ends[0]
        while live := [slot for slot, text in texts.items() if ends[slot] < len(text)]:
            tokens = np.array([texts[slot][ends[slot]] for slot in live], np.int64)
            positions = np.array([ends[slot] for slot in live], np.int64)
            for slot in live:
                ends[slot] += 1
            drawn = runner.decode(weights, tokens, positions, np.array(live), _rules([ends[slot] for slot in live]))
            worst = judge(live, drawn)
        return worst


def _distance(found: NDArray[np.float32], expected: NDArray[Any]) -> float:
    difference = float(np.abs(found - expected).max(initial=0.0))
    return difference if math.isfinite(difference) else math.inf


def _rules(positions: list[int]) -> RowRules:
    """Return rules of plain sampling with one seed per row."""
    num = len(positions)
    return RowRules(
        seeds=np.arange(num),
        positions=np.array(positions, np.int64),
        temperature=np.ones(num, np.float32),
        top_p=np.ones(num, np.float32),
        top_k=np.zeros(num, np.int64),
    )
