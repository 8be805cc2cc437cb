"""Priorities of the replay log, with numbers computed by hand."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from rollmesh.services.coordinator.core.records import UNLIMITED, ReplaySpec, RunSpec
from rollmesh.services.coordinator.core.replay_priorities import (
    Advantage,
    Compensation,
    Fifo,
    Member,
    Return,
    SuccessPerTask,
    Worth,
    make_priority,
)
from rollmesh.services.coordinator.fact_codec import decode, encode
from rollmesh.shared.config.settings import SettingError
from rollmesh.v1 import events_pb2
from tests.sim.world import endless_spec


def members(*found: tuple[float, int]) -> list[Member]:
    return [Member(f"s{number}", reward, tokens, used=True) for number, (reward, tokens) in enumerate(found)]


def worth(*, advantage: float = 0.0, mean_return: float = 0.0, age: int = 0) -> Worth:
    return Worth(advantage, mean_return, age)


def test_fifo_keeps_used_samples_of_groups_with_an_advantage() -> None:
    some = [Member("a", 1.0, 3, used=True), Member("b", 0.0, 3, used=False)]
    assert Fifo().kept(some, 0.0) == ("a",)
    assert Fifo(advantage_min=1e-6).kept(some, 0.0) == ()
    assert Fifo(advantage_min=1e-6).kept(some, 0.5) == ("a",)
    assert Fifo().order(worth(advantage=9.0), 0.25) == 0.25


def test_the_largest_advantage_is_first() -> None:
    assert Advantage().kept(members((1.0, 3), (1.0, 3)), 0.0) == ()
    assert Advantage().order(worth(advantage=0.5), 0.9) > Advantage().order(worth(advantage=0.25), 0.1)


def test_a_return_adds_to_a_gumbel_draw() -> None:
    # R / tau - ln(-ln(u)) = 1 / 0.5 - ln(-ln(0.5)) = 2 + 0.36651
    assert Return(temperature=0.5).order(worth(mean_return=1.0), 0.5) == pytest.approx(2.36651, abs=1e-5)


@pytest.mark.row("S157")
def test_the_mean_return_of_the_drawn_rises_with_the_inverse_temperature() -> None:
    """Returns 0, 1, 2, 3 with weights exp(R / tau): the mean of one draw is sum(R exp(R / tau)) / sum(exp(R / tau))."""
    rng = random.Random(0)
    means = []
    for temperature in (100.0, 2.0, 0.5):
        priority = Return(temperature=temperature)
        drawn = [
            max(range(4), key=lambda value: priority.order(worth(mean_return=value), rng.random() or 0.5))
            for _ in range(2000)
        ]
        weights = [math.exp(value / temperature) for value in range(4)]
        expected = sum(value * weight for value, weight in enumerate(weights)) / sum(weights)
        assert sum(drawn) / len(drawn) == pytest.approx(expected, abs=0.1)
        means.append(sum(drawn) / len(drawn))
    assert means == sorted(means)
    assert means[-1] - means[0] > 1.0


def test_the_newest_success_of_a_task_is_kept() -> None:
    some = members((1.0, 3), (0.0, 3), (1.0, 9), (0.5, 3))
    assert SuccessPerTask().kept(some, 0.5) == ("s2",)
    assert SuccessPerTask(success_min=0.5).kept(some, 0.5) == ("s3",)
    assert SuccessPerTask().kept(some[1:2], 0.0) == ()


@pytest.mark.row("S050")
def test_the_first_part_of_a_batch_is_the_shortest_correct_and_the_longest_incorrect() -> None:
    correct, wrong = [(1.0, n) for n in (40, 10, 30, 20)], [(0.0, n) for n in (5, 50, 25)]
    some = members(*correct, *wrong)
    first = Compensation(alpha=0.5).first(some)
    assert first == {"s1", "s3", "s5", "s6"}, "10 and 20 tokens of 4 correct, 50 and 25 of 3 incorrect"
    tokens = {member.sample_id: member.num_tokens for member in some}
    lengths = {name: tokens[name] for name in first}
    assert (lengths["s1"] + lengths["s3"]) / 2 < sum(n for _, n in correct) / 4
    assert (lengths["s5"] + lengths["s6"]) / 2 > sum(n for _, n in wrong) / 3


@pytest.mark.parametrize(
    ("fields", "field", "what"),
    [
        ({"max_staleness": 0}, "max_staleness", "in [1, 1000000000] or unlimited, got 0; it has no default"),
        ({"max_staleness": -1}, "max_staleness", "or unlimited, got -1"),
        ({"share": 0.0}, "share", "must be in"),
        ({"priority": "newest"}, "priority", "must be one of fifo, advantage, return, success_per_task, compensation"),
        ({"options": {"temperature": 1.0}}, "options.temperature", "must be an option of fifo"),
        ({"priority": "return", "options": {"temperature": 0.0}}, "options.temperature", "must be > 0"),
        (
            {"priority": "success_per_task", "options": {"after_groups": 1.5}},
            "options.after_groups",
            "must be a whole number, got 1.5",
        ),
        (
            {"priority": "compensation", "share": 1.0, "options": {"extra_updates": 0.5}},
            "options.extra_updates",
            "must be a whole number, got 0.5",
        ),
        ({"priority": "compensation"}, "share", "must be 1 with priority compensation"),
    ],
)
def test_a_wrong_replay_log_is_refused(fields: dict[str, Any], field: str, what: str) -> None:
    valid: dict[str, Any] = {"max_staleness": UNLIMITED, "share": 0.5, "capacity_groups": 8}
    with pytest.raises(SettingError) as caught:
        ReplaySpec(**(valid | fields))
    assert caught.value.field == field
    assert what in caught.value.what


@pytest.mark.parametrize(
    ("spec", "fields", "field"),
    [
        ({"batch_groups": 1}, {}, "replay.share"),
        ({"batch_groups": 4}, {"share": 0.2}, "replay.share"),
        ({"batch_groups": 1}, {"share": 1.0}, "batch_groups"),
        ({"batch_groups": 4, "group_size": 1}, {"priority": "advantage"}, "group_size"),
        ({"batch_groups": 9}, {"priority": "compensation", "share": 1.0}, "replay.capacity_groups"),
        (
            {"batch_groups": 4, "max_staleness": 4},
            {"priority": "compensation", "share": 1.0},
            "replay.max_staleness",
        ),
        ({"batch_groups": 4, "export_groups": 4}, {}, "replay"),
    ],
)
def test_a_replay_log_that_does_not_fit_its_run_is_refused(
    spec: dict[str, Any], fields: dict[str, Any], field: str
) -> None:
    replay = ReplaySpec(**{"max_staleness": 4, "share": 0.5, "capacity_groups": 8} | fields)
    with pytest.raises(SettingError) as caught:
        endless_spec(**{"group_size": 2, "replay": replay} | spec)
    assert caught.value.field == field


def test_a_priority_is_made_once() -> None:
    assert make_priority("fifo", {}) is make_priority("fifo", {})


@pytest.mark.parametrize(("share", "amount", "quota"), [(0.29, 100, 29), (1 / 49, 49, 1), (0.5, 5, 2), (1.0, 4, 3)])
def test_a_share_that_is_a_rounded_number_has_all_of_its_groups(share: float, amount: int, quota: int) -> None:
    replay = ReplaySpec(max_staleness=4, share=share, capacity_groups=8)
    assert replay.quota(amount) == quota
    assert endless_spec(batch_groups=amount, replay=replay).fresh_groups == amount - quota


def test_an_unlimited_bound_admits_all_and_must_be_written() -> None:
    assert ReplaySpec(max_staleness="unlimited").bound.max_staleness == 10**9
    spec = endless_spec(batch_groups=4, replay=ReplaySpec(max_staleness="unlimited"))
    message = encode(spec, events_pb2.RunSpec)
    assert message.replay.max_staleness == "unlimited"
    assert decode(RunSpec, message) == spec
    message.replay.ClearField("max_staleness")
    with pytest.raises(SettingError, match="has no default"):
        decode(RunSpec, message)
