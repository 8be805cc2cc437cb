"""The stop rule of V0.5: when a group gets further episodes, and that the coordinator adds them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core.core import Decision
from rollmesh.services.coordinator.core.facts import EpisodesAdded, GroupDecision
from rollmesh.services.reward.finalizer import FINALIZERS, FinalizerDecision, Group, Verdict
from rollmesh.services.reward.item import TaskView
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import GroupContext, MemberOutcome, Outcome, Reward
from rollmesh.shared.errors import ConfigError
from rollmesh.trainer.estimators import make_estimator
from rollmesh.trainer.estimators.v05 import V05Options, error_of_baseline, weight_of_prior
from tests.unit.coordinator.core_run import CoreRun


def members(prior: float | None, *rewards: float, outcome: Outcome = Outcome.OK) -> tuple[MemberOutcome, ...]:
    given = () if prior is None else (Reward(name="prior", value=prior),)
    return tuple(
        MemberOutcome(sample_id=f"s{n}", rewards=(Reward(name="r", value=r, outcome=outcome), *given), end="ready")
        for n, r in enumerate(rewards)
    )


def decide(found: tuple[MemberOutcome, ...], options: dict[str, Any] | None = None, **settings: Any) -> Verdict:
    group = Group(group="g", task=TaskView(task_id="t"), members=found, **settings)
    made = FINALIZERS.make(Extension("look_ahead", options or {})).decide(group)
    assert isinstance(made, Verdict)
    return made


def test_the_expected_error_equals_the_hand_computed_value() -> None:
    """Mean 1 of 4 episodes, V = 0.5, largest variance 1/4: s2 = 1/16, D2 = 1/4 - 1/16 = 3/16, e(4) = 3/64; with s2 =
    1/20, e(5) = (3/320) / (19/80) = 3/76."""
    assert error_of_baseline(1.0, 0.5, 4, 0, 0.25) == pytest.approx(3 / 64)
    assert error_of_baseline(1.0, 0.5, 4, 1, 0.25) == pytest.approx(3 / 76)
    assert error_of_baseline(0.6, 0.5, 4, 0, 0.25) == 0.0, "the prior is not rejected"
    gain = 4 * (3 / 64 - 3 / 76)  # in units of the variance
    one = members(0.5, 1.0, 1.0, 1.0, 1.0)
    assert decide(one, {"cost": 0.99 * gain}).decision is FinalizerDecision.EXTEND
    assert decide(one, {"cost": 1.01 * gain}).decision is FinalizerDecision.KEEP


def test_the_default_cost_stops_at_sixteen_episodes_whatever_the_prior() -> None:
    sizes = [n for n in range(2, 40) if decide(members(-50.0, *[1.0] * n), {"members_max": 99}).num_extend]
    assert sizes == list(range(2, 16)), "1 / (n (n + 1)) > 1 / 256 below 16"


def test_what_cannot_or_need_not_grow_is_kept() -> None:
    wrong = members(0.0, 1.0, 1.0, 1.0, 1.0)
    assert decide(wrong).num_extend == 1
    assert decide(wrong, {"extend_by": 4}).num_extend == 4
    assert decide(wrong, {"extend_by": 4}, num_unscored=10).num_extend == 2
    for found, settings in (
        (wrong, {"deadline_passed": True}),
        (wrong, {"num_unscored": 12}),
        (members(None, 1.0, 1.0), {}),
        (members(0.0, 1.0, 1.0, outcome=Outcome.INFRA_FAILURE), {}),
        ((), {}),
    ):
        assert decide(found, **settings).decision is FinalizerDecision.KEEP
    assert decide(wrong, {"weights": {"other": 1.0}}).decision is FinalizerDecision.KEEP, "their sum is the prior"
    two = tuple(replace_episode(m, "e") for m in members(0.0, 1.0, 1.0))
    assert decide(two, {"members_max": 1}).decision is FinalizerDecision.KEEP, "one episode of two samples"
    assert decide(two, {"members_max": 2}).num_extend == 1
    with pytest.raises(ConfigError, match="`low` must be < high = 0.0, got 1.0"):
        FINALIZERS.make(Extension("look_ahead", {"low": 1.0, "high": 0.0}))


def replace_episode(member: MemberOutcome, episode: str) -> MemberOutcome:
    return MemberOutcome(sample_id=member.sample_id, rewards=member.rewards, end=member.end, episode=episode)


@pytest.mark.row("S022")
def test_a_wrong_prior_is_dropped_after_further_episodes_and_a_right_one_stops_at_once() -> None:
    """120 prompts with the pass rate 0.9 and 4 episodes at first. With a right prior the baseline is better than the
    mean of as many episodes, and with one that is wrong by 0.8 its weight vanishes."""
    rng, rate, options = np.random.default_rng(0), 0.9, V05Options()
    made: Any = FINALIZERS.make("look_ahead")
    results = {}
    for prior in (0.9, 0.1):
        sizes, weights, errors, plain = [], [], [], []
        for _ in range(120):
            rewards = (rng.random(4) < rate).astype(float).tolist()
            while num := made.decide(
                Group(group="g", task=TaskView(task_id="t"), members=members(prior, *rewards))
            ).num_extend:
                rewards += (rng.random(num) < rate).astype(float).tolist()
            mean = float(np.mean(rewards))
            weight = weight_of_prior(mean, prior, len(rewards), options)
            sizes.append(len(rewards))
            weights.append(weight)
            errors.append(((1 - weight) * mean + weight * prior - rate) ** 2)
            plain.append((mean - rate) ** 2)
        results[prior] = [float(np.mean(values)) for values in (sizes, weights, errors, plain)]
    size, weight, error, of_mean = results[0.9]
    assert size < 4.5
    assert error < 0.5 * of_mean
    size, weight, error, of_mean = results[0.1]
    assert size > 8
    assert weight < 0.06
    found = make_estimator("v05").of_group(GroupContext(group="g", task="t", members=members(0.1, *[1.0] * 16)))
    assert max(found.values()) < 0.02, "the baseline is almost the mean"


@pytest.mark.row("S022")
def test_the_coordinator_adds_an_episode_to_an_open_group() -> None:
    """Every reward is 1 and the prior 0.1, so groups of 4 grow by one episode at a time, up to the limit."""
    verdicts: list[Verdict] = []

    class Growing(CoreRun):
        def take(self, decision: Decision) -> dict[int, Any]:
            core, handle = self.core, self.core.handle

            def decided(given: Any, now: float) -> Decision:
                if isinstance(given, i.GroupDecided):
                    num = len(core.state.groups[given.group].episodes)
                    verdicts.append(decide(members(0.1, *[1.0] * num), {"members_max": 6}))
                    if verdicts[-1].decision is FinalizerDecision.EXTEND:
                        given = replace(given, decision=GroupDecision.EXTEND, num_extend=verdicts[-1].num_extend)
                return handle(given, now)

            core.handle = decided  # type: ignore[method-assign, assignment]
            try:
                return super().take(decision)
            finally:
                core.handle = handle  # type: ignore[method-assign]

    run = Growing(batch_groups=1, group_size=4, max_staleness=0)
    run.begin()
    for num in (4, 1, 1):
        assert len(run.generate(num, step=0)) == num
    assert [v.num_extend for v in verdicts] == [1, 1, 0]
    assert [f.num_episodes for f in run.facts if isinstance(f, EpisodesAdded)] == [1, 1]
    assert len(run.lease(1).samples) == 6
