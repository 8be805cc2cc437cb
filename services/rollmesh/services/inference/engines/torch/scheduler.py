"""Schedule the next step: which requests get a slot, which prefixes are computed, and which are copied from another
slot.

Invariants: higher priority first, then arrival; running sequences are never preempted, because their cache is
preallocated; a step computes at most `prefill_tokens_max` padded prefix tokens per set of weights, so that decoding
continues beside long prefixes. A sequence is ready to decode when all its tokens except the last are computed. Changes
host state only.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rollmesh.services.inference.engine import GenerateRequest
from rollmesh.services.inference.engines.torch.slots import PrefixReuse, Slots, longest_prefix
from rollmesh.shared.domain.versions import PolicyVersion


@dataclass(slots=True)
class Sequence:
    """A request and its progress. Token positions are absolute."""

    request: GenerateRequest
    order: int
    slot: int = -1
    num_emitted: int = 0
    """Number of tokens that the caller has, including its prefix."""
    num_cached: int = 0
    submitted_s: float = 0.0
    queued_s: float = 0.0

    @property
    def num_prompt(self) -> int:
        return int(self.request.token_ids.shape[0])


@dataclass(frozen=True, slots=True)
class Copy:
    """Positions [0, num_tokens) of `source` are also those of `slot`."""

    source: int
    slot: int
    num_tokens: int


@dataclass(slots=True)
class PrefillPlan:
    """Prefix work of one step: first `copies`, then all chunks together, then `copies_after` from the results."""

    copies: list[Copy] = field(default_factory=list)
    chunks: list[tuple[int, int]] = field(default_factory=list)
    """(slot, tokens to compute from its `kv_len` on)."""
    copies_after: list[Copy] = field(default_factory=list)


class Scheduler:
    """The waiting queue and the plan of the next step."""

    def __init__(self, slots: Slots, prefill_tokens_max: int) -> None:
        self._slots = slots
        self._prefill_tokens_max = prefill_tokens_max
        self._arrivals = itertools.count()
        self._waiting: list[tuple[int, int, Sequence]] = []
        self.running: dict[int, Sequence] = {}
        """By slot."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def enqueue(self, request: GenerateRequest) -> Sequence:
        sequence = Sequence(request=request, order=next(self._arrivals), num_emitted=int(request.token_ids.shape[0]))
        heapq.heappush(self._waiting, (-request.priority, sequence.order, sequence))
        return sequence

    def withdraw(self, sequence: Sequence) -> None:
        self._waiting = [entry for entry in self._waiting if entry[2] is not sequence]
        heapq.heapify(self._waiting)

    def admit(self, active: PolicyVersion) -> list[Sequence]:
        """Move waiting sequences into slots while slots are available."""
        admitted = []
        while self._waiting:
            sequence = self._waiting[0][2]
            request = sequence.request
            slot = self._slots.claim(request.token_ids, request.session, request.version or active)
            if slot is None:
                break
            heapq.heappop(self._waiting)
            sequence.slot, sequence.num_cached = slot, int(self._slots.kv_len[slot])
            self.running[slot] = sequence
            admitted.append(sequence)
        return admitted

    def ready(self, sampler: int) -> NDArray[np.int64]:
        """Return the busy slots of a set of weights, ascending, of which only the last token is not computed."""
        slots = self._slots
        return np.flatnonzero(slots.busy & (slots.sampler == sampler) & (slots.length - slots.kv_len == 1))

    def plan_prefill(self, version: PolicyVersion, sampler: int) -> PrefillPlan:
        """Plan the prefixes of the slots that `version`, the set of weights numbered `sampler`, samples."""
        plan = PrefillPlan()
        slots = self._slots
        lacking = np.flatnonzero(slots.busy & (slots.sampler == sampler) & (slots.length - slots.kv_len > 1))
        if lacking.size == 0:
            return plan
        donors = self._slots.pure(version)
        computed = self._slots.kv_len.copy()  # as it will be after this plan's chunks
        width = 0
        for slot in sorted(lacking.tolist(), key=lambda slot: self.running[slot].order):
            missing = int(self._slots.length[slot] - self._slots.kv_len[slot])
            if computed[slot] == 0 and self._slots.reuse is PrefixReuse.ANY:
                missing = self._share(plan, slot, donors, computed)
            chunk = min(missing, self._prefill_tokens_max)
            if missing <= 1 or max(width, chunk) * (len(plan.chunks) + 1) > self._prefill_tokens_max:
                continue
            width = max(width, chunk)
            plan.chunks.append((slot, chunk))
            donors = np.append(donors, slot)
            computed[slot] = self._slots.length[slot] - missing + chunk
        return plan

    def _share(self, plan: PrefillPlan, slot: int, donors: NDArray[np.int64], computed: NDArray[np.int64]) -> int:
        """Plan to copy positions that another slot holds or will compute. Return how many the slot must compute itself
        now.

        Waiting for the chunk of another slot costs a step, so it must save at least half of the work.
        """
        length = int(self._slots.length[slot])
        prefix = self._slots.tokens[slot, : length - 1]
        source, shared = longest_prefix(self._slots.tokens, computed, donors[donors != slot], prefix)
        present = min(shared, int(self._slots.kv_len[source])) if shared else 0
        if shared > present and 2 * (shared - present) >= length - present:
            plan.copies_after.append(Copy(source, slot, shared))
            return 0
        if present:
            plan.copies.append(Copy(source, slot, present))
            computed[slot] = present
        return length - present
