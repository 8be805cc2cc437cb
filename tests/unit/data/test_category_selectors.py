"""Selectors that draw by category, against values by hand: SEC, DUMP, and the one of change points."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from rollmesh.services.data.draws import RunDraws
from rollmesh.services.data.selector import SELECTORS, GroupResult
from rollmesh.services.data.selectors.base import CategorySelector
from rollmesh.services.data.selectors.changepoint import ChangeDetector
from rollmesh.services.data.task import TaskPool
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import TrainedGroup
from rollmesh.shared.errors import ConfigError, CorruptSnapshot
from rollmesh.v1 import reward_pb2

from .builders import committed, created, factory, finalized, leveled, reserved
from .test_draws import fold

NAMES = ("sec", "dump", "changepoint")
KEEP, FILTER = reward_pb2.GROUP_DECISION_KEEP, reward_pb2.GROUP_DECISION_FILTER


def selector(name: str, tasks: TaskPool, *, seed: int = 0, **options: Any) -> Any:
    return SELECTORS.make(Extension(name, options), pool=tasks, seed=seed)


def decide(chosen: CategorySelector, position: int, successes: float, failures: float) -> None:
    chosen.observe(GroupResult(position=position, successes=successes, failures=failures))


def train(chosen: CategorySelector, position: int, signal: float, *, num: int = 4) -> None:
    """A decided group of `num` members of which one fails, in an update with this mean |A|."""
    decide(chosen, position, num - 1.0, 1.0)
    measured = TrainedGroup(group="g", measures={"mean_abs_advantage": signal, "other": 2 * signal})
    chosen.observe_trained(GroupResult(position=position, successes=num - 1.0, failures=1.0, trained=measured))


def drawn(chosen: CategorySelector, num_draws: int, in_flight: frozenset[int] = frozenset()) -> dict[str, float]:
    """Return the share of draws by category."""
    counts = Counter(chosen.draw(index, in_flight) for index in range(num_draws))
    found: dict[str, float] = dict.fromkeys(chosen.categories, 0.0)
    for position, count in counts.items():
        found[chosen.categories[chosen.category_of(GroupResult(position=position, successes=0, failures=0))]] += count
    return {name: count / num_draws for name, count in found.items()}


def none_in_flight(chosen: CategorySelector) -> Any:
    return np.zeros(len(chosen.categories), dtype=np.int64)


# SEC ------------------------------------------------------------------------------------------------------------------


def test_sec_equals_the_hand_computed_value() -> None:
    chosen = selector("sec", leveled("a", "b", "c"), step_groups=2, alpha=0.5, temperature=0.1)
    train(chosen, 0, 0.5, num=4)
    assert chosen.values.tolist() == [0.0, 0.0, 0.0], "the step has one group more"
    train(chosen, 0, 0.2, num=2)
    # r = (4 * 0.5 + 2 * 0.2) / 6 = 0.4
    assert chosen.values.tolist() == pytest.approx([0.2, 0.0, 0.0])
    train(chosen, 0, 0.8)
    train(chosen, 1, 0.6)
    assert chosen.values.tolist() == pytest.approx([0.5 * 0.2 + 0.4, 0.3, 0.0])
    shares = chosen.shares(none_in_flight(chosen))
    assert shares.sum() == pytest.approx(1.0)
    assert (shares / shares[2]).tolist() == pytest.approx([np.exp(5.0), np.exp(3.0), 1.0])


def test_a_category_that_is_absent_from_a_step_keeps_its_value_or_decays() -> None:
    values = {}
    for decays in (False, True):
        chosen = selector("sec", leveled("a", "b"), step_groups=1, alpha=0.5, absent_decays=decays)
        train(chosen, 0, 0.8)
        train(chosen, 1, 0.8)
        values[decays] = chosen.values.tolist()
    assert values == {False: pytest.approx([0.4, 0.4]), True: pytest.approx([0.2, 0.4])}


def test_a_group_whose_members_agree_counts_as_zero_once() -> None:
    chosen = selector("sec", leveled("a"), step_groups=1, alpha=0.5)
    train(chosen, 0, 1.0)
    agreed = TrainedGroup(group="g", measures={"mean_abs_advantage": 0.0})
    decide(chosen, 0, 4.0, 0.0)
    assert chosen.values.tolist() == [0.25]
    chosen.observe_trained(GroupResult(position=0, successes=4.0, failures=0.0, trained=agreed))
    assert chosen.values.tolist() == [0.25]
    decide(chosen, 0, 0.0, 4.0)
    assert chosen.values.tolist() == [0.125]
    decide(chosen, 0, 0.0, 0.0)  # no member was scored
    decide(chosen, 0, 1.0, 0.0)  # a lone member has nothing to agree with
    assert chosen.values.tolist() == [0.125]
    lone = TrainedGroup(group="g", measures={"mean_abs_advantage": 1.0})
    chosen.observe_trained(GroupResult(position=0, successes=1.0, failures=0.0, trained=lone))
    assert chosen.values.tolist() == [0.5625]


def test_agreement_and_the_measure_are_options() -> None:
    chosen = selector("sec", leveled("a"), step_groups=1, alpha=1.0, agreement_is_zero=False, measure="other")
    decide(chosen, 0, 4.0, 0.0)
    assert chosen.values.tolist() == [0.0]
    train(chosen, 0, 0.4)
    assert chosen.values.tolist() == [0.8]
    unmeasured = TrainedGroup(group="g", measures={"mean_abs_advantage": 1.0})
    chosen.observe_trained(GroupResult(position=0, successes=1.0, failures=1.0, trained=unmeasured))
    assert chosen.values.tolist() == [0.8], "a trainer that does not measure it teaches nothing"


# DUMP -----------------------------------------------------------------------------------------------------------------


def test_dump_equals_the_hand_computed_value() -> None:
    chosen = selector("dump", leveled("a", "b", "c"), window_samples=6, temperature=0.5)
    train(chosen, 0, 0.8)
    train(chosen, 1, 0.5)
    train(chosen, 0, 0.2)
    # the window of a has two samples of 0.8 and four of 0.2: 2.4 / 6; n = 8, 4, 0 and N = 12
    expected = [0.4 + (2 * np.log(13) / 9) ** 0.5, 0.5 + (2 * np.log(13) / 5) ** 0.5, (2 * np.log(13)) ** 0.5]
    assert chosen.bounds().tolist() == pytest.approx(expected)
    shares = chosen.shares(none_in_flight(chosen))
    powers = np.exp(np.array(expected) / 0.5)
    assert shares.tolist() == pytest.approx((powers / powers.sum()).tolist())


@pytest.mark.row("S066")
def test_dump_explores_sources_without_samples_and_draws_by_the_softmax_of_a_bounded_window() -> None:
    tasks = leveled(*"aaaabbbbcccc")
    chosen = selector("dump", tasks)
    for size in (8, 4, 2):  # whatever the others have, from eight samples on
        fresh = selector("dump", tasks)
        for n in range(40):
            train(fresh, (0, 4)[n % 2], 1.0, num=size)
            if (n + 1) * size >= 8:
                assert fresh.bounds()[2] == fresh.bounds().max(), (size, n)
    for n in range(2000):
        train(chosen, (0, 4, 8)[n % 3], (0.9, 0.85, 0.8)[n % 3], num=8)
    for window in chosen.windows:
        assert sum(num for _, num in window) == 300
        assert len(window) <= 300 / 8 + 1
    size = len(chosen.snapshot())
    train(chosen, 0, 0.9, num=8)
    assert len(chosen.snapshot()) == size, "more groups take no more memory"
    shares = chosen.shares(none_in_flight(chosen))
    assert shares[0] / shares[1] == pytest.approx(np.exp(0.05 / 0.1), rel=0.02), "the bonus is almost equal now"
    found = drawn(chosen, 3000)
    assert [found[name] for name in "abc"] == pytest.approx(shares.tolist(), abs=0.03)
    for _ in range(38):  # 304 samples
        train(chosen, 0, 0.1, num=8)
    assert chosen.bounds()[0] < 0.3, "the window has forgotten what was before"


# Change points --------------------------------------------------------------------------------------------------------


def test_the_detector_equals_the_hand_computed_value() -> None:
    """Values 0, 0, 1, 1. V of all: 1/2, 1/3, 1/12, 1/30. With the candidate at the third value, 1/3 * 1/2 and 1/3 * 1/2
    * 2/3 = 1/9; at the second one 1/2 * 1/2 * 1/3 * 1/2 = 1/24; at the fourth one 1/12 * 1/2."""
    made = ChangeDetector(0.25, 16)
    assert [made.observe(value) for value in (0.0, 0.0, 1.0)] == [False] * 3
    assert np.exp(made.log_weights).tolist() == pytest.approx([1.0, 0.25 * 12 / 12, 0.25 * 12 / 6, 0.25], abs=1e-9)
    assert not made.observe(1.0)
    expected = [1.0, 0.25 * 30 / 24, 0.25 * 30 / 9, 0.25 * 30 / 24, 0.25]
    assert np.exp(made.log_weights).tolist() == pytest.approx(expected)
    other = ChangeDetector(0.4, 16)
    assert [other.observe(value) for value in (0.0, 0.0, 1.0, 1.0)] == [False, False, False, True], "0.4 * 30 / 9 > 1"
    assert (other.num_values, other.mean) == (4, 0.5)
    other.restart()
    assert (other.num_values, other.mean) == (0, 0.5)


@pytest.mark.row("S143")
def test_false_alarms_are_rare_and_a_jump_restarts_the_statistics_soon() -> None:
    """120 streams of 150 groups without a change, whose tasks are solved or not, which has the largest variance; and 40
    of groups of 8 with a jump after 90 groups."""
    rng = np.random.default_rng(0)
    alarms = 0
    for rate in (0.05, 0.5, 0.8):
        for _ in range(40):
            made = ChangeDetector(1e-3, 128)
            alarms += any(made.observe(float(value)) for value in rng.binomial(1, rate, 150))
    assert alarms <= 8, f"false alarms in {alarms} of 120 streams"
    delays = []
    for before, after in ((0.1, 0.7), (0.8, 0.2)):
        for seed in range(20):
            chosen = selector("changepoint", leveled("x", "y"), seed=seed)
            for n in range(90):
                decide(chosen, int(n % 3 > 0), *split(rng, before if n % 3 else 0.5))
            assert chosen.num_changes == [0, 0]
            delay = 0
            while delay < 40 and not chosen.num_changes[1]:
                decide(chosen, 1, *split(rng, after))
                delay += 1
            assert chosen.num_changes == [0, 1]
            assert [detector.num_values for detector in chosen.detectors] == [0, 0], "the curriculum begins again"
            for _ in range(30):
                decide(chosen, 1, *split(rng, after))
            assert chosen.detectors[1].mean == pytest.approx(after, abs=0.12), "nothing of the time before is in it"
            delays.append(delay)
    assert np.mean(delays) < 15


def split(rng: np.random.Generator, rate: float) -> tuple[float, float]:
    successes = float(rng.binomial(8, rate))
    return successes, 8 - successes


def test_a_smaller_prior_detects_later() -> None:
    delays = []
    for prior in (0.1, 1e-3, 1e-6):
        made = ChangeDetector(prior, 128)
        assert not any(made.observe(0.1) for _ in range(40))
        delays.append(next(n for n in range(1, 100) if made.observe(0.7)))
    assert delays == sorted(delays)
    assert delays[0] < delays[2]


def test_a_change_may_restart_its_own_category_alone() -> None:
    chosen = selector("changepoint", leveled("x", "y"), restart="category")
    for _ in range(30):
        decide(chosen, 0, 4.0, 4.0)
        decide(chosen, 1, 0.0, 8.0)
    while not chosen.num_changes[1]:
        decide(chosen, 1, 8.0, 0.0)
    assert [detector.num_values for detector in chosen.detectors] == [30, 0]


def test_the_category_with_the_largest_optimistic_variance_is_drawn() -> None:
    """t = 60: squared radius ln(61) / 2 / 20 = 0.103, radius 0.32. Rates 1, 0.5 and 0: p* = 0.68, 0.5 and 0.32."""
    chosen = selector("changepoint", leveled(*"aaabbbccc"))
    assert drawn(chosen, 600) == pytest.approx(dict.fromkeys("abc", 1 / 3), abs=0.07), "nothing is known"
    for _ in range(20):
        for position, successes in ((0, 8.0), (3, 4.0), (6, 0.0)):
            decide(chosen, position, successes, 8.0 - successes)
    assert chosen.shares(none_in_flight(chosen)).tolist() == [0.0, 1.0, 0.0]
    assert chosen.shares(np.array([0, 3, 0])).tolist() == [0.0, 1.0, 0.0]
    # a category of which nothing is known may have 1/2
    unknown = selector("changepoint", leveled(*"ab"))
    for _ in range(20):
        decide(unknown, 0, 8.0, 0.0)
    assert unknown.shares(none_in_flight(unknown)).tolist() == [0.0, 1.0]


def test_the_detector_is_bounded() -> None:
    few, many, rng = ChangeDetector(1e-3, 4), ChangeDetector(1e-3, 1000), np.random.default_rng(0)
    for value in rng.binomial(8, 0.3, 300) / 8:
        assert few.observe(value) == many.observe(value)
        assert len(few.counts) <= 5
    delays = [next(n for n in range(1, 100) if made.observe(0.9)) for made in (few, many)]
    assert delays[0] == pytest.approx(delays[1], abs=2)


# All of them ----------------------------------------------------------------------------------------------------------


def taught(name: str, tasks: TaskPool, *, seed: int = 0) -> Any:
    chosen = selector(name, tasks, seed=seed)
    for n in range(60):
        train(chosen, n % len(tasks), 0.1 + 0.9 * (n % 5 == 0))
    return chosen


@pytest.mark.parametrize("name", NAMES)
def test_a_snapshot_continues_with_the_same_draws(name: str) -> None:
    tasks = leveled(*"1122334455")
    chosen, other, fresh = taught(name, tasks), selector(name, tasks), selector(name, tasks)
    other.restore(chosen.snapshot())
    assert chosen.snapshot() != fresh.snapshot(), "the state matters"
    for each in (chosen, other):
        train(each, 2, 0.7)
        decide(each, 3, 4.0, 0.0)
    assert [chosen.draw(n, frozenset({1})) for n in range(50)] == [other.draw(n, frozenset({1})) for n in range(50)]
    assert chosen.snapshot() == other.snapshot()


@pytest.mark.parametrize("name", NAMES)
def test_restore_rejects_other_states_and_keeps_its_own(name: str) -> None:
    tasks = leveled("1", "2")
    chosen = taught(name, tasks)
    before = chosen.snapshot()
    others = [
        taught(name, leveled("1", "3")),
        selector(name, tasks, label="subject"),
        SELECTORS.make("thompson", pool=tasks, seed=0),
    ]
    for state in (b"", b"\xc1", b"\x80", b"junk", *(other.snapshot() for other in others)):
        with pytest.raises(CorruptSnapshot):
            chosen.restore(state)
        assert chosen.snapshot() == before


@pytest.mark.parametrize("name", NAMES)
def test_draws_avoid_what_is_in_flight_while_anything_else_is_left(name: str) -> None:
    chosen = selector(name, leveled("a", "a", "b"))
    assert {chosen.draw(n, frozenset({0, 2})) for n in range(50)} == {1}
    assert {chosen.draw(n, frozenset({0, 1})) for n in range(50)} == {2}, "a category without a free task is left out"
    assert {chosen.draw(n, frozenset({0, 1, 2})) for n in range(100)} == {0, 1, 2}


@pytest.mark.parametrize("name", NAMES)
def test_tasks_of_a_category_are_drawn_uniformly_and_seeds_differ(name: str) -> None:
    tasks = leveled(*["1"] * 8)  # one category, as without labels
    one, two = (selector(name, tasks, seed=seed) for seed in (1, 2))
    draws = [one.draw(n, frozenset()) for n in range(1600)]
    assert np.bincount(draws, minlength=8).tolist() == pytest.approx([200] * 8, abs=50)
    assert draws[:20] != [two.draw(n, frozenset()) for n in range(20)]


def test_a_category_in_flight_is_replaced_although_its_share_is_all() -> None:
    chosen = selector("sec", leveled("a", "b", "b"), step_groups=1, alpha=1.0, temperature=1e-4)
    train(chosen, 0, 1.0)
    assert {chosen.draw(n, frozenset()) for n in range(30)} == {0}
    assert {chosen.draw(n, frozenset({0})) for n in range(30)} == {1, 2}


@pytest.mark.parametrize("name", NAMES)
def test_the_state_survives_a_restart_of_the_data_service(name: str) -> None:
    """Draws, decisions with a failed member, a filtered group and a commit, then the snapshot of the service."""
    tasks = leveled(*"1122334455")

    def service() -> RunDraws:
        return RunDraws(pool=tasks, new_selector=factory(name))

    draws, again = service(), service()
    fold(draws, created())
    for n in range(40):
        (position,) = draws.positions("main", n, 1)
        filtered = n % 4 == 3
        values = (1.0, 1.0, None) if filtered else (1.0, 0.0, None)
        fold(draws, reserved(n, f"t{position}", num_episodes=3))
        fold(draws, finalized(n, *values, decision=FILTER if filtered else KEEP))
        if not filtered:
            fold(draws, committed(n + 1, **{f"g{n}": 0.1 * (position % 4)}))
    again.restore(draws.snapshot())
    assert again.snapshot() == draws.snapshot()
    assert again.positions("main", 40, 20) == draws.positions("main", 40, 20)
    fresh = service()
    assert fresh.snapshot() != draws.snapshot()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sec", {"alpha": 0.0}, "alpha.*0"),
        ("sec", {"temperature": 0.0}, "temperature.*0"),
        ("sec", {"step_groups": 0}, "step_groups.*0"),
        ("dump", {"window_samples": 0}, "window_samples.*0"),
        ("dump", {"exploration": -1.0}, "exploration.*-1"),
        ("changepoint", {"prior": 1.0}, "prior.*1"),
        ("changepoint", {"candidates_max": 1}, "candidates_max.*1"),
        ("changepoint", {"restart": "some"}, "restart"),
    ],
)
def test_options_out_of_range_name_field_and_value(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        selector(name, leveled("a"), **options)
