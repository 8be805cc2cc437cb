"""Deciding on groups."""

from __future__ import annotations

from typing import Any

import pytest

from rollmesh.services.reward.finalizer import FINALIZERS, FinalizerDecision, Group, Verdict
from rollmesh.services.reward.item import TaskView
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import GroupContext, MemberOutcome, Outcome
from rollmesh.shared.errors import ConfigError
from rollmesh.trainer.estimators import make_estimator
from rollmesh.v1 import reward_pb2

from .builders import member

INFRA = Outcome.INFRA_FAILURE


def decide(
    *members: MemberOutcome,
    options: dict[str, Any] | None = None,
    estimator: str = "grpo",
    weights: dict[str, float] | None = None,
    **settings: Any,
) -> Verdict:
    advantages = make_estimator(estimator, weights).of_group(GroupContext(group="g", task="t", members=members))
    group = Group(group="g", task=TaskView(task_id="t"), members=members, advantages=advantages, **settings)
    made = FINALIZERS.make(Extension("zero_variance", options or {})).decide(group)
    assert isinstance(made, Verdict)
    return made


def test_a_group_with_variance_is_kept() -> None:
    assert decide(member("1", 1.0), member("2", 0.0)).decision is FinalizerDecision.KEEP


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_group_without_variance_is_filtered_with_its_reason(value: float) -> None:
    verdict = decide(member("1", value), member("2", value))
    assert (verdict.decision, verdict.reason) == (FinalizerDecision.FILTER, "ZERO_VARIANCE")


def test_an_infra_failure_is_no_zero() -> None:
    solved = [member("1", 1.0), member("2", 1.0), member("3", 0.0, outcome=INFRA)]
    assert decide(*solved).reason == "ZERO_VARIANCE"
    assert decide(*solved, member("4", 0.0)).decision is FinalizerDecision.KEEP


def test_a_member_is_left_out_when_any_of_its_rewards_failed() -> None:
    half = MemberOutcome(
        sample_id="3", rewards=(*member("x", 0.0).rewards, *member("x", 1, 1, outcome=INFRA).rewards[1:]), end="ready"
    )
    assert decide(member("1", 1.0, 1.0), member("2", 1.0, 1.0), half).reason == "ZERO_VARIANCE"


@pytest.mark.parametrize(
    ("estimator", "weights", "rewards", "advantages", "decision"),
    [
        # The totals tie at 2: nothing to learn by totals, +-1 with each reward normalized by itself (2 * 1 - 1 * 1).
        ("grpo", {"a": 2.0, "b": 1.0}, [(1.0, 0.0), (0.0, 2.0)], [0.0, 0.0], FinalizerDecision.FILTER),
        ("gdpo", {"a": 2.0, "b": 1.0}, [(1.0, 0.0), (0.0, 2.0)], [1.0, -1.0], FinalizerDecision.KEEP),
        # The totals differ, 1 and 2, but the normalized rewards cancel out: 1 - 1.
        ("grpo", {"a": 1.0, "b": 1.0}, [(1.0, 0.0), (0.0, 2.0)], [-1.0, 1.0], FinalizerDecision.KEEP),
        ("gdpo", {"a": 1.0, "b": 1.0}, [(1.0, 0.0), (0.0, 2.0)], [0.0, 0.0], FinalizerDecision.FILTER),
        # Only a reward that is not optimized differs: of weight 0, or not named.
        ("grpo", {"a": 1.0, "b": 0.0}, [(1.0, 0.2), (1.0, 0.7)], [0.0, 0.0], FinalizerDecision.FILTER),
        ("gdpo", {"a": 1.0, "b": 0.0}, [(1.0, 0.2), (1.0, 0.7)], [0.0, 0.0], FinalizerDecision.FILTER),
        ("gdpo", {"a": 1.0}, [(1.0, 0.2), (1.0, 0.7)], [0.0, 0.0], FinalizerDecision.FILTER),
        # Without weights every reward counts once.
        ("gdpo", {}, [(1.0, 0.2), (1.0, 0.7)], [-1.0, 1.0], FinalizerDecision.KEEP),
    ],
)
def test_a_group_is_filtered_exactly_if_every_advantage_of_the_estimator_is_zero(
    estimator: str,
    weights: dict[str, float],
    rewards: list[tuple[float, float]],
    advantages: list[float],
    decision: FinalizerDecision,
) -> None:
    members = [member(str(number), *values) for number, values in enumerate(rewards)]
    context = GroupContext(group="g", task="t", members=tuple(members))
    found = make_estimator(estimator, weights).of_group(context)
    assert list(found.values()) == pytest.approx(advantages, abs=1e-4)
    assert decide(*members, estimator=estimator, weights=weights).decision is decision


@pytest.mark.parametrize("value", [0.1, -1234567.8, 1e12])
def test_equal_rewards_have_advantages_of_exactly_zero(value: float) -> None:
    for estimator in ("grpo", "gdpo"):
        assert decide(*(member(str(n), value) for n in range(7)), estimator=estimator).reason == "ZERO_VARIANCE"


def test_advantages_within_epsilon_are_zero() -> None:
    members = [member("1", 1.0), member("2", 1.1), member("3", 1.1)]  # advantages -1.41, 0.71, 0.71
    assert decide(*members, options={"epsilon": 1.5}).reason == "ZERO_VARIANCE"
    assert decide(*members, options={"epsilon": 1.0}).decision is FinalizerDecision.KEEP


def test_too_few_survivors_are_filtered() -> None:
    verdict = decide(member("1", 1.0), member("2", 0.0, outcome=INFRA), num_unscored=2)
    assert (verdict.decision, verdict.reason) == (FinalizerDecision.FILTER, "TOO_FEW_SURVIVORS")


def test_a_group_without_variance_grows_until_the_limit_or_the_deadline() -> None:
    members = [member("1", 0.0), member("2", 0.0)]
    options = {"extend_by": 4, "members_max": 8}
    grown = decide(*members, options=options)
    assert (grown.decision, grown.num_extend) == (FinalizerDecision.EXTEND, 4)
    assert decide(*members, options=options, num_unscored=5).num_extend == 1
    assert decide(*members, options=options, num_unscored=6).decision is FinalizerDecision.FILTER
    assert decide(*members, options=options, deadline_passed=True).decision is FinalizerDecision.FILTER
    assert decide(*members, options=options, num_extend_max=3).num_extend == 3
    assert decide(*members, options=options, num_extend_max=0).decision is FinalizerDecision.FILTER
    assert decide(*members, member("3", 1.0), options=options).decision is FinalizerDecision.KEEP


def test_keep_all_keeps_groups_without_variance() -> None:
    group = Group(group="g", task=TaskView(task_id="t"), members=(member("1", 0.0), member("2", 0.0)))
    assert FINALIZERS.make("keep_all").decide(group).decision is FinalizerDecision.KEEP


def test_decisions_have_the_numbers_of_the_proto() -> None:
    for decision in FinalizerDecision:
        assert int(reward_pb2.GroupDecision.Value(f"GROUP_DECISION_{decision.name}")) == int(decision)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": -1}, "epsilon.*-1"),
        ({"survivors_min": 0}, "survivors_min.*0"),
        ({"extend_by": -1}, "extend_by.*-1"),
    ],
)
def test_options_out_of_range_name_field_and_value(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FINALIZERS.make(Extension("zero_variance", options))
