"""The prefixes that a node was sent: hashes of blocks, the longest match, and the bounds."""

from __future__ import annotations

import numpy as np
import pytest

from rollmesh.shared.clients.prefix_index import BLOCK_TOKENS, PrefixIndex, prefix_blocks


def row(seed: int, num_blocks: int, extra: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 100, num_blocks * BLOCK_TOKENS + extra).astype(np.int32)


def test_blocks_identify_all_tokens_up_to_their_end() -> None:
    tokens = row(1, 4, extra=5)
    blocks = prefix_blocks(tokens)
    assert len(blocks) == len(set(blocks)) == 4
    assert prefix_blocks(tokens[: 2 * BLOCK_TOKENS + 31]) == blocks[:2]
    changed = tokens.copy()
    changed[BLOCK_TOKENS] += 1
    assert [a == b for a, b in zip(prefix_blocks(changed), blocks, strict=True)] == [True, False, False, False]
    assert prefix_blocks(tokens[: BLOCK_TOKENS - 1]) == []


def test_tokens_of_zero_are_counted_and_the_order_matters() -> None:
    zeros = prefix_blocks(np.zeros(3 * BLOCK_TOKENS, np.int32))
    assert len(set(zeros)) == 3
    swapped = row(2, 1)
    swapped[:2] = [3, 4]
    other = swapped.copy()
    other[:2] = [4, 3]
    assert prefix_blocks(swapped) != prefix_blocks(other)


def test_a_longer_prefix_than_before_keeps_the_hashes_of_the_shorter_one() -> None:
    tokens = row(3, 400)
    assert prefix_blocks(tokens)[:10] == prefix_blocks(tokens[: 10 * BLOCK_TOKENS])


def test_the_longest_common_prefix_is_found() -> None:
    index, blocks = PrefixIndex(), prefix_blocks(row(4, 9))
    index.add("a", blocks[:7], 100, 100)
    other = prefix_blocks(np.concatenate([row(4, 9)[: 3 * BLOCK_TOKENS], row(5, 3)]))
    assert [index.matched(found) for found in (blocks, other, prefix_blocks(row(6, 4)), [])] == [7, 3, 0, 0]


def test_a_turn_extends_the_sequence_of_its_session_and_a_changed_history_replaces_it() -> None:
    index, blocks = PrefixIndex(), prefix_blocks(row(7, 6))
    index.add("a", blocks[:4], 100, 100)
    index.add("a", blocks, 100, 100)
    assert (index.size, index.num_distinct, index.matched(blocks)) == (6, 6, 6)
    rewritten = prefix_blocks(row(8, 5))
    index.add("a", rewritten, 100, 100)
    assert (index.size, index.matched(blocks), index.matched(rewritten)) == (5, 0, 5)
    index.add("a", rewritten[:2], 100, 100)
    assert (index.size, index.num_distinct) == (2, 2)


def test_shared_blocks_outlive_one_of_their_sequences() -> None:
    index, blocks = PrefixIndex(), prefix_blocks(row(9, 5))
    index.add("a", blocks[:3], 100, 100)
    index.add("b", blocks, 100, 100)
    assert (index.size, index.num_distinct) == (8, 5)
    index.add("c", prefix_blocks(row(10, 4)), 9, 100)
    assert index.matched(blocks) == 5, "a was evicted, which b contains"
    index.add("d", prefix_blocks(row(11, 4)), 9, 100)
    assert index.matched(blocks) == 0, "b was evicted"


def test_use_protects_from_eviction() -> None:
    index = PrefixIndex()
    first, second, third = (prefix_blocks(row(seed, 4)) for seed in (12, 13, 14))
    for key, blocks in (("a", first), ("b", second), ("a", first), ("c", third)):
        index.add(key, blocks, 8, 8)
    assert [index.matched(blocks) for blocks in (first, second, third)] == [4, 0, 4]


@pytest.mark.parametrize(("size_max", "distinct_max"), [(40, 40), (40, 10), (7, 40), (1, 1), (0, 0)])
def test_memory_is_bounded(size_max: int, distinct_max: int) -> None:
    index, rng = PrefixIndex(), np.random.default_rng(15)
    for number in range(500):
        shared = row(int(rng.integers(3)), int(rng.integers(1, 6)))
        blocks = prefix_blocks(np.concatenate([shared, row(100 + number, int(rng.integers(0, 4)))]))
        index.add(int(rng.integers(60)), blocks, size_max, distinct_max)
        assert index.size <= size_max
        assert index.num_distinct <= distinct_max
        assert sum(map(len, index._sequences.values())) == index.size
        assert set().union(*index._sequences.values()) == set(index._blocks)
    index.clear()
    assert (index.size, index.num_distinct) == (0, 0)
