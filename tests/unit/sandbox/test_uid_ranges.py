"""Sandbox nodes of one host never share a uid."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmesh.services.sandbox.engines import uid_ranges
from rollmesh.services.sandbox.engines.uid_ranges import ROOM, claim_uids
from rollmesh.shared.errors import ConfigError


def test_two_nodes_get_ranges_that_do_not_overlap(tmp_path: Path) -> None:
    one, other = claim_uids(256, tmp_path), claim_uids(100, tmp_path)
    assert one.base == ROOM[0].start
    assert other.base >= one.base + 256


def test_a_range_that_was_given_back_is_taken_again(tmp_path: Path) -> None:
    one = claim_uids(256, tmp_path)
    claim_uids(256, tmp_path)
    one.release()
    assert claim_uids(256, tmp_path).base == one.base


def test_a_range_never_leaves_the_room(tmp_path: Path) -> None:
    claimed = [claim_uids(256, tmp_path) for _ in range(3)]
    assert all(any(r.base in room and r.base + 255 in room for room in ROOM) for r in claimed)
    assert claimed[2].base == ROOM[1].start


def test_a_host_without_room_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uid_ranges, "ROOM", (range(60578, 60578 + 128),))
    claim_uids(128, tmp_path)
    with pytest.raises(ConfigError, match=r"sandbox\.uid_base"):
        claim_uids(1, tmp_path)
