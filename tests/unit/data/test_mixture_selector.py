"""Draws by source: shares, schedules and bounds, the selector of each source, snapshots, and errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmesh.services.data.config import DataConfig, build_selector
from rollmesh.services.data.draws import RunDraws
from rollmesh.services.data.mixture_pool import MixturePart, MixturePool
from rollmesh.services.data.selector import SELECTORS, GroupResult, Selector
from rollmesh.services.data.selectors.mixture import MixtureSelector
from rollmesh.services.data.selectors.shares import PERIOD, SHARE_MIN, Shares, SourceOrder, WeightPoint
from rollmesh.services.data.subpool import SubPool
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import TrainedGroup
from rollmesh.shared.errors import ConfigError, CorruptSnapshot

from .builders import committed, created, factory, finalized, leveled, pool, reserved
from .test_draws import fold

KEY = "data.selector.options"


def mixed(**sizes: int) -> MixturePool:
    return MixturePool([MixturePart(source=name, pool=pool(size)) for name, size in sizes.items()])


TASKS = mixed(a=40, b=20, c=3)


def selector(tasks: Any = TASKS, **options: Any) -> MixtureSelector:
    made: MixtureSelector = SELECTORS.make(Extension("mixture", options), pool=tasks, seed=3)
    return made


def drawn(chosen: Selector, first: int, end: int, tasks: Any = TASKS) -> Counter[str]:
    return Counter(tasks.label(chosen.draw(index, frozenset()), "source") for index in range(first, end))


def ramp(*points: tuple[int, float]) -> list[dict[str, float]]:
    return [{"draw": draw, "weight": weight} for draw, weight in points]


@pytest.mark.parametrize(
    "weights", [{"a": 5, "b": 3, "c": 2}, {"a": 1, "b": 1, "c": 1}, {"a": 0.713, "b": 0, "c": 0.1}]
)
def test_every_prefix_of_1000_draws_has_its_shares_within_one(weights: Mapping[str, float]) -> None:
    chosen, total, counts = selector(weights=weights), sum(weights.values()), Counter({name: 0 for name in weights})
    for num in range(1, 1001):
        counts[TASKS.label(chosen.draw(num - 1, frozenset()), "source")] += 1
        assert all(abs(counts[name] - num * weight / total) < 1.0 for name, weight in weights.items()), (num, counts)


def test_shares_follow_a_schedule_between_its_points_and_are_constant_outside() -> None:
    chosen = selector(weights={"a": ramp((200, 3), (1200, 0)), "b": 1, "c": 0})
    assert drawn(chosen, 0, 200) == {"a": 150, "b": 50}
    middle = np.arange(200, 1200)
    weight = 3 - 3 * (middle - 200) / 1000
    assert abs(drawn(chosen, 200, 1200)["a"] - (weight / (weight + 1)).sum()) < 1.0
    assert drawn(chosen, 1200, 1300) == {"b": 100}, "a source of weight 0 is not drawn"
    assert [share.requested for share in chosen.source_shares(700)] == pytest.approx([0.6, 0.4, 0.0])


def test_floor_and_ceiling_hold_whatever_the_weights_are() -> None:
    chosen = selector(
        weights={"a": ramp((0, 8), (1000, 0)), "b": ramp((0, 1), (1000, 9)), "c": 1},
        floor={"c": 0.2},
        ceiling={"a": 0.6, "b": 0.7},
    )
    shares = np.array([[share.requested for share in chosen.source_shares(draw)] for draw in range(0, 1100, 10)])
    assert shares.sum(axis=1) == pytest.approx(1.0)
    assert shares[:, 0].max() == pytest.approx(0.6)
    assert shares[:, 1].max() == pytest.approx(0.7)
    assert shares[:, 2].min() == pytest.approx(0.2)
    # Draw 0: weights 0.8, 0.1, 0.1; a is at its ceiling, c at its floor, and b has the rest.
    assert shares[0] == pytest.approx([0.6, 0.2, 0.2])
    # Draw 1000: weights 0, 0.9, 0.1; b is at its ceiling.
    assert shares[-1] == pytest.approx([0.0, 0.7, 0.3])
    assert drawn(chosen, 1000, 2000) == {"b": 700, "c": 300}


def test_random_mixtures_follow_their_shares() -> None:
    rng = np.random.default_rng(0)
    for num_sources in (2, 3, 5, 20):
        points = rng.gamma(0.5, size=(num_sources, 3)) + 1e-2
        weights = {
            str(n): tuple(WeightPoint(draw=d, weight=float(w)) for d, w in zip((0, 300, 500), row, strict=True))
            for n, row in enumerate(points)
        }
        shares = Shares(weights, {"0": 0.05}, {"1": 0.9})
        order, lag = SourceOrder(shares), np.zeros(num_sources)
        counts = np.zeros(num_sources, dtype=int)
        for draw, row in enumerate(shares.at(np.arange(800))):
            source, earlier = order.at(draw)
            assert earlier == counts[source]
            counts[source] += 1
            lag += row
            assert np.abs(lag - counts).max() < 1.7


@pytest.mark.parametrize("num", [1, 300, 501, 5_000])
def test_mean_shares_are_those_of_the_draws(num: int) -> None:
    points = tuple(WeightPoint(draw=draw, weight=weight) for draw, weight in ((0, 3.0), (300, 1.0), (4500, 0.0)))
    shares = Shares({"a": points, "b": 1.0, "c": 0.5}, {"c": 0.2}, {})
    assert shares.mean(num) == pytest.approx(shares.at(np.arange(num)).mean(axis=0))
    assert shares.mean(0) == pytest.approx(shares.at(np.array([0]))[0])


def test_a_draw_far_ahead_takes_constant_time_and_continues_the_count_of_its_source() -> None:
    order = SourceOrder(Shares({"a": (WeightPoint(draw=10, weight=1.0),), "b": 3.0}, {}, {}))
    assert order.at(10 + PERIOD * 10**6) == (order.at(10).source, order.at(10).earlier + 3 * PERIOD * 10**6 // 4)
    counts = Counter(order.at(draw).source for draw in range(10, 10 + PERIOD))
    assert counts == {0: PERIOD // 4, 1: PERIOD * 3 // 4}


def test_the_error_after_the_last_point_grows_by_that_of_a_period() -> None:
    """Shares of 1/3 are not multiples of 1 / PERIOD: each period has 3,334 draws of one source."""
    order, periods = SourceOrder(Shares({"a": 1.0, "b": 1.0, "c": 1.0}, {}, {})), 300
    first = range(PERIOD * periods, PERIOD * periods + 3)
    assert sorted(order.at(draw).earlier for draw in first) == [3_333 * periods] * 2 + [3_334 * periods]
    assert 1.0 < 3_334 * periods - PERIOD * periods / 3 < 1.2 * (1 + periods)


@pytest.mark.parametrize("weight", [1.0, 3.1])
def test_the_least_share_is_drawn(weight: float) -> None:
    rest = {str(n): 1.0 for n in range(1, 64)}
    names = {**rest, "rare": weight * SHARE_MIN / (1 - weight * SHARE_MIN) * 63}
    order = SourceOrder(Shares(names, {}, {}))
    assert any(order.at(draw).source == 63 for draw in range(PERIOD))


def test_uniform_draws_each_task_of_a_source_once_per_epoch_of_the_source() -> None:
    chosen = selector(weights={"a": 1, "b": 1, "c": 2})
    by_source: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    for index in range(160):
        position = chosen.draw(index, frozenset())
        by_source[TASKS.label(position, "source")].append(position)
    assert {name: len(found) for name, found in by_source.items()} == {"a": 40, "b": 40, "c": 80}
    assert len(set(by_source["a"])) == 40
    assert Counter(by_source["b"]) == dict.fromkeys(set(by_source["b"]), 2)
    assert len(set(by_source["b"])) == 20


LAST = """
class Last:
    def __init__(self, *, pool, seed):
        self.pool, self.seen = pool, []
    def draw(self, index, in_flight):
        return max(set(range(len(self.pool))) - set(in_flight))
    def observe(self, result):
        self.seen.append(result)
    def observe_trained(self, result):
        self.seen.append(result)
    def snapshot(self): return b""
    def restore(self, state): ...
"""


def test_a_selector_sees_its_source_as_a_whole_pool(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(LAST)
    options = {"weights": {"a": 1, "b": 1, "c": 1}, "selectors": {"b": "own.py:Last"}}
    made = config_from_dict(DataConfig, {"selector": {"name": "mixture", "options": options}})
    chosen: Any = build_selector(made, TASKS, tmp_path)
    last = chosen._selectors[1]
    inner = last.pool
    assert [inner.task(n).task_id for n in (0, 19)] == ["b/t0", "b/t19"]
    assert [inner.position(name) for name in ("b/t19", "a/t19", "b/t20")] == [19, None, None]
    assert (len(inner), inner.label(2, "level"), inner.label(2, "source")) == (20, "2", "b")
    b, a = TASKS.position("b/t19"), TASKS.position("a/t5")
    assert b is not None
    assert a is not None
    assert TASKS.task(chosen.draw(1, frozenset({b, a}))).task_id == "b/t18"
    trained = TrainedGroup(group="g", measures={})
    chosen.observe(GroupResult(position=b, successes=1.0, failures=0.0))
    chosen.observe(GroupResult(position=a, successes=1.0, failures=0.0))
    chosen.observe_trained(GroupResult(position=b, successes=1.0, failures=0.0, trained=trained))
    assert [(result.position, result.trained) for result in last.seen] == [(19, None), (19, trained)]
    assert {share.source: share.decided for share in chosen.source_shares(0)} == {"a": 0.5, "b": 0.5, "c": 0.0}


def test_any_label_may_be_the_source() -> None:
    tasks = leveled("1", "2", "2", "3")
    chosen = selector(tasks, weights={"1": 1, "2": 2, "3": 1}, label="level")
    assert Counter(tasks.label(chosen.draw(n, frozenset()), "level") for n in range(8)) == {"1": 2, "2": 4, "3": 2}


OPTIONS = {"weights": {"a": ramp((0, 1), (50, 3)), "b": 1, "c": 1}, "selector": "thompson", "selectors": {"c": "sec"}}


def test_a_restored_snapshot_continues_with_the_same_draws() -> None:
    def draws() -> RunDraws:
        return RunDraws(pool=TASKS, new_selector=factory("mixture", **OPTIONS))

    first = draws()
    fold(first, created())
    for draw, position in enumerate(first.positions("main", 0, 12)):
        fold(first, reserved(draw, TASKS.task(position).task_id), finalized(draw, float(draw % 2), 0.0))
    fold(first, committed(1, g0=0.5, g1=0.25))
    state = first.snapshot()
    again = draws()
    again.restore(state)
    assert again.snapshot() == state
    assert again.source_shares() == first.source_shares()
    assert sum(share.decided for share in again.source_shares()) == pytest.approx(1.0)
    assert again.positions("main", 12, 40) == first.positions("main", 12, 40)


def test_a_snapshot_of_other_sources_or_selectors_is_refused_without_a_change() -> None:
    chosen = selector(**OPTIONS)
    chosen.observe(GroupResult(position=0, successes=1.0, failures=1.0))
    state = chosen.snapshot()
    for other in (
        selector(weights={"a": 1, "b": 1, "c": 1}),
        selector(mixed(a=40, b=20, c=4), **OPTIONS),
        selector(weights={"b": 1, "a": 1, "c": 1}, selector="thompson", selectors={"c": "sec"}),
    ):
        before = other.snapshot()
        with pytest.raises(CorruptSnapshot):
            other.restore(state)
        assert other.snapshot() == before


def test_sources_of_the_same_size_are_drawn_in_different_orders() -> None:
    tasks = mixed(a=20, b=20)
    chosen = selector(tasks, weights={"a": 1, "b": 1})
    found = [tasks.task(chosen.draw(index, frozenset())).task_id for index in range(40)]
    a, b = ([one[2:] for one in found if one[0] == name] for name in "ab")
    assert a != b
    assert sorted(a) == sorted(b)


ABC = {"a": 1, "b": 1, "c": 1}


@pytest.mark.parametrize(
    ("options", "key", "message"),
    [
        ({"weights": {"a": 1, "b": 1}}, f"{KEY}.weights", "must have a weight for each source .*; add `c`"),
        (
            {"weights": {**ABC, "d": 1}},
            f"{KEY}.weights",
            "must name sources with training tasks, which are `a`, `b`, `c`; got `d`",
        ),
        ({"weights": ABC, "label": "topic"}, f"{KEY}.label", "no training task has the label `topic`"),
        ({"weights": ABC, "selector": "unifrm"}, f"{KEY}.selector", "no selector `unifrm`"),
        ({"weights": ABC, "selectors": {"a": "unifrm"}}, f"{KEY}.selectors.a", "no selector `unifrm`"),
    ],
)
def test_an_error_names_the_path(options: dict[str, Any], key: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"`{key}`.*{message}") as caught:
        selector(**options)
    assert caught.value.metadata["key"] == key


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": {}}, "`weights` must have a length >= 1"),
        ({"weights": {**ABC, "a": -1}}, "`weights.a`: Expected `float` >= 0.0"),
        ({"weights": {**ABC, "a": float("inf")}}, "`weights.a` must be finite, got inf"),
        ({"weights": dict.fromkeys(ABC, 0)}, "`weights` must not all be 0, but are at draw 0"),
        (
            {"weights": {"a": ramp((0, 1), (10, 0), (20, 1)), "b": ramp((5, 1), (10, 0)), "c": 0}},
            "`weights` must not all be 0, but are at draw 10",
        ),
        ({"weights": {**ABC, "a": []}}, r"`weights.a` must have points with ascending draws, got \[\]"),
        (
            {"weights": {**ABC, "a": ramp((9, 1), (9, 2))}},
            r"`weights.a` must have points with ascending draws, got \[9, 9\]",
        ),
        ({"weights": {**ABC, "a": ramp((-1, 1))}}, r"`weights.a\[0\].draw` must be in \[0, 100000\], got -1"),
        (
            {"weights": {**ABC, "a": 1e-4}},
            "`weights.a` must give a share of 0 or >= 0.0002 after the last point, got 5e-05",
        ),
        ({"weights": {**ABC, "a": 1e-30}}, "`weights.a` must give a share of 0 or >= 0.0002 .*, got 0"),
        ({"weights": ABC, "floor": {"a": 1.5}}, r"`floor.a` must be in \[0, 1\], got 1.5"),
        ({"weights": ABC, "floor": {"a": 0.6, "b": 0.6}}, "`floor` must have a sum <= 1, got 1.2"),
        ({"weights": ABC, "floor": {"d": 0.6}}, "`floor` must name sources of `weights`, got d"),
        ({"weights": ABC, "selectors": {"d": "uniform"}}, "`selectors` must name sources of `weights`, got d"),
        (
            {"weights": ABC, "floor": {"a": 0.6}, "ceiling": {"a": 0.5}},
            "`floor.a` must be <= its ceiling 0.5, got 0.6",
        ),
        (
            {"weights": ABC, "ceiling": dict.fromkeys(ABC, 0.25)},
            "`ceiling` of the sources with a weight above 0 and `floor` of the others must have a sum >= 1, got 0.75",
        ),
        ({"weights": {"a": ramp((0, 1), (9, 0)), "b": 0, "c": 1}, "ceiling": {"c": 0.5}}, "got 0.5 at draw 9"),
    ],
)
def test_a_wrong_option_is_named_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"options of selector `mixture`: .*{message}") as caught:
        selector(**options)
    assert "required" not in caught.value.message


def test_a_sub_pool_has_no_negative_position() -> None:
    with pytest.raises(IndexError, match="position must be >= 0, got -1"):
        SubPool(TASKS, np.array([1, 2])).task(-1)
