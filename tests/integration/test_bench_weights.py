"""The parts of `python -m benchmarks weights`: the plan of a real coordinator sends a version once, and deltas of real
updates are exact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from benchmarks.weights.delta import CASES, train
from benchmarks.weights.fanout import fan_out

MB = 1_000_000


def test_the_depot_sends_a_version_once_to_two_nodes() -> None:
    found = fan_out(4 * MB, MB, nodes=2, rate=20.0 * MB)
    assert 4 * MB < found.egress_bytes < 6 * MB
    assert 8 * MB < found.received_bytes < 8.1 * MB
    assert 0.2 * 0.9 < found.wall_s <= found.active_s, "no link exceeds its rate"


def test_deltas_of_updates_are_exact(tmp_path: Path) -> None:
    shape = msgspec.structs.replace(CASES["100M"].shape, num_layers=1, hidden_size=64, intermediate_size=64)
    figures = train(replace(CASES["100M"], shape=shape, warm_steps=1), 2, tmp_path)
    assert figures.exact == len(figures.shares) == 2
    assert all(0 < share < 1 for share in figures.shares)
    assert all(0 < changed < 0.5 for changed in figures.changed)
