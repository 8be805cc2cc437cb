"""The host's view of the slots of the key-value cache: their tokens, how many of them are computed, and under which
weights.

A slot is free (no useful cache), busy (a request runs in it) or resident (its request ended, and its cache is kept for
the next turn). Invariants: `kv_len[s] <= length[s]`; positions below `kv_len[s]` hold keys and values of `tokens[s]`;
`kv_version[s]` is the one version that computed all of them, or None if several did. A sequence reuses only positions
that its version computed. Residents are bounded, and the least recently used one is evicted first. `built_in_runner`
holds the tensors.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from rollmesh.shared.domain.trajectory import IntArray
from rollmesh.shared.domain.versions import PolicyVersion


class PrefixReuse(Enum):
    """Which computed positions of a slot a sequence with the same prefix may reuse."""

    ANY = "any"
    """Any prefix, also as a copy in another slot."""
    WHOLE = "whole"
    """All positions or none, because the state of the model cannot be shortened or copied."""
    NONE = "none"
    """No position: every step computes the whole sequence again."""


class Slots:
    """Struct of arrays over slots, so that a decode step handles rows with numpy and not one by one."""

    def __init__(
        self, slots_max: int, context_max: int, resident_max: int, reuse: PrefixReuse = PrefixReuse.ANY
    ) -> None:
        self.reuse = reuse
        self.tokens = np.zeros((slots_max, context_max), np.int32)
        self.length = np.zeros(slots_max, np.int64)
        self.kv_len = np.zeros(slots_max, np.int64)
        self.kv_step_oldest = np.zeros(slots_max, np.int64)
        self.kv_version: list[PolicyVersion | None] = [None] * slots_max
        self.busy = np.zeros(slots_max, bool)
        self.sampler = np.zeros(slots_max, np.int64)
        """Number of the set of weights that samples a busy slot."""
        self._resident_max = 0 if reuse is PrefixReuse.NONE else resident_max
        self._residents: dict[int, str] = {}
        """Slot to session, least recently used first."""
        self._session_slot: dict[str, int] = {}

    @property
    def kv_tokens_used(self) -> int:
        return int(self.kv_len.sum())

    @property
    def kv_tokens_reusable(self) -> int:
        """Tokens of residents."""
        return int(self.kv_len @ ~self.busy)

    def claim(self, token_ids: IntArray, session: str, version: PolicyVersion) -> int | None:
        """Return a slot for a new sequence, with the part of its prefix that `version` computed in the slot; None if
        all are busy."""
        slot = self._session_slot.get(session)
        if slot is None or self._shared(slot, token_ids, version) == 0:
            slot = self._vacant()
        if slot is None:
            return None
        kept = min(self._shared(slot, token_ids, version), len(token_ids) - 1)
        self._unlist(slot)
        self.busy[slot] = True
        self.tokens[slot, : len(token_ids)] = token_ids
        self.length[slot] = len(token_ids)
        self.kv_len[slot] = kept
        return slot

    def release(self, slot: int, session: str, *, keep: bool) -> None:
        """End a sequence. Its cache stays resident if `keep`."""
        self.busy[slot] = False
        if not keep or self._resident_max == 0 or self.kv_len[slot] == 0:
            self.kv_len[slot] = 0
            return
        self._residents[slot] = session
        if session:
            self._session_slot[session] = slot
        if len(self._residents) > self._resident_max:
            self._evict(next(iter(self._residents)))

    def keep_residents(self, versions: Collection[PolicyVersion]) -> None:
        """Evict the residents that none of `versions` computed."""
        for slot in [slot for slot in self._residents if self.kv_version[slot] not in versions]:
            self._evict(slot)

    def stamp(self, slot: int, version: PolicyVersion) -> None:
        """Record that `version` computes the first positions of a slot."""
        self.kv_version[slot] = version
        self.kv_step_oldest[slot] = version.step

    def adopt(self, slot: int, source: int, num_tokens: int) -> None:
        """Record that the first positions of `slot` are a copy of those of `source`."""
        self.kv_version[slot] = self.kv_version[source]
        self.kv_step_oldest[slot] = self.kv_step_oldest[source]
        self.kv_len[slot] = num_tokens

    def pure(self, version: PolicyVersion) -> NDArray[np.int64]:
        """Return the slots with a cache of which `version` computed every position."""
        computed = np.flatnonzero(self.kv_len)
        versions = self.kv_version
        same = [slot for slot in computed.tolist() if versions[slot] is version or versions[slot] == version]
        return np.array(same, np.int64)

    def _shared(self, slot: int, token_ids: IntArray, version: PolicyVersion) -> int:
        """Return how many positions of a slot that `version` computed a sequence shares."""
        if self.kv_version[slot] != version:
            return 0
        num = min(int(self.kv_len[slot]), len(token_ids))
        shared = common_prefix(self.tokens[slot, :num], token_ids[:num])
        whole = shared == self.kv_len[slot] and shared < len(token_ids)
        return shared if whole or self.reuse is PrefixReuse.ANY else 0

    def _vacant(self) -> int | None:
        """Return the lowest free slot, so that busy ones are close together; else the least recently used resident."""
        free = ~self.busy
        free[list(self._residents)] = False
        if free.any():
            return int(free.argmax())
        return next(iter(self._residents), None)

    def _evict(self, slot: int) -> None:
        self._unlist(slot)
        self.kv_len[slot] = 0

    def _unlist(self, slot: int) -> None:
        session = self._residents.pop(slot, "")
        if session and self._session_slot.get(session) == slot:
            del self._session_slot[session]


def common_prefix(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """Return the length of the common prefix of two rows of equal length."""
    differs = a != b
    return int(differs.argmax()) if differs.any() else len(a)


def longest_prefix(
    tokens: NDArray[np.int32], computed: NDArray[np.int64], candidates: NDArray[np.int64], token_ids: IntArray
) -> tuple[int, int]:
    """Return (slot, shared positions) of the candidate with the longest common computed prefix; (-1, 0) without one."""
    candidates = candidates[(computed[candidates] > 0) & (tokens[candidates, 0] == token_ids[0])]
    if candidates.size == 0:
        return -1, 0
    num = min(len(token_ids), int(computed[candidates].max()))
    differs = tokens[candidates, :num] != token_ids[:num]
    shared = np.where(differs.any(axis=1), differs.argmax(axis=1), num)
    shared = np.minimum(shared, computed[candidates])
    best = int(shared.argmax())
    return int(candidates[best]), int(shared[best])
