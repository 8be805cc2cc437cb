"""Plans of selectors: what a draw returns, once and after a crash, and how they reach the coordinator."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import pytest

from rollmesh.services.data.draws import DRAWS_OUTSTANDING_MAX, RunDraws
from rollmesh.services.data.engine import DataEngine
from rollmesh.services.data.mixture_pool import MixturePart, MixturePool
from rollmesh.services.data.selector import SELECTORS, GroupResult, Plan, SamplingOverrides, Selector, Variant
from rollmesh.services.data.servicer import DataServicer
from rollmesh.services.data.task import Split, TaskPool
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.clock import SystemClock
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.ledger_facts import facts_of
from rollmesh.shared.errors import InvalidInput
from rollmesh.testing.memory_bus import MemoryBus
from rollmesh.v1 import data_pb2, types_pb2

from .builders import created, factory, pool, record, reserved

HOT = Variant(name="hot", count=2, sampling=SamplingOverrides(temperature=1.3))


class Planner(Selector):
    """Draws the index, plans one more episode for each further task in flight, and counts its plans."""

    def __init__(self, tasks: TaskPool) -> None:
        self.num_tasks, self.asked = len(tasks), list[tuple[int, int, frozenset[int]]]()

    def draw(self, index: int, in_flight: AbstractSet[int]) -> int:
        return index % self.num_tasks

    def plan(self, index: int, position: int, in_flight: AbstractSet[int]) -> Plan:
        self.asked.append((index, position, frozenset(in_flight)))
        return Plan(size=1 + len(in_flight), propensity=1 / self.num_tasks)

    def observe(self, result: GroupResult) -> None: ...

    def snapshot(self) -> bytes:
        return b""

    def restore(self, state: bytes) -> None: ...


class Broken(Planner):
    """Plans whatever `made` returns."""

    made: Any = None

    def plan(self, index: int, position: int, in_flight: AbstractSet[int]) -> Plan:
        plan: Plan = type(self).made()
        return plan


def planning() -> tuple[RunDraws, list[Planner]]:
    made: list[Planner] = []

    def new(tasks: TaskPool) -> Selector:
        made.append(Planner(tasks))
        return made[-1]

    return RunDraws(pool=pool(10), new_selector=new), made


def sizes(draws: RunDraws, first: int, num: int) -> list[int]:
    draws.positions("main", first, num)
    return [plan.size for plan in draws.plans("main", first, num)]


def test_a_draw_is_planned_once_with_what_was_in_flight_when_it_was_drawn() -> None:
    draws, made = planning()
    assert sizes(draws, 3, 2) == [1, 2]
    assert sizes(draws, 3, 3) == [1, 2, 3], "a repeated call has the same plans"
    assert made[0].asked == [(3, 3, frozenset()), (4, 4, frozenset({3})), (5, 5, frozenset({3, 4}))]


def test_a_recorded_draw_has_no_plan_any_more_and_a_forgotten_one_neither() -> None:
    draws, _ = planning()
    sizes(draws, 0, 2)
    draws.apply(facts_of(record(created(), reserved(0, "t0"))))
    assert sizes(draws, 0, 2) == [0, 2]
    draws.apply(facts_of(record(reserved(DRAWS_OUTSTANDING_MAX + 2, "t1"))))
    assert draws.plans("main", 1, 1) == [Plan()]


def test_a_snapshot_has_no_plan_because_only_the_ledger_says_what_was_reserved() -> None:
    draws, _ = planning()
    sizes(draws, 0, 2)
    other, _ = planning()
    other.restore(draws.snapshot())
    assert sizes(other, 0, 2) == [1, 2], "the draws that were not recorded are planned again"


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda: 3, "the plan of the selector Broken for draw 0 must be a Plan, got a int; correct the selector"),
        (lambda: Plan(size=-1), r"the plan of the selector Broken for draw 0: `size` must be in \[0, 16384\], got -1"),
        (
            lambda: Plan(size=3, variants=(HOT,)),
            "for draw 0: `variants` must have counts that sum to the size of the group, 3, got 2",
        ),
        (lambda: Plan(propensity=2.0), r"for draw 0: `propensity` must be in \[0, 1\], got 2"),
        (lambda: Plan(size=2.5), "for draw 0 cannot be sent: .*float"),  # type: ignore[arg-type]
        (lambda: Plan(variants=(Variant(name="a", options={1: 2}),)), "for draw 0 cannot be sent"),  # type: ignore[dict-item]
        (
            lambda: Plan(variants=(Variant(name="a", prefix="\ud800"),)),
            "for draw 0 cannot be sent: .*surr",
        ),
    ],
    ids=["type", "size", "sum", "propensity", "float", "key", "surrogate"],
)
def test_a_plan_that_no_run_could_have_names_selector_and_draw(made: Any, why: str) -> None:
    class Mine(Broken):
        pass

    Mine.__name__ = "Broken"
    Mine.made = staticmethod(made)
    draws = RunDraws(pool=pool(10), new_selector=Mine)
    with pytest.raises(InvalidInput, match=why):
        draws.positions("main", 0, 1)


# Other selectors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["uniform", "thompson", "sec", "dump", "historical_variance", "changepoint"])
def test_the_built_in_selectors_leave_the_group_to_the_run(name: str) -> None:
    draws = RunDraws(pool=pool(10), new_selector=factory(name))
    draws.positions("main", 0, 4)
    assert draws.plans("main", 0, 4) == [Plan()] * 4


def test_a_selector_without_the_base_class_plans_nothing(tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text(
        "class Old:\n"
        "    def __init__(self, *, pool, seed): pass\n"
        "    def draw(self, index, in_flight): return 0\n"
        "    def observe(self, result): pass\n"
        "    def snapshot(self): return b''\n"
        "    def restore(self, state): pass\n"
    )
    made = SELECTORS.make(Extension("old.py:Old"), tmp_path, pool=pool(3), seed=0)
    assert made.plan(0, 0, frozenset()) == Plan()


def test_a_mixture_plans_as_the_selector_of_the_source_with_positions_of_the_source(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from rollmesh.services.data.selector import Plan, Selector\n"
        "class Mine(Selector):\n"
        "    def __init__(self, *, pool, seed): self.num = len(pool)\n"
        "    def draw(self, index, in_flight): return index % self.num\n"
        "    def plan(self, index, position, in_flight):\n"
        "        assert in_flight <= set(range(self.num))\n"
        "        return Plan(size=1 + position + 10 * len(in_flight), propensity=1 / self.num)\n"
        "    def observe(self, result): pass\n"
        "    def snapshot(self): return b''\n"
        "    def restore(self, state): pass\n"
    )
    tasks = MixturePool([MixturePart(source=name, pool=pool(size)) for name, size in (("a", 4), ("b", 2))])
    options = {"weights": {"a": 3, "b": 1}, "selectors": {"b": Extension("mine.py:Mine").located(tmp_path)}}
    chosen = SELECTORS.make(Extension("mixture", options), tmp_path, pool=tasks, seed=0)
    of = {name: [at for at in range(6) if tasks.label(at, "source") == name] for name in ("a", "b")}
    in_flight, found = frozenset({of["a"][0], of["b"][1]}), list[tuple[str, Plan]]()
    for index in range(8):
        position = chosen.draw(index, in_flight)
        found.append((tasks.label(position, "source"), chosen.plan(index, position, in_flight)))
    assert [plan for source, plan in found if source == "a"] == [Plan()] * 6
    # b has two tasks, one of which is in flight, and a quarter of the draws.
    assert [(plan.size, plan.propensity) for source, plan in found if source == "b"] == [(11, 0.125), (12, 0.125)]


# The service ----------------------------------------------------------------------------------------------------------


async def responses(selector: Any, *purposes: types_pb2.Purpose.ValueType) -> list[data_pb2.NextTasksResponse]:
    bus = MemoryBus()
    ledger = await bus.create(run_streams("r").ledger)
    await ledger.append(record(created()).SerializeToString(), msg_id="m0")
    tasks = {split: pool(10) for split in Split}
    engine = DataEngine(pools=tasks, new_selector=selector, bus=bus, clock=SystemClock())
    try:
        asked = [data_pb2.NextTasksRequest(run="r", purpose=purpose, num=2) for purpose in purposes]
        return [await DataServicer(engine).NextTasks(one, None) for one in asked]
    finally:
        await engine.close()
        await bus.close()


async def test_the_response_has_plans_for_training_only() -> None:
    train, test = await responses(Planner, types_pb2.PURPOSE_TRAIN, types_pb2.PURPOSE_EVAL)
    assert [(one.plan.size, one.plan.propensity) for one in train.tasks] == [(1, 0.1), (2, 0.1)]
    assert not any(one.HasField("plan") for one in test.tasks)


async def test_the_response_of_a_selector_that_does_not_plan_is_that_of_the_release_before() -> None:
    (train,) = await responses(factory("uniform"), types_pb2.PURPOSE_TRAIN)
    assert {field.name for one in train.tasks for field, _ in one.ListFields()} <= {"draw", "task"}
