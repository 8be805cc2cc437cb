"""The measures of the bench: which gaps are swaps, and from where to where a version takes its time."""

from __future__ import annotations

import pytest

from benchmarks.weights.publish_arm import PublishSeen
from benchmarks.weights.publish_client import Arrival
from benchmarks.weights.publish_to_active import active_ms, announced_ms, gaps_ms, phase_ms, row_of, targets_of

ARRIVALS = [
    Arrival(0.98, 0, 2, 1),
    Arrival(1.00, 0, 3, 1),  # swap to 3: 20 ms
    Arrival(1.01, 0, 3, 1),
    Arrival(1.50, 1, 3, 1),  # another response: no gap
    Arrival(1.51, 1, 3, 1),
    Arrival(1.55, 1, 5, 1),  # 4 was overtaken; swap to 5: 40 ms
]
SEEN = PublishSeen(
    stepped=[0.09, 0.49, 0.95, 1.29, 1.51],
    committed=[0.1, 0.5, 0.96, 1.3, 1.52],
    announced=[0.0, 0.2, 0.6, 0.98, 1.32, 1.53],
    seconds=[{"publish": 9.0}, {"publish": 9.0}, {"publish": 0.02}, {"publish": 0.04}, {}],
    arrivals=ARRIVALS,
)


def test_a_swap_is_a_gap_with_a_change_of_weights_in_one_response() -> None:
    swaps, steps = gaps_ms(ARRIVALS)
    assert swaps == pytest.approx([20, 40])
    assert steps == pytest.approx([10, 10])


def test_a_version_takes_from_its_commit_to_its_first_token_and_the_first_ones_are_not_counted() -> None:
    assert active_ms(SEEN, SEEN.committed) == pytest.approx([40, 30])
    assert active_ms(SEEN, SEEN.stepped) == pytest.approx([50, 40])
    assert announced_ms(SEEN) == pytest.approx([20, 20, 10])
    assert phase_ms(SEEN, "publish") == pytest.approx([20, 40, 0])


def test_a_mesh_meets_its_targets_and_a_missing_measurement_does_not() -> None:
    assert row_of(SEEN)["publish to active"] == "35.0 / 39.0"
    assert [target.met for target in targets_of("here", "keep", SEEN)] == [True, True, True, False]
    nothing = PublishSeen(stepped=[], committed=[], announced=[], seconds=[], arrivals=[])
    assert not any(target.met for target in targets_of("here", "keep", nothing))
