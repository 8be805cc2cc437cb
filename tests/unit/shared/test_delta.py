"""Deltas between chunks: exact for any bytes, small for small changes of weights, and safe to read from anyone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh.shared.clock import ManualClock
from rollmesh.shared.errors import HashMismatch
from rollmesh.shared.weights.blobs import BlobStore
from rollmesh.shared.weights.byte_rate import BURST_S, ByteRate
from rollmesh.shared.weights.delta import apply_delta, encode_delta
from rollmesh.shared.weights.delta_cache import PAIR_BYTES, DeltaCache
from rollmesh.shared.weights.digests import sha256_hex


@settings(deadline=None)
@given(st.binary(max_size=300), st.randoms(use_true_random=False))
def test_a_delta_restores_any_chunk(base: bytes, random: object) -> None:
    new = bytes(byte ^ (7 if index % 3 else 0) for index, byte in enumerate(base))
    assert apply_delta(base, encode_delta(base, new)) == new


def test_the_delta_of_a_few_low_bits_is_small_and_splits_values_at_their_width() -> None:
    """One value of 50 changes in its lowest bit, which has H(0.02) = 0.14 bits of its 16. The delta takes at most 4
    times as many."""
    rng = np.random.default_rng(0)
    base = rng.standard_normal(1 << 16).astype("<f4").view("<u2")[1::2].copy()
    new = base.copy()
    new[rng.random(len(new)) < 0.02] ^= 1
    delta = encode_delta(base.tobytes(), new.tobytes())
    assert delta[0] > 1
    assert len(delta) < 4 * 0.14 / 16 * base.nbytes
    assert apply_delta(base.tobytes(), delta) == new.tobytes()


_FRAME_OF_64_TIB = b"\x28\xb5\x2f\xfd\xe0" + (1 << 46).to_bytes(8, "little") + b"\x01\x00\x00"
"""Magic number, descriptor (content size of 8 bytes, single segment), content size, and an empty last block."""


def test_chunks_of_two_sizes_have_no_delta() -> None:
    with pytest.raises(ValueError, match="4 and 3 bytes"):
        encode_delta(b"abcd", b"abc")


@pytest.mark.parametrize(
    "delta",
    [
        b"",
        b"\x02",
        b"\x02garbage",
        b"\x03" + zstandard.compress(bytes(8)),
        b"\x02" + zstandard.compress(bytes(6)),
        b"\x01" + zstandard.compress(bytes(1 << 24)),
        b"\x01" + zstandard.compress(bytes(8))[:5] + b"\xff" * 8,
        b"\x01" + _FRAME_OF_64_TIB,
        b"\x01" + zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 24)),
    ],
    ids=["empty", "no frame", "no zstd", "odd width", "short", "bomb", "cut", "frame of 64 TiB", "bomb without size"],
)
def test_bytes_that_are_not_a_delta_of_the_chunk_are_refused(delta: bytes) -> None:
    with pytest.raises(HashMismatch, match="delta"):
        apply_delta(b"01234567", delta)


# The cache ------------------------------------------------------------------------------------------------------------


async def stored(store: BlobStore, data: bytes) -> str:
    async def pieces() -> AsyncIterator[bytes]:
        yield data

    await store.put(sha256_hex(data), len(data), pieces(), owner="v")
    return sha256_hex(data)


async def test_a_pair_is_computed_once_and_only_if_it_saves_something(tmp_path: Path) -> None:
    store = BlobStore(tmp_path, quota_bytes=1 << 24)
    store.start()
    rng = np.random.default_rng(0)
    data = [rng.bytes(1 << 16), rng.bytes(1 << 16)]
    near = bytearray(data[0])
    near[5] ^= 1
    first, other, close = [await stored(store, bytes(one)) for one in (*data, near)]
    cache = DeltaCache(store, bytes_max=1 << 20)
    found = await asyncio.gather(*(cache.get(first, close) for _ in range(3)))
    assert found[0] is not None
    assert found[0] is found[1] is found[2]
    assert apply_delta(data[0], found[0]) == bytes(near)
    assert await cache.get(first, other) is None, "as large as the chunk"
    assert await cache.get("0" * 64, first) is None, "the base is not stored"
    await cache.close()
    store.close()


async def test_the_cache_forgets_the_oldest_deltas_beyond_its_limit(tmp_path: Path) -> None:
    store = BlobStore(tmp_path, quota_bytes=1 << 24)
    store.start()
    cache = DeltaCache(store, bytes_max=2 * PAIR_BYTES + 25)
    for number in range(3):
        cache.add(str(number) * 64, "f" * 64, bytes(10))
    assert await cache.get("0" * 64, "f" * 64) is None
    assert await cache.get("2" * 64, "f" * 64) == bytes(10)
    cache.add("a" * 64, "f" * 64, bytes(PAIR_BYTES + 26))
    assert await cache.get("a" * 64, "f" * 64) is None, "larger than the limit"
    assert await cache.get("2" * 64, "f" * 64) == bytes(10)
    store.close()


async def test_the_cache_forgets_pairs_whose_delta_is_not_worth_sending(tmp_path: Path) -> None:
    store = BlobStore(tmp_path, quota_bytes=1 << 24)
    store.start()
    rng = np.random.default_rng(0)
    chunks = [await stored(store, rng.bytes(64)) for _ in range(12)]
    cache = DeltaCache(store, bytes_max=10 * PAIR_BYTES)
    for base in chunks:
        for new in chunks:
            assert base == new or await cache.get(base, new) is None
    assert cache.num_pairs <= 10
    await cache.close()
    store.close()


# Rate -----------------------------------------------------------------------------------------------------------------


async def test_users_of_a_rate_share_it() -> None:
    clock = ManualClock()
    rate = ByteRate(1000.0, clock)
    done: list[float] = []

    async def use(num_bytes: int) -> None:
        await rate.take(num_bytes)
        done.append(clock.monotonic_s())

    start = clock.monotonic_s()
    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(use(100))
        for _ in range(40):
            await asyncio.sleep(0)
            clock.advance(0.01)
    for number, moment in enumerate(done, 1):
        assert 0.1 * number - BURST_S <= moment - start <= 0.1 * number + 0.02
