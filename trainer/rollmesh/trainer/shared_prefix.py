"""Compute the common prefix of several sequences once: choose the sequences, and make the attention mask of their row.

The samples of a group repeat the tokens of their prompt. A row with a shared prefix has the tokens of the prefix once,
and then what follows it in each sequence:

    tokens      p p p p a a a b b c c c c       three sequences: p p p p a a a,  p p p p b b,  p p p p c c c c
    positions   0 1 2 3 4 5 6 4 5 4 5 6 7

A token attends to the tokens before it that are in the prefix or in its own sequence. So its state is that of the
sequence alone, up to the order of sums, and the gradients of all sequences reach the prefix. The first token of each
remainder is predicted at the last position of the prefix. A model whose layers mix positions in another way than by
attention with this mask cannot share; `self_test` finds that out.

The mask is dense, with 4 bytes (2 in bfloat16) per pair of positions of a row, one for all layers and one more for
windows. That is why the length of such a row is limited (`learner.packing.shared_row_tokens`). ADR 17 compares the
alternatives.

Collaborators: `packing` (places the rows), `forward` (gives the mask to the model), `self_test`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollmesh.trainer.config import PackingConfig
from rollmesh.trainer.sequences import Routes, Sequence1D

SQUARE_TOKENS = 4096
"""Length of a row for which attention takes as long as the linear layers, for a model of width 1,024."""
_WORTH = 0.9
"""Largest work of a row with a shared prefix, as a part of that of its sequences in separate rows. A few common tokens,
such as those of a chat template, and long remainders are not worth a longer row."""


def square_tokens(width: int) -> int:
    """Return `SQUARE_TOKENS` of a model whose hidden states have this width.

    A token costs about 26 width^2 operations in the linear layers of a decoder, and a pair of tokens 4 width in its
    attention, which makes 6.5 widths. Measured on a CPU with `python -m benchmarks shared_prefix`: 4 widths, because
    attention runs slower than matrix products.
    """
    return 4 * width


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Sequences that are placed in a row together: a common prefix once, and then the remainder of each."""

    sequences: tuple[int, ...]
    """Their indices."""
    prefix_tokens: int
    """Length of the prefix; 0 for a sequence that shares nothing."""
    num_tokens: int
    """Length of the prefix and of all remainders."""


def alone(sequences: Sequence[Sequence1D]) -> list[SharedPrefix]:
    """Return each sequence without a shared prefix."""
    return [SharedPrefix((index,), 0, len(s.token_ids)) for index, s in enumerate(sequences)]


def shared_prefixes(
    sequences: Sequence[Sequence1D], packing: PackingConfig, square: int = SQUARE_TOKENS
) -> list[SharedPrefix]:
    """Return every sequence once, together with those with which it shares a prefix, so that the work is least.

    The work of a row of T tokens is T + T^2 / `square`, and a shorter row than `packing.row_tokens` is filled with
    others. Each result has at most `packing.shared_row_tokens` tokens unless it is a sequence that shares nothing, and
    at most as many targets as tokens, so that the outputs of a row are not larger than those of a row without a shared
    prefix. Sequences are compared by their tokens and their routes, and a sequence has one shared prefix. The results
    are in the order of their first sequences.
    """

    def work(tokens: int) -> int:
        return tokens * (square + max(tokens, packing.row_tokens))

    order = sorted(range(len(sequences)), key=lambda i: (sequences[i].token_ids.astype(">u4").tobytes(), i))
    lengths = [len(sequences[i].token_ids) for i in order]
    targets = [int(sequences[i].target_mask.sum()) for i in order]
    common = [_common(sequences[a], sequences[b]) for a, b in pairwise(order)]
    # Equal beginnings are neighbors in this order. `least[n]` is the least work of the first n sequences, and
    # `chosen[n]` the last result with which they have it: its first sequence and its prefix.
    least, chosen = [0], [(0, 0)]
    for end in range(1, len(order) + 1):
        prefix, tokens, wanted = lengths[end - 1], lengths[end - 1], targets[end - 1]
        separate = work(tokens)
        best, choice = least[end - 1] + separate, (end - 1, 0)
        for first in range(end - 2, -1, -1):
            prefix = min(prefix, common[first])
            tokens, wanted, separate = tokens + lengths[first], wanted + targets[first], separate + work(lengths[first])
            row = tokens - (end - first - 1) * prefix
            if not prefix or row > packing.shared_row_tokens:  # more sequences make neither better
                break
            if wanted <= row and work(row) <= _WORTH * separate and least[first] + work(row) < best:
                best, choice = least[first] + work(row), (first, prefix)
        least.append(best)
        chosen.append(choice)
    found, end = [], len(order)
    while end:
        first, prefix = chosen[end]
        members = tuple(sorted(order[first:end]))
        found.append(SharedPrefix(members, prefix, sum(lengths[first:end]) - (len(members) - 1) * prefix))
        end = first
    return sorted(found, key=lambda one: one.sequences)


def attention_mask(model_config: Any, parts: Tensor, position_ids: Tensor, dtype: torch.dtype) -> Any:
    """Return what a model gets as `attention_mask` for rows with shared prefixes: [R, 1, T, T], 0 where a position
    (third dimension) attends to another and the lowest number elsewhere; or one for each type of layers, if the model
    has layers with windows and others.

    `parts` [2, R, T] is that of `MicroBatch`. `model_config` is the configuration of the language model.
    """
    own, prefix = parts
    sees = ((own[:, :, None] == own[:, None, :]) | (prefix[:, :, None] == own[:, None, :])).tril()
    types = set(getattr(model_config, "layer_types", None) or ())
    window = getattr(model_config, "sliding_window", None)
    if not window or (types and _WINDOWED not in types):
        return _additive(sees, dtype)
    near = sees & (position_ids[:, :, None] - position_ids[:, None, :] < window)
    if not types:  # every layer has the window
        return _additive(near, dtype)
    return {_WHOLE: _additive(sees, dtype), _WINDOWED: _additive(near, dtype)}


_WHOLE, _WINDOWED = "full_attention", "sliding_attention"
"""Types of layers, as transformers calls them."""


def _additive(sees: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(sees.shape, dtype=dtype, device=sees.device)
    return mask.masked_fill_(~sees, torch.finfo(dtype).min)[:, None]


def _common(first: Sequence1D, second: Sequence1D) -> int:
    """Return the number of tokens at the beginning of two sequences that are equal and are sent to equal experts."""
    length = min(len(first.token_ids), len(second.token_ids))
    differs = first.token_ids[:length] != second.token_ids[:length]
    mine, theirs = first.routes, second.routes
    if mine is not None or theirs is not None:
        differs |= _recorded(mine, length) != _recorded(theirs, length)
    if mine is not None and theirs is not None:
        differs |= mine.recorded[:length] & (mine.experts[:length] != theirs.experts[:length]).any(-1)
    different = np.flatnonzero(differs)
    return int(different[0]) if len(different) else length


def _recorded(routes: Routes | None, length: int) -> NDArray[np.bool_]:
    return np.zeros(length, np.bool_) if routes is None else routes.recorded[:length]
