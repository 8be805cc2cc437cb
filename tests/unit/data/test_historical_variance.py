"""The selector by historical variance: the ranking by hand, and training on its first task."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmesh.services.coordinator import metrics
from rollmesh.services.data.draws import RunDraws
from rollmesh.services.data.selector import SELECTORS, GroupResult
from rollmesh.services.data.task import TaskPool
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import GroupContext, MemberOutcome, Reward
from rollmesh.shared.errors import ConfigError, CorruptSnapshot
from rollmesh.trainer.estimators import make_estimator

from .builders import created, factory, finalized, leveled, reserved
from .test_draws import fold

NAME = "historical_variance"
DASHBOARD = Path(__file__).parents[3] / "deploy" / "grafana" / "run.json"


def selector(tasks: TaskPool, *, seed: int = 0, **options: Any) -> Any:
    return SELECTORS.make(Extension(NAME, options), pool=tasks, seed=seed)


def decide(chosen: Any, position: int, successes: float, failures: float) -> None:
    chosen.observe(GroupResult(position=position, successes=successes, failures=failures))


def test_tasks_are_ranked_by_the_variance_of_their_rates() -> None:
    chosen = selector(leveled(*"12345"), history_epochs=2, num_top=2)
    history = [chosen.draw(n, frozenset()) for n in range(10)]
    assert sorted(history[:5]) == sorted(history[5:]) == list(range(5)), "two epochs"
    for position, first, second in ((0, 0.25, 0.5), (1, 1.0, 1.0), (2, 0.0, 1.0), (4, 0.75, 0.0)):
        decide(chosen, position, 4 * first, 4 - 4 * first)
        decide(chosen, position, 4 * second, 4 - 4 * second)
    decide(chosen, 3, 0.0, 0.0)  # no member was scored
    # variances: (1/8)^2, 0, (1/2)^2, none, (3/8)^2
    assert chosen.variances().tolist() == pytest.approx([1 / 64, 0.0, 1 / 4, -1.0, 9 / 64])
    assert chosen.ranking() == [2, 4, 0, 1, 3]
    in_flight = frozenset({2, 4})
    assert [chosen.draw(n, in_flight) for n in range(10, 16)] == [2, 4, 2, 4, 2, 4], "copies fill the batch"


def test_groups_after_the_history_do_not_change_the_ranking() -> None:
    chosen = selector(leveled("1", "2"), history_epochs=2)
    for rate in (0.0, 1.0):
        decide(chosen, 0, rate, 1 - rate)
        decide(chosen, 1, 0.5, 0.5)
    for _ in range(50):
        decide(chosen, 0, 1.0, 0.0)
    assert chosen.variances().tolist() == [0.25, 0.0]
    assert chosen.draw(4, frozenset()) == 0


def test_a_later_group_takes_the_place_of_one_of_the_history_without_a_score() -> None:
    """Variances 1/64 of two rates and 1/18 of three; with the rate of the later group 13/72."""
    chosen = selector(leveled("1", "2"), history_epochs=3)
    for position, rate in ((0, 0.0), (0, 0.25), (1, 0.0), (1, 0.0), (1, 0.5)):
        decide(chosen, position, rate, 1 - rate)
    assert chosen.draw(6, frozenset()) == 1
    decide(chosen, 0, 1.0, 0.0)
    assert chosen.draw(7, frozenset()) == 0


def test_the_chosen_tasks_are_logged_and_may_be_given_to_a_second_run(caplog: pytest.LogCaptureFixture) -> None:
    chosen = selector(leveled("1", "2"), history_epochs=2)
    for rate in (0.0, 1.0):
        decide(chosen, 1, rate, 1 - rate)
    with caplog.at_level(logging.INFO):
        assert [chosen.draw(n, frozenset()) for n in (4, 5)] == [1, 1]
    assert [record.getMessage() for record in caplog.records] == [
        "the history is complete: tasks=[t1 (0.2500)], with their variance"
    ]
    second = selector(leveled("1", "2", "3"), chosen=["t2", "t0"])
    assert [second.draw(n, frozenset()) for n in range(4)] == [2, 0, 2, 0]
    decide(second, 1, 1.0, 0.0)
    assert second.rates == {1: []}
    with pytest.raises(ConfigError, match="`chosen` must name training tasks, got 't9'"):
        selector(leveled("1"), chosen=["t9"])
    with pytest.raises(ConfigError, match="`history_epochs` must be >= 2 without `chosen`, got 1"):
        selector(leveled("1"), history_epochs=1)


def test_a_snapshot_continues_with_the_same_draws_and_other_states_are_rejected() -> None:
    tasks = leveled(*"1122")
    chosen, other = selector(tasks, history_epochs=3), selector(tasks, history_epochs=3)
    for n in range(8):
        decide(chosen, n % 4, float(n % 3), 2.0)
    other.restore(chosen.snapshot())
    for each in (chosen, other):
        decide(each, 3, 4.0, 0.0)
    assert [chosen.draw(n, frozenset()) for n in range(20)] == [other.draw(n, frozenset()) for n in range(20)]
    assert chosen.snapshot() == other.snapshot()
    before = chosen.snapshot()
    for state in (b"", b"junk", selector(leveled("1")).snapshot(), before.replace(b"rates", b"rate_")):
        with pytest.raises(CorruptSnapshot):
            chosen.restore(state)
        assert chosen.snapshot() == before


class Sigmoid:
    """A policy with one weight: it solves task i with the probability sigmoid(weight - hardness(i))."""

    def __init__(self, hardness: dict[int, float]) -> None:
        self.hardness, self.weight = hardness, 0.0
        self._estimator = make_estimator("grpo")

    def rate(self, hardness: float) -> float:
        return float(1 / (1 + np.exp(hardness - self.weight)))

    def episodes(self, position: int, rng: np.random.Generator) -> list[float]:
        return [float(draw < self.rate(self.hardness[position])) for draw in rng.random(8)]

    def train(self, position: int, rewards: list[float]) -> None:
        """Ascend along the policy gradient of a group, with the advantages of GRPO."""
        members = (
            MemberOutcome(sample_id=str(n), rewards=(Reward(name="r", value=r),), end="ready")
            for n, r in enumerate(rewards)
        )
        advantages = self._estimator.of_group(GroupContext(group="g", task="t", members=tuple(members)))
        scores = np.array(rewards) - self.rate(self.hardness[position])  # d log p / d weight
        self.weight += 0.3 * float(np.mean(np.array(list(advantages.values())) * scores))


@pytest.mark.row("S049")
def test_training_on_the_task_of_the_largest_variance_improves_held_out_tasks_after_it_is_solved() -> None:
    """Two solved tasks, three that become solved in the history, and two impossible ones. The held-out tasks are
    harder, and need the same weight."""
    hardness = dict(enumerate((-9.0, -9.0, 0.0, 1.0, 2.0, 90.0, 90.0)))
    policy, rng, epochs = Sigmoid(hardness), np.random.default_rng(0), 8
    tasks = leveled(*(str(n) for n in hardness))
    draws = RunDraws(pool=tasks, new_selector=factory(NAME, history_epochs=epochs))
    fold(draws, created())
    rates: dict[int, list[float]] = {n: [] for n in hardness}

    def step(draw: int) -> int:
        (position,) = draws.positions("main", draw, 1)
        rewards = policy.episodes(position, rng)
        fold(draws, reserved(draw, f"t{position}", num_episodes=8), finalized(draw, *rewards))
        policy.train(position, rewards)
        rates[position].append(float(np.mean(rewards)))
        return position

    history = epochs * len(tasks)
    for draw in range(history):
        step(draw)
    assert {len(found) for found in rates.values()} == {epochs}
    top = max(rates, key=lambda n: float(np.var(rates[n])))
    assert np.var(rates[top]) > 0.01
    restarted = RunDraws(pool=tasks, new_selector=factory(NAME, history_epochs=epochs))
    restarted.restore(draws.snapshot())
    draws = restarted
    held_out = []
    for draw in range(history, history + 1500):
        assert step(draw) == top
        held_out.append(float(np.mean([policy.rate(h) for h in (5.0, 6.0, 7.0)])))
    trained = np.array(rates[top][epochs:])
    saturated = next(n for n in range(20, 1500) if trained[n - 20 : n].min() == 1.0)
    assert trained[saturated:].mean() > 0.98
    assert held_out[-1] > held_out[saturated] + 0.1, "held-out success rises after the training task is solved"
    shown = {
        query["expr"] for panel in json.loads(DASHBOARD.read_text())["panels"] for query in panel.get("targets", [])
    }
    for name in (metrics.HELDOUT.name, metrics.REWARD.name):
        assert any(name in expr for expr in shown), f"one dashboard has {name} and the other"
