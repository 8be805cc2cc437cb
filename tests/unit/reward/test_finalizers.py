"""Deciding on groups."""

from __future__ import annotations

from typing import Any

import pytest

from rollmesh.services.reward.finalizer import FINALIZERS, Decision, Group, Verdict
from rollmesh.services.reward.item import TaskView
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.trajectory import MemberOutcome, Outcome
from rollmesh.v1 import reward_pb2

from .builders import member

INFRA = Outcome.INFRA_FAILURE


def decide(*members: MemberOutcome, options: dict[str, Any] | None = None, **settings: Any) -> Verdict:
    group = Group(group="g", task=TaskView(task_id="t"), members=members, **settings)
    made = FINALIZERS.make("zero_variance", options or {}).decide(group)
    assert isinstance(made, Verdict)
    return made


def test_a_group_with_variance_is_kept() -> None:
    assert decide(member("1", 1.0), member("2", 0.0)).decision is Decision.KEEP


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_group_without_variance_is_filtered_with_its_reason(value: float) -> None:
    verdict = decide(member("1", value), member("2", value))
    assert (verdict.decision, verdict.reason) == (Decision.FILTER, "ZERO_VARIANCE")


def test_an_infra_failure_is_no_zero() -> None:
    solved = [member("1", 1.0), member("2", 1.0), member("3", 0.0, outcome=INFRA)]
    assert decide(*solved).reason == "ZERO_VARIANCE"
    assert decide(*solved, member("4", 0.0)).decision is Decision.KEEP


def test_a_member_is_left_out_when_any_reward_that_counts_failed() -> None:
    half = MemberOutcome(
        sample_id="3", rewards=(*member("x", 0.0).rewards, *member("x", 1, 1, outcome=INFRA).rewards[1:]), end="ready"
    )
    assert decide(member("1", 1.0, 1.0), member("2", 1.0, 1.0), half).reason == "ZERO_VARIANCE"
    # With a weight on `a` alone the failed `b` does not count, and the member differs.
    assert decide(member("1", 1.0, 1.0), member("2", 1.0, 1.0), half, weights={"a": 1.0}).decision is Decision.KEEP


def test_the_weighted_total_decides() -> None:
    members = [member("1", 1.0, 0.0), member("2", 0.0, 2.0)]
    assert decide(*members, weights={"a": 2.0, "b": 1.0}).reason == "ZERO_VARIANCE"
    assert decide(*members, weights={"a": 1.0, "b": 1.0}).decision is Decision.KEEP


def test_differences_within_epsilon_are_none() -> None:
    members = [member("1", 1.0), member("2", 1.1)]
    assert decide(*members, options={"epsilon": 0.2}).reason == "ZERO_VARIANCE"
    assert decide(*members, options={"epsilon": 0.05}).decision is Decision.KEEP


def test_too_few_survivors_are_filtered() -> None:
    verdict = decide(member("1", 1.0), member("2", 0.0, outcome=INFRA), num_unscored=2)
    assert (verdict.decision, verdict.reason) == (Decision.FILTER, "TOO_FEW_SURVIVORS")


def test_a_group_without_variance_grows_until_the_limit_or_the_deadline() -> None:
    members = [member("1", 0.0), member("2", 0.0)]
    options = {"extend_by": 4, "members_max": 8}
    grown = decide(*members, options=options)
    assert (grown.decision, grown.num_extend) == (Decision.EXTEND, 4)
    assert decide(*members, options=options, num_unscored=5).num_extend == 1
    assert decide(*members, options=options, num_unscored=6).decision is Decision.FILTER
    assert decide(*members, options=options, deadline_passed=True).decision is Decision.FILTER
    assert decide(*members, member("3", 1.0), options=options).decision is Decision.KEEP


def test_keep_all_keeps_groups_without_variance() -> None:
    group = Group(group="g", task=TaskView(task_id="t"), members=(member("1", 0.0), member("2", 0.0)))
    assert FINALIZERS.make("keep_all", {}).decide(group).decision is Decision.KEEP


def test_decisions_have_the_numbers_of_the_proto() -> None:
    for decision in Decision:
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
        FINALIZERS.make("zero_variance", options)
