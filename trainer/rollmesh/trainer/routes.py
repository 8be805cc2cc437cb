"""Experts that the routers of an engine have chosen for the tokens of a sample, as the trainer replays them. Free of
torch.

An engine records them as the output `routed_experts` (`shared/domain/outputs.py`). Row i of a segment is of the forward
that drew its token i, whose last input is the token before, so that it is the record of this one. The tokens of prompts
and tools have no record, except for the last one before an answer. Neither has the last token of an answer.

Collaborators: `samples` (calls this module), `packing` (places the records), `router_replay` (uses them).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollmesh.shared.domain.trajectory import Segment, TrainingSample
from rollmesh.trainer.sequences import Routes

ROUTED_EXPERTS = "routed_experts"
"""The output of the engine."""


@dataclass(frozen=True, slots=True)
class RouteShape:
    """The routers of a model, in order."""

    experts: tuple[int, ...]
    """Number of experts of each router."""
    chosen: tuple[int, ...]
    """Number of experts that each router chooses for a token."""
    layers: tuple[int, ...]
    """Number of the layer of each router, from 0."""
    num_layers: int
    """Number of layers of the model, with and without routers."""

    @property
    def width(self) -> int:
        """Entries of a record: the chosen experts of all routers."""
        return sum(self.chosen)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a record as an engine sends it, see `shared/domain/outputs.py`."""
        return self.width * (1 if max(self.experts) <= 256 else 4)

    def records(self, array: NDArray[Any]) -> NDArray[Any] | None:
        """Return the records [n, width] in an array of an engine; None if it is not of such a model.

        Some servers send a place for every layer, and the places of layers without a router have no meaning."""
        if array.ndim != 2 or array.dtype.kind not in "ui":
            return None
        if array.shape[1] != self.width:
            if len(set(self.chosen)) != 1 or array.shape[1] != self.num_layers * self.chosen[0]:
                return None
            array = array.reshape(len(array), self.num_layers, -1)[:, self.layers].reshape(len(array), self.width)
        fits = (array >= 0) & (array < np.repeat(self.experts, self.chosen))
        return array if fits.all() else None


def fits(segment: Segment, shape: RouteShape) -> bool:
    """Return whether the segment has either no records, or records of a model with these routers."""
    array = segment.arrays.get(ROUTED_EXPERTS)
    return array is None or shape.records(array) is not None


def routes_of(sample: TrainingSample, shape: RouteShape) -> Routes:
    """Return the records of a sample, all of whose segments `fits` accepts."""
    num_tokens = sum(s.num_tokens for s in sample.segments)
    dtype = np.uint8 if max(shape.experts) <= 256 else np.int32
    experts, recorded = np.zeros((num_tokens, shape.width), dtype), np.zeros(num_tokens, np.bool_)
    start = 0
    for segment in sample.segments:
        array = segment.arrays.get(ROUTED_EXPERTS)
        records = None if array is None else shape.records(array)
        if records is not None:
            records = records[1:] if start == 0 else records  # no token of the sample precedes the first one
            at = slice(max(start - 1, 0), max(start - 1, 0) + len(records))
            experts[at], recorded[at] = records, True
        start += segment.num_tokens
    return Routes(experts, recorded)
