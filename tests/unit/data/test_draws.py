"""The fold of the ledger: its state, what it drops, and that it is deterministic."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any

import pytest

from rollmesh.services.data.draws import DRAWS_OUTSTANDING_MAX, KEPT_GROUPS_MAX, RunDraws
from rollmesh.services.data.selector import GroupResult, Selector
from rollmesh.services.data.task import TaskPool
from rollmesh.shared.domain.ledger_facts import facts_of
from rollmesh.shared.domain.trajectory import TrainedGroup
from rollmesh.shared.errors import CorruptSnapshot, OutOfRange
from rollmesh.v1 import events_pb2, reward_pb2, types_pb2

from .builders import (
    added,
    checkpointed,
    committed,
    created,
    ended,
    factory,
    finalized,
    lost,
    pool,
    record,
    reserved,
    rolled_back,
)

EXTEND, FILTER = reward_pb2.GROUP_DECISION_EXTEND, reward_pb2.GROUP_DECISION_FILTER


class Recorder(Selector):
    """A selector that draws the index itself and stores the results."""

    def __init__(self, tasks: TaskPool) -> None:
        self.results: list[GroupResult] = []
        self.trained: list[GroupResult] = []
        self.in_flight: set[int] = set()

    def draw(self, index: int, in_flight: AbstractSet[int]) -> int:
        self.in_flight = set(in_flight)
        return index

    def observe(self, result: GroupResult) -> None:
        self.results.append(result)

    def observe_trained(self, result: GroupResult) -> None:
        self.trained.append(result)

    def snapshot(self) -> bytes:
        return b""

    def restore(self, state: bytes) -> None:
        """The selector has no state."""


def recorded(num_tasks: int = 20, **settings: str) -> tuple[RunDraws, Recorder]:
    recorder = Recorder(pool(0))
    return RunDraws(pool=pool(num_tasks), new_selector=lambda _: recorder, **settings), recorder  # type: ignore[arg-type]


def fold(draws: RunDraws, *facts: events_pb2.Fact) -> None:
    draws.apply(facts_of(record(*facts)))


def learning(num_tasks: int = 30) -> RunDraws:
    return RunDraws(pool=pool(num_tasks), new_selector=factory())


def history(draws: RunDraws, num_groups: int, first: int = 0) -> None:
    """Facts of a run that draws by `draws`, and solves only prompts with an even number."""
    fold(draws, created())
    for draw in range(first, first + num_groups):
        (position,) = draws.positions("main", draw, 1)
        solved = float(position % 2 == 0)
        fold(draws, reserved(draw, f"t{position}"))
        fold(draws, finalized(draw, solved, 0.5))


def test_a_selector_learns_the_success_reward_of_the_run_from_members_that_have_one() -> None:
    draws, recorder = recorded()
    fold(draws, created("correct"), reserved(0, "t7"))
    fold(draws, finalized(0, 1.0, 0.25, None, 0.0))
    assert recorder.results == [GroupResult(position=7, successes=1.25, failures=1.75)]


def test_rewards_beyond_the_unit_interval_are_clipped() -> None:
    draws, recorder = recorded()
    fold(draws, created("correct"), reserved(0, "t7"))
    fold(draws, finalized(0, 3.0, -2.0))
    assert recorder.results == [GroupResult(position=7, successes=1.0, failures=1.0)]


def test_a_configured_success_reward_wins_over_the_runs() -> None:
    draws, recorder = recorded(success_reward="mine")
    fold(draws, created("correct"), reserved(0, "t1"), reserved(1, "t2"))
    fold(draws, finalized(0, 1.0, name="mine"), finalized(1, 1.0, name="correct"))
    assert [result.position for result in recorder.results] == [1]
    assert draws.num_unlearned == 1


def test_extending_a_group_is_no_result_and_keeps_it_in_flight() -> None:
    draws, recorder = recorded()
    fold(draws, created(), reserved(0, "t1"))
    fold(draws, finalized(0, 1.0, 1.0, decision=EXTEND), added(0, 2))
    assert recorder.results == []
    assert draws.num_open_groups == 1


def test_evaluation_groups_teach_nothing_and_take_no_draw() -> None:
    draws, recorder = recorded()
    fold(draws, created(), reserved(0, "t5", purpose=types_pb2.PURPOSE_EVAL))
    fold(draws, finalized(0, 1.0))
    assert recorder.results == []
    assert draws.positions("main", 0, 1) == [0]


def test_open_groups_and_issued_draws_are_in_flight_until_decided() -> None:
    draws, recorder = recorded()
    fold(draws, created(), reserved(0, "t11"))
    draws.positions("main", 1, 1)
    draws.positions("main", 2, 1)
    assert recorder.in_flight == {11, 1}
    fold(draws, finalized(0, 1.0))
    draws.positions("main", 3, 1)
    assert recorder.in_flight == {1, 2}


def test_a_group_that_lost_all_its_episodes_is_no_longer_in_flight_unless_refilled() -> None:
    draws, _ = recorded()
    fold(draws, created(), reserved(0, "t1", num_episodes=2), reserved(1, "t2", num_episodes=1))
    fold(draws, lost(0))
    assert draws.num_open_groups == 2
    fold(draws, lost(0), lost(1), added(1, 1))
    assert draws.num_open_groups == 1


def test_the_end_of_a_run_leaves_nothing_in_flight() -> None:
    draws, _ = recorded()
    fold(draws, created(), reserved(0, "t1"))
    fold(draws, ended())
    assert draws.num_open_groups == 0


def test_draws_given_up_long_ago_stop_counting_as_in_flight() -> None:
    draws, recorder = recorded(num_tasks=DRAWS_OUTSTANDING_MAX + 10)
    draws.positions("main", 0, 1)
    fold(draws, created(), reserved(DRAWS_OUTSTANDING_MAX + 1, "t9"))
    fold(draws, finalized(DRAWS_OUTSTANDING_MAX + 1, 1.0))
    draws.positions("main", DRAWS_OUTSTANDING_MAX + 2, 1)
    assert recorder.in_flight == set()


def test_asking_again_gives_the_same_tasks_also_after_new_facts() -> None:
    draws = learning()
    history(draws, 20)
    first = draws.positions("main", 20, 10)
    fold(draws, reserved(20, f"t{first[0]}"))
    fold(draws, finalized(20, 1.0, 1.0))
    assert draws.positions("main", 20, 10) == first


def test_a_batch_holds_no_task_twice_while_others_are_left() -> None:
    draws = learning()
    history(draws, 20)
    batch = draws.positions("main", 20, 30)
    assert sorted(batch) == list(range(30))


def test_a_recorded_draw_is_answered_from_the_ledger() -> None:
    draws = learning()
    fold(draws, created(), reserved(0, "t17"))
    assert draws.positions("main", 0, 1) == [17]


def test_policies_draw_apart() -> None:
    draws, _ = recorded()
    fold(draws, created(), reserved(0, "t17"))
    assert draws.positions("other", 0, 1) == [0]


def test_same_snapshot_and_same_facts_give_the_same_next_draws() -> None:
    draws, other = learning(), learning()
    history(draws, 25)
    other.restore(draws.snapshot())
    for part in (draws, other):
        history(part, 5, first=25)
    assert other.snapshot() == draws.snapshot()
    assert other.positions("main", 30, 8) == draws.positions("main", 30, 8)


def test_folding_the_ledger_again_gives_the_state_of_the_snapshot() -> None:
    draws, again = learning(), learning()
    facts: list[events_pb2.Fact] = [created()]
    fold(draws, created())
    for draw in range(12):
        (position,) = draws.positions("main", draw, 1)
        new = [reserved(draw, f"t{position}"), finalized(draw, 1.0, 0.0)]
        fold(draws, *new)
        facts += new
    for fact in facts:
        fold(again, fact)
    assert again.snapshot() == draws.snapshot()


def test_what_was_only_issued_is_not_in_the_snapshot() -> None:
    draws = learning()
    history(draws, 5)
    before = draws.snapshot()
    draws.positions("main", 5, 8)
    assert draws.snapshot() == before


def test_epochs_end_and_the_last_answer_is_shorter() -> None:
    draws = RunDraws(pool=pool(5), new_selector=factory("uniform"), num_draws_max=10)
    assert len(draws.positions("main", 8, 4)) == 2
    with pytest.raises(OutOfRange, match="raise data.epochs_max"):
        draws.positions("main", 10, 1)


def test_uniform_draws_of_a_run_cover_each_epoch_also_across_restarts() -> None:
    def fresh() -> RunDraws:
        return RunDraws(pool=pool(12), new_selector=factory("uniform"))

    drawn = [fresh().positions("main", first, 4) for first in range(0, 24, 4)]
    flat = [position for part in drawn for position in part]
    assert sorted(flat[:12]) == sorted(flat[12:]) == list(range(12))


def test_facts_about_unknown_groups_and_tasks_change_nothing() -> None:
    draws, recorder = recorded()
    fold(draws, created(), reserved(0, "not-ours"), finalized(0, 1.0), finalized(9, 1.0), lost(9), added(9, 1))
    assert recorder.results == []
    assert draws.num_open_groups == 0


@pytest.mark.parametrize("state", [b"", b"junk", b"\x80", b"\xc1"])
def test_restore_refuses_what_is_not_a_snapshot_and_keeps_the_state(state: bytes) -> None:
    draws = learning()
    history(draws, 3)
    before = draws.snapshot()
    with pytest.raises(CorruptSnapshot):
        draws.restore(state)
    assert draws.snapshot() == before


def test_restore_refuses_a_snapshot_of_another_source() -> None:
    with pytest.raises(CorruptSnapshot, match="another task source"):
        learning(30).restore(learning(31).snapshot())


# What the trainer measured --------------------------------------------------------------------------------------------


def measured(recorder: Recorder) -> list[tuple[int, float]]:
    """Return position and mean absolute advantage of what the selector got."""
    return [(r.position, r.trained.mean_abs_advantage) for r in recorder.trained if r.trained is not None]


def test_a_selector_gets_the_measurements_of_a_group_once_its_update_is_committed() -> None:
    draws, recorder = recorded()
    fold(draws, created(), reserved(0, "t7"), reserved(1, "t4"), finalized(0, 1.0, 0.25), finalized(1, 0.0))
    assert [result.trained for result in recorder.results] == [None, None]
    assert recorder.trained == []
    fold(draws, committed(1, g0=0.5))
    measures = {"mean_abs_advantage": 0.5, "policy_loss": -0.5, "num_tokens": 10.0}
    measurement = TrainedGroup(group="g0", measures=measures)
    assert recorder.trained == [GroupResult(position=7, successes=1.25, failures=0.75, trained=measurement)]
    assert len(recorder.results) == 2, "the commit is not a second result"


def test_a_selector_gets_the_measures_by_name_and_the_old_fields_only_without_them() -> None:
    draws, recorder = recorded()
    fold(draws, created(), reserved(0, "t7"), reserved(1, "t4"), finalized(0, 1.0), finalized(1, 0.0))
    fact = committed(1, g0=0.5, g1=0.25)
    fact.update_committed.groups[1].measures.update({"mean_abs_advantage": 0.25, "regret": -2.0})
    fold(draws, fact)
    old, new = [result.trained for result in recorder.trained if result.trained is not None]
    assert old.measures == {"mean_abs_advantage": 0.5, "policy_loss": -0.5, "num_tokens": 10.0}
    assert new.measures == {"mean_abs_advantage": 0.25, "regret": -2.0}
    assert (new.mean_abs_advantage, new.policy_loss, new.num_tokens) == (0.25, 0.0, 0)


def test_a_group_without_the_success_reward_is_measured_all_the_same() -> None:
    draws, recorder = recorded()
    fold(draws, created(), reserved(0, "t7"), finalized(0, 1.0, name="other"), committed(1, g0=0.5))
    assert measured(recorder) == [(7, 0.5)]


@pytest.mark.parametrize("decision", [FILTER, EXTEND])
def test_a_group_that_is_not_kept_is_not_trained(decision: Any) -> None:
    draws, recorder = recorded()
    fold(draws, created(), reserved(0, "t7"), finalized(0, 1.0, decision=decision), committed(1, g0=0.5, g9=0.5))
    assert recorder.trained == []


def test_a_selector_that_learns_from_rewards_alone_ignores_commits() -> None:
    draws = learning()
    history(draws, 3)
    before = draws.positions("main", 3, 5)
    fold(draws, committed(1, g0=0.5, g1=0.25))
    assert draws.positions("main", 3, 5) == before


def test_a_group_that_is_trained_again_after_a_roll_back_is_measured_again_until_a_checkpoint_holds_it() -> None:
    draws, recorder = recorded()
    fold(draws, created(), *(reserved(n, f"t{n}") for n in range(3)), *(finalized(n, 1.0) for n in range(3)))
    fold(draws, committed(1, g0=0.1), committed(2, g1=0.2))
    fold(draws, checkpointed(1), rolled_back(1))
    fold(draws, committed(2, g2=0.3), checkpointed(2))
    fold(draws, committed(3, g0=0.4, g1=0.5, g2=0.6), checkpointed(3))
    assert measured(recorder) == [(0, 0.1), (1, 0.2), (2, 0.3), (1, 0.5)]
    empty, _ = recorded()
    fold(empty, created())
    assert len(draws.snapshot()) - len(empty.snapshot()) < 60, "only the three draws are stored, and no group"


def test_the_number_of_stored_groups_is_bounded_and_the_newest_remain() -> None:
    draws, recorder = recorded()
    fold(draws, created())
    for draw in range(KEPT_GROUPS_MAX + 1):
        fold(draws, reserved(draw, "t7"), finalized(draw, 1.0))
    fold(draws, committed(1, **{"g0": 0.1, "g1": 0.2, f"g{KEPT_GROUPS_MAX}": 0.3}))
    assert measured(recorder) == [(7, 0.2), (7, 0.3)]


def test_a_snapshot_between_the_decision_and_the_commit_keeps_the_measurements() -> None:
    draws, _ = recorded()
    fold(
        draws,
        created(),
        reserved(0, "t7"),
        reserved(1, "t8"),
        finalized(0, 1.0),
        finalized(1, 1.0),
        committed(1, g1=0.1),
    )
    restored, recorder = recorded()
    restored.restore(draws.snapshot())
    fold(restored, rolled_back(0), committed(1, g0=0.5), checkpointed(1), committed(2, g1=0.25))
    assert measured(recorder) == [(7, 0.5), (8, 0.25)]
