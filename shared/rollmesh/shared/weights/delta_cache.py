"""The deltas of a store: computed once for each pair of chunks, or received, and kept in memory for the next node that
asks."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from pathlib import Path

from rollmesh.shared.errors import HashMismatch, UnknownBlob
from rollmesh.shared.weights.blobs import BlobStore
from rollmesh.shared.weights.delta import encode_delta

WORTH = 0.9
"""Largest delta that is sent, as a share of the chunk."""
PAIR_BYTES = 512
"""Memory that a pair counts besides its delta, more than its digests and its entry take. It bounds the number of empty
deltas."""
Pair = tuple[str, str]
"""Digests of the base and of the new chunk."""


class DeltaCache:
    """The newest deltas, up to `bytes_max` together. Used on one event loop."""

    def __init__(self, store: BlobStore, *, bytes_max: int) -> None:
        self._store = store
        self._bytes_max = bytes_max
        self._bytes = 0
        self._kept: OrderedDict[Pair, bytes] = OrderedDict()
        """An empty one is a pair whose delta is not worth sending."""
        self._making: dict[Pair, asyncio.Task[bytes]] = {}

    async def get(self, base: str, new: str) -> bytes | None:
        """Return the delta from the chunk `base` to `new`; None if it saves little, or the store has not both
        chunks."""
        pair = (base, new)
        if pair in self._kept:
            self._kept.move_to_end(pair)
            return self._kept[pair] or None
        making = self._making.get(pair)
        if making is None:
            making = self._making[pair] = asyncio.create_task(self._make(pair))
        await asyncio.wait([making])
        return None if making.cancelled() else making.result() or None

    def add(self, base: str, new: str, delta: bytes) -> None:
        """Keep a delta that was received and has made the right chunk."""
        size = len(delta) + PAIR_BYTES
        if size <= self._bytes_max and (base, new) not in self._kept:
            self._kept[base, new] = delta
            self._bytes += size
            while self._bytes > self._bytes_max:
                self._bytes -= len(self._kept.popitem(last=False)[1]) + PAIR_BYTES

    @property
    def num_pairs(self) -> int:
        """Number of pairs that are kept, with or without a delta."""
        return len(self._kept)

    async def close(self) -> None:
        """Cancel what is being computed."""
        for task in self._making.values():
            task.cancel()
        if self._making:
            await asyncio.wait(self._making.values())

    async def _make(self, pair: Pair) -> bytes:
        try:
            paths = [await self._store.open(digest) for digest in pair]
            delta = await asyncio.to_thread(_worthwhile, *paths)
            self.add(*pair, delta)
        except (UnknownBlob, HashMismatch, FileNotFoundError):
            delta = b""  # the whole chunk remains, or the error of reading that one
        finally:
            del self._making[pair]
        return delta


def _worthwhile(base: Path, new: Path) -> bytes:
    old, data = base.read_bytes(), new.read_bytes()
    if len(old) != len(data):
        return b""
    delta = encode_delta(old, data)
    return delta if len(delta) <= WORTH * len(data) else b""
