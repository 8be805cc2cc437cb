"""The ranks of a trainer: processes that make each update together, each on a part of its micro-batches.

Every rank has the whole batch and computes the same table, advantages, minibatches and plan of micro-batches. The model
runs on the micro-batches of the rank, and the values per token, the loss and the gradients are then exchanged:

    table, advantages, plan        the same on every rank, from the same inputs
    from_first                     rank 0 loads or tests a whole model, and the others wait for the result
    share                          micro-batches of this rank; the others are empty ones, so that all ranks make equally many forwards
    merged, summed                 every rank gets the values of all ranks, bit for bit the same
    agree                          raises RanksDisagree where the ranks should have the same and do not

Without a process group there is one rank, and every method returns what it is given. Collectives run on CPU tensors in
the default process group, whose timeout bounds them. Collaborators: `sharding` (the model's weights on the ranks),
`update`, `feature_pass`.
"""  # noqa: E501, W505

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from rollmesh.shared.errors import RankFailed, RanksDisagree
from rollmesh.trainer.packing import MicroBatch

T = TypeVar("T")
_FIRST = timedelta(hours=2)
"""Limit of what rank 0 does alone: reading a large model takes longer than a collective may."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among `size` ranks. Every method with an exchange must be called by all ranks in the same order."""

    rank: int = 0
    size: int = 1

    def from_first(self, make: Callable[[], T]) -> T:
        """Return on every rank what `make` returns on rank 0, which alone calls it. It must be small.

        The limit of the wait is that of reading a model, not that of a collective. Raises RankFailed on the other ranks
        if `make` raises.
        """
        if self.size == 1:
            return make()
        self.gathered(None)  # a rank that has ended is found within the limit of a collective
        group = dist.new_group(timeout=_FIRST, backend="gloo")
        found: list[Any] = [None, True]
        try:
            try:
                if self.rank == 0:
                    found = [make(), False]
            finally:  # the others wait for it also if it fails
                dist.broadcast_object_list(found, group=group)
        finally:
            dist.destroy_process_group(group)
        value, has_failed = found
        if has_failed:
            raise RankFailed("rank 0 of the trainer failed while this rank waited for it; its log has the error")
        made: T = value
        return made

    def share(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return every `size`-th micro-batch from `rank` on, and empty ones until all ranks have equally many."""
        if self.size == 1:
            return list(batches)
        rounds = -(-len(batches) // self.size)
        mine = list(batches[self.rank :: self.size])
        return mine + [empty_micro_batch(batches[0]) for _ in range(rounds - len(mine))]

    def computing(self, requests: Sequence[T], batch: MicroBatch) -> Sequence[T]:
        """Return the requests that a micro-batch computes: none for one that only keeps the number of forwards
        equal."""
        return requests if self.size == 1 or len(batch.target_index) else ()

    def aligned(self, batches: list[MicroBatch], like: MicroBatch) -> list[MicroBatch]:
        """Return the micro-batches of this rank, and empty ones until it has as many as the rank with the most."""
        if self.size == 1:
            return batches
        most = max(self.gathered(len(batches)))
        return batches + [empty_micro_batch(like) for _ in range(most - len(batches))]

    def merged(self, arrays: Sequence[NDArray[np.float32] | None], rows: int) -> list[NDArray[np.float32]]:
        """Return the arrays [rows, ...] of all ranks as one. Each rank gives those of its tokens and 0 elsewhere, or
        None."""
        if self.size == 1:
            return [np.zeros(rows, np.float32) if array is None else array for array in arrays]
        shapes = zip(*self.gathered([None if a is None else a.shape[1:] for a in arrays]), strict=True)
        found = []
        for array, known in zip(arrays, shapes, strict=True):
            shape = next((s for s in known if s is not None), ())
            values = np.zeros((rows, *shape), np.float32) if array is None else array.copy()
            found.append(self.summed(torch.from_numpy(values)).numpy())
        return found

    def merged_by_name(
        self, arrays: Mapping[str, NDArray[np.float32]], mine: NDArray[np.bool_]
    ) -> dict[str, NDArray[np.float32]]:
        """Return the arrays [rows] of all ranks by name. `mine` [rows] is True at the tokens of this rank; others count
        as NaN."""
        if self.size == 1:
            return dict(arrays)
        names = sorted({name for of_rank in self.gathered(list(arrays)) for name in of_rank})
        absent = np.where(mine, np.float32(np.nan), np.float32(0))
        values = [np.where(mine, arrays[name], np.float32(0)) if name in arrays else absent for name in names]
        return dict(zip(names, self.merged(values, len(mine)), strict=True))

    def summed(self, values: Tensor) -> Tensor:
        """Return the sum over the ranks. The tensor must be on the CPU; it is overwritten."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def total(self, value: float) -> float:
        """Return the sum of a number over the ranks."""
        return value if self.size == 1 else float(self.summed(torch.tensor(value, dtype=torch.float64)))

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replace the gradients of parameters that every rank holds whole by their sums. Those that no rank has stay
        absent."""
        if self.size == 1:
            return
        held = list(parameters)
        has = [any(of_ranks) for of_ranks in zip(*self.gathered([p.grad is not None for p in held]), strict=True)]
        held = [p for p, any_rank in zip(held, has, strict=True) if any_rank]
        if not held:
            return
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten().float().cpu() for p in held])
        for parameter, part in zip(held, torch.split(self.summed(flat), [p.numel() for p in held]), strict=True):
            parameter.grad = part.view_as(parameter).to(parameter)

    def gathered(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def in_order(self, values: Sequence[T]) -> list[T]:
        """Return what all ranks have computed, one value per micro-batch of `share`, in the order of the
        micro-batches."""
        if self.size == 1:
            return list(values)
        of_ranks = self.gathered(list(values))
        rounds = max(map(len, of_ranks))
        return [of_rank[place] for place in range(rounds) for of_rank in of_ranks if place < len(of_rank)]

    def agree(self, what: str, *values: object) -> None:
        """Raise RanksDisagree, naming `what`, on every rank unless all have the same values: arrays, texts or
        numbers."""
        if self.size == 1:
            return
        digest = hashlib.sha256()
        for value in values:
            digest.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
        found = self.gathered(digest.hexdigest()[:16])
        if others := [str(rank) for rank, other in enumerate(found) if other != found[0]]:
            raise RanksDisagree(
                f"{what} of rank {', '.join(others)} differ from those of rank 0 ({', '.join(found)}); all ranks must "
                "have the same "
                "configuration, files and library versions, and user code must return the same values on each of them",
                what=what,
            )


def empty_micro_batch(like: MicroBatch) -> MicroBatch:
    """Return a micro-batch of up to two tokens of another one, without targets."""
    none = like.target_index[:0]
    return MicroBatch(
        token_ids=like.token_ids[:1, :2],
        position_ids=like.position_ids[:1, :2],
        target_row=none,
        target_col=none,
        target_next=none,
        target_index=none,
        num_tokens=0,
        sequences=(),
    )


ONE_RANK = Ranks()
"""A trainer of one process."""
