"""The commit digest chain (rollmesh.shared.domain.digest)."""

import hashlib
import struct

import pytest

from rollmesh.shared.domain.digest import INITIAL_DIGEST, next_digest


def test_digest_equals_the_documented_bytes() -> None:
    raw = b"".join(struct.pack(">Q", len(f)) + f for f in (b"", b"1", b"a", "é".encode()))
    assert next_digest(INITIAL_DIGEST, 1, ["é", "a"]) == hashlib.sha256(raw).hexdigest()


def test_digest_ignores_the_order_of_samples() -> None:
    assert next_digest("", 1, ["b", "a", "c"]) == next_digest("", 1, ["c", "b", "a"])


def test_digest_separates_fields_that_concatenate_alike() -> None:
    assert next_digest("", 1, ["ab", "c"]) != next_digest("", 1, ["a", "bc"])
    assert next_digest("", 1, ["1"]) != next_digest("", 11, [])


def test_digest_depends_on_the_whole_history() -> None:
    left = next_digest(next_digest("", 1, ["a"]), 2, ["b"])
    right = next_digest(next_digest("", 1, ["x"]), 2, ["b"])
    assert left != right


def test_digest_rejects_update_zero_and_a_sample_named_twice() -> None:
    with pytest.raises(ValueError, match="first update is 1"):
        next_digest("", 0, [])
    with pytest.raises(ValueError, match="more than once"):
        next_digest("", 1, ["a", "a"])
