"""A list of finalizers: what each of them sees, which of them decides, and what accumulates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from msgspec import structs

from rollmesh.services.reward.config import RewardConfig, build_engine
from rollmesh.services.reward.finalizer import FINALIZERS, Finalizer, FinalizerDecision, Group, Verdict
from rollmesh.services.reward.finalizer_list import ConfiguredFinalizer, decide
from rollmesh.services.reward.item import TaskView
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import GroupContext, MemberOutcome, Outcome, Reward
from rollmesh.shared.errors import ConfigError, GroupCodeFailed
from rollmesh.trainer.estimators import make_estimator

from .builders import member

KEEP, FILTER, EXTEND = FinalizerDecision.KEEP, FinalizerDecision.FILTER, FinalizerDecision.EXTEND
GRPO = make_estimator("grpo")


class Seen(Finalizer):
    """A finalizer that notes the groups that it sees, and returns the verdict of a function."""

    def __init__(self, verdict: Callable[[Group], Verdict] = lambda group: Verdict(decision=KEEP)) -> None:
        self.groups: list[Group] = []
        self._verdict = verdict

    def decide(self, group: Group) -> Verdict:
        self.groups.append(group)
        return self._verdict(group)


def says(decision: FinalizerDecision = KEEP, **values: Any) -> Seen:
    return Seen(lambda group: Verdict(decision=decision, **values))


def run(*finalizers: Finalizer, members: tuple[MemberOutcome, ...] = (), **values: Any) -> Verdict:
    members = members or tuple(member(name, float(name == "a")) for name in "abcd")
    given = Group(
        group="g",
        task=TaskView(task_id="t"),
        members=members,
        advantages=GRPO.of_group(GroupContext(group="g", task="t", members=members)),
        **values,
    )
    configured = [ConfiguredFinalizer(name=f"f{n}", finalizer=one) for n, one in enumerate(finalizers)]
    return decide(configured, given, GRPO.of_group)


def ids(members: tuple[MemberOutcome, ...]) -> list[str]:
    return [one.sample_id for one in members]


def value(group: Group, name: str) -> float:
    return next(one.rewards[0].value for one in (*group.members, *group.dropped) if one.sample_id == name)


def test_a_finalizer_does_not_see_members_that_earlier_ones_dropped() -> None:
    last = says(dropped={"c": "LATE"})
    verdict = run(says(dropped={"b": "LOOP"}), Seen(), last)
    (seen,) = last.groups
    assert ids(seen.members) == ["a", "c", "d"]
    assert [(one.sample_id, one.end) for one in seen.dropped] == [("b", "filtered/LOOP")]
    assert seen.advantages.keys() == {"a", "c", "d"}
    assert (verdict.decision, verdict.dropped) == (KEEP, {"b": "LOOP", "c": "LATE"})


def test_an_extension_after_the_deadline_leaves_the_decision_to_the_next_finalizer() -> None:
    first = says(EXTEND, num_extend=2)
    for values in ({"deadline_passed": True}, {"num_extend_max": 0}):
        verdict = run(first, says(FILTER, reason="DULL"), **values)
        assert (verdict.decision, verdict.reason) == (FILTER, "DULL")
        assert run(Seen(), first, **values) == Verdict(decision=KEEP)
    assert run(first, says(FILTER, reason="DULL")) == Verdict(decision=EXTEND, num_extend=2)
    assert run(first, says(FILTER, reason="DULL"), num_extend_max=1) == Verdict(decision=EXTEND, num_extend=1)


def test_a_dropped_member_counts_in_the_baseline_of_the_others() -> None:
    last = Seen()
    run(says(dropped={"b": "LOOP"}), last)
    members = tuple(member(name, float(name == "a")) for name in "abcd")
    whole = GRPO.of_group(GroupContext(group="g", task="t", members=members))
    assert last.groups[0].advantages == {name: whole[name] for name in "acd"}


def test_advantages_follow_rewards_that_an_earlier_finalizer_adjusted() -> None:
    last = Seen()
    changed = {"a": (Reward(name="correct", value=0.0),), "b": (Reward(name="correct", value=3.0),)}
    verdict = run(says(adjusted=changed, dropped={"b": "LOOP"}), last)
    (seen,) = last.groups
    assert (value(seen, "a"), value(seen, "b")) == (0.0, 3.0)
    assert seen.advantages["a"] < 0
    assert seen.advantages.keys() == {"a", "c", "d"}
    assert verdict.adjusted == changed


def test_a_dropped_member_without_usable_rewards_does_not_count_in_the_baseline() -> None:
    last = Seen()
    failed = {"a": (Reward(name="correct", value=0.0, outcome=Outcome.INFRA_FAILURE),)}
    run(says(adjusted=failed, dropped={"a": "LEAKED"}), last)
    assert last.groups[0].advantages == {"b": 0.0, "c": 0.0, "d": 0.0}, "the others have equal rewards"


@pytest.mark.parametrize(
    ("decision", "values"), [(FILTER, {"reason": "TOO_EASY"}), (EXTEND, {"num_extend": 2})], ids=lambda v: str(v)
)
def test_the_first_that_does_not_keep_decides_with_the_drops_and_rewards_of_all_before_it(
    decision: FinalizerDecision, values: Mapping[str, Any]
) -> None:
    never = Seen()
    changed = {"a": (Reward(name="correct", value=0.5),)}
    verdict = run(says(adjusted=changed, dropped={"b": "LOOP"}), says(decision, dropped={"d": "LATE"}, **values), never)
    assert not never.groups
    changes: dict[str, Any] = {"adjusted": changed, "dropped": {"b": "LOOP", "d": "LATE"}} if decision is FILTER else {}
    assert verdict == Verdict(decision=decision, **changes, **values), "a larger group is decided on again"


def test_no_finalizer_is_asked_about_a_group_without_members() -> None:
    never = says(FILTER, reason="TOO_FEW_SURVIVORS")
    verdict = run(says(dropped={"a": "LOOP", "b": "LOOP"}), says(dropped={"c": "LATE", "d": "LOOP"}), never)
    assert not never.groups
    assert verdict.dropped == {"a": "LOOP", "b": "LOOP", "c": "LATE", "d": "LOOP"}


def test_a_member_is_dropped_once() -> None:
    with pytest.raises(GroupCodeFailed) as caught:
        run(says(dropped={"b": "LOOP"}), says(dropped={"b": "LATE"}))
    assert "finalizer f1: ValueError: `Verdict.dropped` must name members of `group.members`" in str(caught.value)
    assert "got 'b', which an earlier finalizer dropped; remove it" in str(caught.value)


def test_dropped_members_count_in_the_limit_of_a_group_that_is_extended() -> None:
    equal = tuple(member(name, 1.0) for name in "abcd")
    for limit, decision in ((4, FILTER), (5, EXTEND)):
        options = {"extend_by": 1, "members_max": limit}
        zero = FINALIZERS.make(Extension("zero_variance", options))
        assert run(says(dropped={"b": "LOOP"}), zero, members=equal).decision is decision, limit


def test_the_look_ahead_reads_the_baseline_of_all_members_and_counts_their_episodes() -> None:
    prior = Reward(name="prior", value=0.9)
    solved = [structs.replace(one, rewards=(*one.rewards, prior)) for one in (member("a", 0.0), member("b", 1.0))]
    for limit, decision in ((2, KEEP), (3, EXTEND)):
        ahead = FINALIZERS.make(Extension("look_ahead", {"members_max": limit, "cost": 0.0}))
        assert run(says(dropped={"b": "LOOP"}), ahead, members=tuple(solved)).decision is decision, limit


def test_the_configuration_has_the_finalizers_in_order() -> None:
    config = config_from_dict(
        RewardConfig, {"finalizers": [{"name": "band", "options": {"low": 0.5}}, "zero_variance"]}
    )
    assert [one.name for one in build_engine(config).finalizers] == ["band", "zero_variance"]
    with pytest.raises(ConfigError, match=r"`finalizers`"):
        config_from_dict(RewardConfig, {"finalizers": []})
