"""Test before the first update whether the packed forward of a loaded model equals the plain forward.

Whether several sequences can share a row depends on the architecture. A recurrent layer carries its state from one
sequence into the next. An output layer may be followed by a scaling that only the model's own forward applies.
transformers has no flag for this, so a few short random sequences are run through both forwards, and values and
gradients are compared. This is done twice: on the loaded model, and on a small model of its configuration with spread
weights (`spread_model`). The choice holds for the whole run, so it must not depend on weights that hide a difference as
they are found:

    packed equals plain                       -> PACKED
    else, plain does not see later tokens     -> UNPACKED: one sequence per forward, the model's own logits
    else                                      -> the model is rejected: it is not a causal language model

The cost is bounded: 50 tokens for each, and gradients of at most `_GRADIENT_ELEMENTS` parameters. Two properties that
short sequences cannot show are handled by rule. Attention windows are set to `_WINDOW` tokens during the test, so that
sequences exceed them. Models whose rotary frequencies depend on the longest position of a forward are never packed.

Sequences that share a prefix (`shared_prefix`) are compared in the same way if the settings request it. A model for
which they differ is rejected with the name of the setting.

Collaborators: `forward` (both forwards), `spread_model`, `update` (uses the result).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollmesh.shared.domain.trajectory import IntArray
from rollmesh.shared.errors import ConfigError
from rollmesh.trainer.config import PackingConfig
from rollmesh.trainer.forward import ForwardMode, target_logits, target_logprobs
from rollmesh.trainer.model_config import (
    check_trainable,
    compute_device,
    context_length,
    freeze_other_parts,
    text_config,
    use_whole_attention,
)
from rollmesh.trainer.packing import MicroBatch, pack
from rollmesh.trainer.sequences import Sequence1D, num_targets
from rollmesh.trainer.sharding import class_name
from rollmesh.trainer.spread_model import MODEL_ERRORS, SpreadCopy, model_error

_log = logging.getLogger(__name__)

_LENGTHS = (20, 13, 9, 5, 3)
_PACKING = PackingConfig(row_tokens=24, micro_batch_tokens=72)
"""Rows of 20 + 3, 13 + 9 and 5 tokens in one micro-batch: two packed rows, and padding."""
_SHARED_PACKING = PackingConfig(row_tokens=24, micro_batch_tokens=72, shared_row_tokens=32)
_SHARED = ((9, (9, 6, 4, 0)), (7, (5, 5)), (0, (11,)))
"""Lengths of prefixes, and of what follows them in each sequence: rows of 9 + 19, 7 + 10 and 11 tokens in one
micro-batch."""
_WINDOW = 4
_WINDOW_NAMES = ("sliding_window", "attention_chunk_size", "attention_window_size", "local_attention", "window_size")
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
_TOLERANCE = 1e-4
"""Largest difference, relative to the largest value. Rounding in float32 gives about 1e-6, a leak between sequences
1e-3 and more."""
_ROUNDED_TOLERANCE = 0.05
"""The same for a forward in bfloat16, which rounds to 8 bits: 0.01 and less where the model allows it, infinite where
it overflows."""
_GRADIENT_ELEMENTS = 2**24


@dataclass(frozen=True, slots=True)
class ForwardChoice:
    """The forward that updates use. `reason` is why it is not packed, empty if it is."""

    mode: ForwardMode
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Computed:
    """Log-probs [m] of the wanted tokens, and the gradients of a random weighting of them."""

    logprobs: Tensor
    gradients: tuple[Tensor, ...]


def choose_forward(model: PreTrainedModel, spread: SpreadCopy | None = None) -> ForwardChoice:
    """Return the fastest forward that equals the plain one. Raises ValueError for a model that cannot be trained, and
    MemoryError or torch.OutOfMemoryError if memory runs out. `spread` is the small copy of the model that several tests
    share.

    Weights, gradients and random generators do not change. The model is in evaluation mode afterwards, with an
    attention that computes the whole model, and its parameters outside the text part are frozen.
    """
    check_trainable(model)
    prepare(model)
    sequences = _random_sequences(model)
    parameters = _compared_parameters(model)
    with _short_windows(model):
        try:
            plain = _compute(model, sequences, parameters, ForwardMode.UNPACKED)
        except MODEL_ERRORS as error:
            raise ValueError(
                f"{type(model).__name__} cannot be trained: its forward on tokens alone raises {model_error(error)}; "
                "expected a causal language model"
            ) from error
        _check_causal(model, sequences, plain.logprobs)
        reason = _why_not_packed(model, sequences, parameters, plain)
    reason = reason or spread_difference(spread or SpreadCopy(model))
    choice = ForwardChoice(ForwardMode.UNPACKED if reason else ForwardMode.PACKED, reason)
    if reason:
        _log.warning(
            "training runs one sequence per forward, which is slower: model=%s reason=%s", type(model).__name__, reason
        )
    else:
        _log.info("training runs packed sequences, verified against the plain forward: model=%s", type(model).__name__)
    return choice


def check_shared(model: PreTrainedModel, choice: ForwardChoice, spread: SpreadCopy | None = None) -> None:
    """Raise ConfigError unless a forward of sequences that share a prefix equals the plain one, in log-probs and
    gradients.

    `spread` is as in `choose_forward`."""
    reason = f"sequences cannot share a row: {choice.reason}"
    if choice.mode is ForwardMode.PACKED:
        sequences, parameters = _sharing_sequences(model), _compared_parameters(model)
        with _short_windows(model):
            plain = _compute(model, sequences, parameters, ForwardMode.UNPACKED)
            reason = _why_different(model, sequences, parameters, plain, _SHARED_PACKING, "shared")
        reason = reason or spread_difference(spread or SpreadCopy(model), _sharing_sequences, _SHARED_PACKING, "shared")
    if reason:
        raise ConfigError(
            f"`learner.packing.shared_row_tokens`: {type(model).__name__} cannot compute the common prefix of "
            f"sequences once: {reason}; set it to 0",
            key="learner.packing.shared_row_tokens",
        )
    _log.info("sequences share prefixes, verified against the plain forward: model=%s", type(model).__name__)


def prepare(model: PreTrainedModel) -> None:
    """Set a model up as `choose_forward` does. It may be without values."""
    freeze_other_parts(model)
    use_whole_attention(model)
    model.train(False)


def known_logprobs(model: PreTrainedModel, mode: ForwardMode) -> Tensor:
    """Return the log-probs [m] of the test's sequences, for `check_rounded`."""
    return _compute(model, _random_sequences(model), (), mode).logprobs


def check_rounded(model: PreTrainedModel, mode: ForwardMode, exact: Tensor) -> None:
    """Raise ConfigError if the log-probs of a model that computes in bfloat16 are not those in float32 within
    rounding."""
    off = _difference(known_logprobs(model, mode), exact)
    if not off <= _ROUNDED_TOLERANCE:
        raise ConfigError(
            f"{class_name(model)} cannot be trained in bfloat16: its log-probs differ from those in float32 by "
            f"{off:.1e} of the largest, at "
            f"most {_ROUNDED_TOLERANCE} is allowed; set `learner.compute.precision` to float32",
            key="learner.compute.precision",
        )


def _why_not_packed(
    model: PreTrainedModel, sequences: Sequence[Sequence1D], parameters: Sequence[Tensor], plain: _Computed
) -> str:
    """Return why the packed forward must not be used; empty if it may."""
    rope = _rope_types(model) & _LENGTH_DEPENDENT_ROPE
    if rope:
        return f"its rotary embedding ({', '.join(sorted(rope))}) depends on the longest sequence of a forward"
    return _why_different(model, sequences, parameters, plain, _PACKING, "packed")


def _why_different(
    model: PreTrainedModel,
    sequences: Sequence[Sequence1D],
    parameters: Sequence[Tensor],
    plain: _Computed,
    packing: PackingConfig,
    name: str,
) -> str:
    """Return how the packed forward, which the message calls `name`, differs from the plain one; empty if it does
    not."""
    if unusable := [
        n for n, g in zip(_names(model, parameters), plain.gradients, strict=True) if not g.isfinite().all()
    ]:
        return f"the gradient of {unusable[0]} is not finite in the plain forward, so that it cannot be compared"
    try:
        packed = _compute(model, sequences, parameters, ForwardMode.PACKED, packing)
    except MODEL_ERRORS as error:
        return f"the {name} forward raises {model_error(error)}"
    off = _difference(packed.logprobs, plain.logprobs)
    if not off <= _TOLERANCE:
        return f"{name} log-probs differ from plain ones by {off:.1e} of the largest"
    off = max((_difference(a, b) for a, b in zip(packed.gradients, plain.gradients, strict=True)), default=0.0)
    if not off <= 10 * _TOLERANCE:
        return f"{name} gradients differ from plain ones by {off:.1e} of the largest"
    return ""


def spread_difference(
    spread: SpreadCopy,
    make_sequences: Callable[[PreTrainedModel], Sequence[Sequence1D]] | None = None,
    packing: PackingConfig = _PACKING,
    name: str = "packed",
) -> str:
    """Return how the packed forward of a small model with spread weights differs from the plain one; empty if it does
    not."""
    try:
        small = spread.model
        prepare(small)
        sequences, parameters = (make_sequences or _random_sequences)(small), _compared_parameters(small)
        with _short_windows(small):
            plain = _compute(small, sequences, parameters, ForwardMode.UNPACKED)
            reason = _why_different(small, sequences, parameters, plain, packing, name)
    except MODEL_ERRORS as error:
        reason = f"its plain forward raises {model_error(error)}"
    return f"on a small model of its configuration with spread weights, {reason}" if reason else ""


def _check_causal(model: PreTrainedModel, sequences: Sequence[Sequence1D], logprobs: Tensor) -> None:
    """Raise ValueError if a log-prob is not finite, or changes when later tokens are cut off."""
    if not logprobs.isfinite().all():
        raise ValueError(
            f"{type(model).__name__} cannot be trained: {int((~logprobs.isfinite()).sum())} of {len(logprobs)} "
            "log-probs of random tokens are not finite in its plain forward; check its weights"
        )
    longest, count = sequences[0], int(sequences[0].target_mask.sum())
    half = len(longest.token_ids) // 2
    prefix = Sequence1D(longest.token_ids[:half], longest.target_mask[:half])
    alone = _compute(model, [prefix], (), ForwardMode.UNPACKED).logprobs
    off = _difference(alone, logprobs[:count][: len(alone)])
    if not off <= _TOLERANCE:
        raise ValueError(
            f"{type(model).__name__} cannot be trained: the log-prob of a token changes with the tokens after it (by "
            f"{off:.1e} of the largest); expected a causal language model"
        )


def _compute(
    model: PreTrainedModel,
    sequences: Sequence[Sequence1D],
    parameters: Sequence[Tensor],
    mode: ForwardMode,
    packing: PackingConfig = _PACKING,
) -> _Computed:
    total = num_targets(sequences)
    device = compute_device(model)
    factors = torch.linspace(-1.0, 1.0, total, device=device).sin()
    logprobs = torch.zeros(total, device=device)
    sums = [torch.zeros_like(p) for p in parameters]
    for batch in pack(sequences, mode.packing(packing), device=device):
        with torch.set_grad_enabled(bool(parameters)):  # also where the caller has turned gradients off
            values = _batch_logprobs(model, batch, mode)
            loss = (values * factors[batch.target_index]).sum()
        logprobs[batch.target_index] = values.detach()
        if parameters:
            found = torch.autograd.grad(loss, parameters, allow_unused=True)
            for total_gradient, gradient in zip(sums, found, strict=True):
                if gradient is not None:
                    total_gradient += gradient
    return _Computed(logprobs, tuple(sums))


def _batch_logprobs(model: PreTrainedModel, batch: MicroBatch, mode: ForwardMode) -> Tensor:
    return target_logprobs(target_logits(model, batch, mode), batch)


def _difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest expected value; NaN if a value is not finite."""
    scale = max(float(expected.abs().max()), 1e-6) if expected.numel() else 1.0
    return float((found - expected).abs().max()) / scale if found.numel() else 0.0


def _random_sequences(model: PreTrainedModel) -> list[Sequence1D]:
    """Return sequences that depend on the vocabulary alone. Every token except the first is a target."""
    rng, usable = np.random.default_rng(0), _usable_tokens(model)
    longest = context_length(model)
    made = []
    for length in _LENGTHS:
        count = length if longest is None else min(length, longest)
        mask = np.ones(count, np.uint8)
        mask[0] = 0
        ids = rng.choice(usable, count)
        made.append(Sequence1D(ids.astype(np.int32), mask))
    return made


def _sharing_sequences(model: PreTrainedModel) -> list[Sequence1D]:
    """Return sequences with common prefixes. The last token of a prefix and those after it are targets."""
    rng, usable = np.random.default_rng(1), _usable_tokens(model)
    longest = context_length(model)
    made = []
    for prefix, lengths in _SHARED:
        common = rng.choice(usable, prefix)
        for length in lengths:
            ids = np.concatenate([common, rng.choice(usable, length)])[:longest]
            mask = (np.arange(len(ids)) >= max(1, prefix - 1)).astype(np.uint8)
            made.append(Sequence1D(ids.astype(np.int32), mask))
    return made


def _usable_tokens(model: PreTrainedModel) -> IntArray:
    """Return the token ids without that of padding, whose embedding may be zero: a norm of a zero has a gradient that
    overflows."""
    embeddings: Any = model.get_input_embeddings()
    padding = {text_config(model).pad_token_id, getattr(embeddings, "padding_idx", None)}
    return np.array([i for i in range(text_config(model).vocab_size) if i not in padding])


def _compared_parameters(model: PreTrainedModel) -> list[Tensor]:
    """Return trainable parameters, smallest first, within the limit of `_GRADIENT_ELEMENTS`."""
    chosen: list[Tensor] = []
    elements = 0
    for parameter in sorted((p for p in model.parameters() if p.requires_grad), key=torch.numel):
        elements += parameter.numel()
        if elements > _GRADIENT_ELEMENTS:
            break
        chosen.append(parameter)
    return chosen


def _names(model: PreTrainedModel, parameters: Sequence[Tensor]) -> list[str]:
    """Return the names of parameters of the model."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for parameter in parameters]


def _rope_types(model: PreTrainedModel) -> set[str]:
    config = text_config(model)
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    tables = [found, *(v for v in found.values() if isinstance(v, dict))]
    return {str(t.get("rope_type") or t.get("type")) for t in tables}


@contextmanager
def _short_windows(model: PreTrainedModel) -> Iterator[None]:
    """Shorten the attention windows. The functions that create masks read them from the configuration at each
    forward."""
    config = text_config(model)
    windows = {n: v for n in _WINDOW_NAMES if isinstance(v := getattr(config, n, None), int) and v > _WINDOW}
    try:
        for name in windows:
            setattr(config, name, _WINDOW)
        yield
    finally:
        for name, value in windows.items():
            setattr(config, name, value)
