"""Pack sequences of different lengths into micro-batches with almost no padding.

Several sequences share a row. Position ids restart at each sequence, by which the model's attention separates them, so
a packed forward equals one forward per sequence. If a model does not do so, `self_test` detects it, and each row has
one sequence.

Rows and micro-batches are short on purpose. The longest remaining sequence starts a row, which is filled up to
`row_tokens` (or to the length of the first sequence, if longer) with shorter ones, longest first. Longer rows pack a
little tighter, but attention costs the square of the row, and a micro-batch beyond the cache is slower. Measured for
the 0.36M model, 256 conversations of 30-130 tokens, one core, forward + backward, thousand real tokens/s (share of
positions that are not padding):

    row x micro-batch   128 x 1024: 20.5 (99 %)   128 x 4096: 11.7 (96 %)   256 x 2048: 11.4 (99 %)   512 x 2048: 9.6 (100 %)
    padded, in order of arrival, 8 / 32 at a time: 14.0 (66 %) / 11.7 (60 %);   one by one: 13.1

With `shared_row_tokens`, sequences with a common prefix (the samples of a group) are placed together, with the prefix
once (`shared_prefix`). They are in one row, and count with the tokens that are computed. Their rows are no longer than
`shared_row_tokens`, and are in separate micro-batches, because every row of a micro-batch with a shared prefix needs a
mask.

Invariants: every sequence is whole in exactly one row, and the plan is a pure function of the lengths, and with shared
prefixes of the sequences. Collaborators: `forward` runs a micro-batch; `update` and `sft` convert samples to sequences.
"""  # noqa: E501, W505

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollmesh.shared.domain.trajectory import IntArray
from rollmesh.trainer.config import PackingConfig
from rollmesh.trainer.sequences import Sequence1D
from rollmesh.trainer.shared_prefix import SQUARE_TOKENS, SharedPrefix, alone, shared_prefixes


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Inputs of one forward, [R, T] = rows x row length, and the positions of its targets.

    Positions restart at each sequence of a row, after a shared prefix at its length; padding has position 0. The wanted
    tokens are at (`target_row`, `target_next`) [m], and are predicted at (`target_row`, `target_col`) [m]: one column
    before, or the last column of a shared prefix. `target_index` [m] is the index of each target among all targets of
    the plan, in the order "sequence by sequence, token by token".
    """

    token_ids: Tensor
    position_ids: Tensor
    target_row: Tensor
    target_col: Tensor
    target_next: Tensor
    target_index: Tensor
    num_tokens: int
    """Tokens that are computed, without padding."""
    sequences: tuple[int, ...]
    """Indices of its sequences, in the order of their targets."""
    parts: Tensor | None = None
    """[2, R, T] integers, if any of its sequences share a prefix: the part of its row that a token is in, and the part
    that is the prefix of this one or the part itself. A token attends to the tokens before it in both. Padding is in
    part 0."""
    experts: Tensor | None = None
    """[R, T, k] integers, if any of its sequences has routes: their experts."""
    recorded: Tensor | None = None
    """[R, T] booleans beside it: whether the token has a record of its experts. Padding has none."""

    @property
    def target_ids(self) -> Tensor:
        """The wanted tokens [m]."""
        return self.token_ids[self.target_row, self.target_next]


def pack(
    sequences: Sequence[Sequence1D],
    config: PackingConfig,
    *,
    device: str | torch.device = "cpu",
    square: int = SQUARE_TOKENS,
) -> list[MicroBatch]:
    """Return micro-batches that contain every sequence once: first those with shared prefixes, and of each kind the
    longest rows first. `square` is that of `shared_prefixes`."""
    placed = shared_prefixes(sequences, config, square) if config.shared_row_tokens else alone(sequences)
    shared, separate = ([one for one in placed if bool(one.prefix_tokens) == shares] for shares in (True, False))
    offsets = np.concatenate([[0], np.cumsum([int(s.target_mask.sum()) for s in sequences])])
    found = []
    for some, row_tokens in ((shared, min(config.row_tokens, config.shared_row_tokens)), (separate, config.row_tokens)):
        lengths = [one.num_tokens for one in some]
        plan = plan_micro_batches(plan_rows(lengths, row_tokens), lengths, config.micro_batch_tokens)
        found += [_build([[some[i] for i in row] for row in rows], sequences, offsets, device) for rows in plan]
    return found


def plan_rows(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Return indices per row, by first-fit decreasing. Rows are in the order of their first sequence, longest first."""
    rows: list[list[int]] = []
    free: list[int] = []
    first_open = 0
    shortest = min(lengths, default=0)
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        while first_open < len(rows) and free[first_open] < shortest:
            first_open += 1  # skips full rows at the front, which keeps the scan short for many rows
        row = next((r for r in range(first_open, len(rows)) if free[r] >= length), None)
        if row is None:
            rows.append([index])
            free.append(max(row_tokens, length) - length)
        else:
            rows[row].append(index)
            free[row] -= length
    return rows


def plan_micro_batches(
    rows: Sequence[Sequence[int]], lengths: Sequence[int], micro_batch_tokens: int
) -> list[list[Sequence[int]]]:
    """Group rows, longest first, so that rows x longest row is within the limit. A single row may exceed it."""
    batches: list[list[Sequence[int]]] = []
    width = 0
    for row in sorted(rows, key=lambda r: -sum(lengths[i] for i in r)):
        if not batches or (len(batches[-1]) + 1) * width > micro_batch_tokens:
            batches.append([])
            width = sum(lengths[i] for i in row)
        batches[-1].append(row)
    return batches


def fill_ratio(batches: Sequence[MicroBatch]) -> float:
    """Return the share of computed positions that have a token; the others are padding."""
    slots = sum(b.token_ids.numel() for b in batches)
    return sum(b.num_tokens for b in batches) / slots if slots else 1.0


def saved_ratio(batches: Sequence[MicroBatch], sequences: Sequence[Sequence1D]) -> float:
    """Return the share of the tokens of the sequences that are not computed, because they are in a prefix that others
    share."""
    total = sum(len(s.token_ids) for s in sequences)
    return 1 - sum(b.num_tokens for b in batches) / total if total else 0.0


def _build(
    rows: Sequence[Sequence[SharedPrefix]],
    sequences: Sequence[Sequence1D],
    offsets: IntArray,
    device: str | torch.device,
) -> MicroBatch:
    width = max(sum(one.num_tokens for one in row) for row in rows)
    ids = np.zeros((len(rows), width), dtype=np.int64)
    positions = np.zeros_like(ids)
    parts = np.zeros((2, *ids.shape), dtype=np.int64)
    found = [
        routes for row in rows for one in row for i in one.sequences if (routes := sequences[i].routes) is not None
    ]
    experts = np.zeros((*ids.shape, found[0].experts.shape[1]), found[0].experts.dtype) if found else None
    recorded = np.zeros(ids.shape, np.bool_)
    targets: list[IntArray] = []
    for r, row in enumerate(rows):
        start = part = 0
        for one in row:
            shared, prefix = part + 1, start + one.prefix_tokens
            parts[:, r, start:prefix] = shared
            stop = prefix
            for part, index in enumerate(one.sequences, shared + 1):
                sequence = sequences[index]
                begin, stop = stop, stop + len(sequence.token_ids) - one.prefix_tokens
                columns = np.concatenate([np.arange(start, prefix), np.arange(begin, stop)])
                ids[r, columns] = sequence.token_ids
                positions[r, columns] = np.arange(len(columns))
                if experts is not None and (routes := sequence.routes) is not None:
                    experts[r, columns], recorded[r, columns] = routes.experts, routes.recorded
                parts[:, r, begin:stop] = [[part], [shared]]
                wanted = np.flatnonzero(sequence.target_mask)
                places = offsets[index] + np.arange(len(wanted))
                targets.append(np.stack([np.full_like(wanted, r), columns[wanted - 1], columns[wanted], places]))
            start = stop
    row_cols_index = torch.as_tensor(np.concatenate(targets, axis=1), device=device)
    shares = any(one.prefix_tokens for row in rows for one in row)
    return MicroBatch(
        token_ids=torch.as_tensor(ids, device=device),
        position_ids=torch.as_tensor(positions, device=device),
        target_row=row_cols_index[0],
        target_col=row_cols_index[1],
        target_next=row_cols_index[2],
        target_index=row_cols_index[3],
        num_tokens=sum(one.num_tokens for row in rows for one in row),
        sequences=tuple(index for row in rows for one in row for index in one.sequences),
        parts=torch.as_tensor(parts, device=device) if shares else None,
        experts=None if experts is None else torch.as_tensor(experts, device=device),
        recorded=None if experts is None else torch.as_tensor(recorded, device=device),
    )
