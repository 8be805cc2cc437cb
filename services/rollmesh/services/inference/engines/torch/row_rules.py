"""Sampling and stop rules per slot as arrays, so that a step needs no loop over rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollmesh.services.inference.engine import GenerateRequest
from rollmesh.services.inference.engines.torch.runner import RowRules


class SlotRules:
    """Struct of arrays over slots. A row is valid while its slot is busy."""

    def __init__(self, slots_max: int, vocab_size: int) -> None:
        self.ends = np.zeros((slots_max, vocab_size), np.uint8)
        """Flags of `stop.StopRules.marks` per vocabulary item."""
        self.length_max = np.zeros(slots_max, np.int64)
        self.flush_at = np.zeros(slots_max, np.int64)
        """Length at which the next delta is due."""
        self._seeds = np.zeros(slots_max, np.int64)
        self._temperature = np.ones(slots_max, np.float32)
        self._top_p = np.ones(slots_max, np.float32)
        self._top_k = np.zeros(slots_max, np.int64)
        self._outputs: list[tuple[str, ...]] = [()] * slots_max
        self._num_top = np.zeros(slots_max, np.int64)

    def set(self, slot: int, request: GenerateRequest, *, length_max: int, marks: NDArray[np.uint8]) -> None:
        params = request.params
        self.ends[slot] = marks
        self.length_max[slot] = length_max
        self.flush_at[slot] = 0
        self._seeds[slot] = np.uint64(params.seed).astype(np.int64)
        self._temperature[slot] = params.temperature
        self._top_p[slot] = params.top_p
        self._top_k[slot] = params.top_k
        self._outputs[slot] = request.outputs
        self._num_top[slot] = request.num_top if "top_k" in request.outputs else 0

    def sampling(self, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> RowRules:
        return RowRules(
            seeds=self._seeds[slots],
            positions=positions,
            temperature=self._temperature[slots],
            top_p=self._top_p[slots],
            top_k=self._top_k[slots],
            outputs=tuple({name for slot in slots.tolist() for name in self._outputs[slot]}),
            num_top=int(self._num_top[slots].max(initial=0)),
        )
