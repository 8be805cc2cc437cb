"""The arithmetic of docs/staleness.md, by hand."""

from __future__ import annotations

import pytest

from rollmesh.services.coordinator.core import bound
from rollmesh.services.coordinator.core.facts import StepSpan
from rollmesh.services.coordinator.core.records import Bound, BoundPolicy, RunSpec
from rollmesh.services.coordinator.core.state import PolicyClock, RollBack
from rollmesh.shared.domain.versions import intended_update, oldest_admissible, staleness


def spans(*steps: int, incarnation: int = 0) -> list[StepSpan]:
    return [StepSpan(step=step, incarnation=incarnation, num_tokens=1) for step in steps]


def why(
    one: list[StepSpan], *, update: int, eta: int, beyond: BoundPolicy = BoundPolicy.DROP, clock: PolicyClock
) -> str:
    judged_by = Bound(max_staleness=eta, beyond=beyond)
    return bound.why_inadmissible(one, update=update, bound=judged_by, clock=clock)


CLOCK = PolicyClock(policy="main", learner="main")


def test_sample_of_the_weights_an_update_changes_has_staleness_0() -> None:
    assert staleness(update=5, oldest_step=4) == 0
    assert staleness(update=5, oldest_step=2) == 2


def test_oldest_admissible_is_never_below_the_initial_weights() -> None:
    assert [oldest_admissible(update=k, eta=2) for k in (1, 3, 4, 10)] == [0, 0, 1, 7]


def test_group_n_is_meant_for_the_update_that_uses_it() -> None:
    assert [intended_update(admitted=n, batch=4) for n in (0, 3, 4, 11)] == [1, 1, 2, 3]


@pytest.mark.parametrize(("update", "reason"), [(3, ""), (5, ""), (6, "BEYOND_BOUND")])
def test_bound_counts_from_the_oldest_trained_token(update: int, reason: str) -> None:
    assert why(spans(2, 4) if update > 4 else spans(2), update=update, eta=2, clock=CLOCK) == reason


def test_mask_keeps_a_sample_with_one_young_token() -> None:
    judged_by = Bound(max_staleness=1, beyond=BoundPolicy.MASK)
    old_and_young, old = spans(0, 4), spans(0)
    assert why(old_and_young, update=5, eta=1, beyond=BoundPolicy.MASK, clock=CLOCK) == ""
    assert bound.mask_below_step(old_and_young, update=5, bound=judged_by) == 3
    assert bound.mask_below_step(spans(4), update=5, bound=judged_by) == 0
    assert why(old, update=5, eta=1, beyond=BoundPolicy.MASK, clock=CLOCK) == "BEYOND_BOUND"


def test_tokens_of_undone_steps_are_void_for_ever() -> None:
    clock = PolicyClock(policy="main", learner="main", incarnation=1, rollbacks=[RollBack(incarnation=1, to_update=3)])
    assert why(spans(3), update=4, eta=2, clock=clock) == ""
    assert why(spans(4), update=5, eta=2, clock=clock) == "VOID_VERSION"
    assert why(spans(4, incarnation=1), update=5, eta=2, clock=clock) == ""


def test_token_from_the_future_is_refused() -> None:
    assert why(spans(5), update=5, eta=2, clock=CLOCK) == "FUTURE_VERSION"


def test_sample_without_policy_tokens_has_no_staleness() -> None:
    assert why(spans(), update=100, eta=0, clock=CLOCK) == ""
    assert bound.sample_staleness([], update=100) == -1


def test_publishing_too_rarely_for_the_bound_is_refused_with_the_remedy() -> None:
    with pytest.raises(
        ValueError, match=r"`publish_every` must be <= max_staleness \+ 1 = 3, got 4.*raise max_staleness"
    ):
        RunSpec(run="r", max_staleness=2, publish_every=4)
