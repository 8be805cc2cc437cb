"""The port between the step loop (numpy, slots) and the code that computes the model (tensors, device).

Invariants: one call runs under one set of weights, and positions of a slot are computed in order. Only the compute
thread calls it, except for `lay_out`, which the loader thread calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollmesh.services.inference.engines.common.sampling import Rules, stream_starts
from rollmesh.services.inference.engines.torch.slots import PrefixReuse
from rollmesh.shared.domain.outputs import NO_TOKEN
from rollmesh.shared.domain.trajectory import Columns

Ints = NDArray[np.int64]
LoadedWeights = Any
"""One whole set of weights in the layout of a runner. Its type is known to that runner alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Consecutive tokens of one sequence, for `slot` from position `start` on."""

    slot: int
    start: int
    tokens: NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRules:
    """Sampling rules per row, as host arrays [B]. `positions` are those of the tokens to draw."""

    seeds: Ints
    positions: Ints
    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    top_k: Ints
    outputs: tuple[str, ...] = ()
    """Outputs that some row wants; every row gets them."""
    num_top: int = 0
    """Largest k of `top_k` that some row wants; every row gets as many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Host arrays: `tokens` [B], and columns [B] or [B, k]: `logprobs`, `logprobs_model` and the arrays of the
    outputs."""

    tokens: NDArray[np.int32]
    columns: Columns


class Runner(Protocol):
    """One model on one device with room for a fixed number of sequences."""

    vocab_size: int
    reuse: PrefixReuse

    def lay_out(self, state: dict[str, Tensor]) -> LoadedWeights:
        """Return the weights in a state dict. Raises WeightsMismatch naming the first tensor that does not fit."""
        ...

    def copy_prefix(self, source: int, targets: list[int], num_tokens: int) -> None:
        """Copy the first `num_tokens` positions of `source` to other slots. Called only under `PrefixReuse.ANY`."""
        ...

    def decode(self, weights: LoadedWeights, tokens: Ints, positions: Ints, slots: Ints, rules: RowRules) -> Drawn:
        """Feed `tokens` [B] at `positions` to ascending `slots`, and draw the next token of each."""
        ...

    def prefill(self, weights: LoadedWeights, spans: list[Span], drawing: Ints, rules: RowRules) -> Drawn:
        """Compute the spans, and draw the token after the spans numbered `drawing` (`rules` are theirs)."""
        ...

    def score(
        self,
        weights: LoadedWeights,
        sequences: list[NDArray[np.int32]],
        outputs: tuple[str, ...] = (),
        num_top: int = 0,
    ) -> list[Columns]:
        """Return `logprobs` of each token given those before it, under the plain softmax, and the arrays of `outputs`.

        Row 0 is as `shifted` describes. Does not change slots.
        """
        ...


def shifted(columns: Columns) -> Columns:
    """Turn rows that follow each token of a sequence into rows of each token: drop the last row, and put one in front
    for the first token, which no distribution precedes. That row is -1 in `top_k_ids`, and 0 elsewhere."""
    return {
        name: np.concatenate((np.full_like(rows[:1], NO_TOKEN if name == "top_k_ids" else 0), rows[:-1]))
        for name, rows in columns.items()
    }


def sampling_rules(rules: RowRules, device: torch.device) -> Rules:
    """Return row rules as tensors."""

    def tensor(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return Rules(
        streams=tensor(stream_starts(rules.seeds, rules.positions)),
        temperature=tensor(rules.temperature),
        top_p=tensor(rules.top_p),
        top_k=tensor(rules.top_k),
        any_tempered=bool((rules.temperature != 1.0).any()),
        any_truncated=bool((rules.top_p < 1.0).any() or (rules.top_k > 0).any()),
        any_greedy=bool((rules.temperature <= 0.0).any()),
        outputs=rules.outputs,
        num_top=rules.num_top,
    )


def drawn(tokens: Tensor, columns: Mapping[str, Tensor]) -> Drawn:
    """Return sampled tensors as host arrays."""
    return Drawn(
        tokens=tokens.to(dtype=torch.int32, device="cpu").numpy(),
        columns={name: values.cpu().numpy() for name, values in columns.items()},
    )
