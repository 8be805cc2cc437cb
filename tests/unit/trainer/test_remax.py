"""ReMax by hand: the return of the greedy member is the baseline, and rewards of turns count from their turn on."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import (
    MemberOutcome,
    Outcome,
    Reward,
    SampleSummary,
    TrainingSample,
    TurnSummary,
)
from rollmesh.trainer.estimators import make_estimator
from rollmesh.trainer.estimators.base import UNSCORED, segment_rewards, turn_rewards
from rollmesh.trainer.estimators.remax import NO_BASELINE

from .builders import action, batch_of, group, member, prompt, random_batch, training_sample

WEIGHTS = {"correct": 1.0, "step": 0.5}


def two_turns(
    sample_id: str, correct: float, *steps: float, greedy: bool = False
) -> tuple[TrainingSample, MemberOutcome]:
    """Return a sample with turns of 2 and 3 tokens, and rewards `correct` and, by turn, `step`; its segments are 5, 6,
    7, 9."""
    segments = [prompt([20]), action([21, 22], [-1, -1]), prompt([23]), action([24, 25, 26], [-1, -1, -1])]
    made = training_sample(sample_id, segments, trainable=not greedy)
    rewards = (
        Reward(name="correct", value=correct),
        *(Reward(name="step", value=value, segment=at) for value, at in zip(steps, (6, 9), strict=True)),
    )
    turns = tuple(TurnSummary(segment=at, num_tokens=n, mean_logprob=-1.0) for at, n in ((6, 2), (9, 3)))
    seen = MemberOutcome(
        sample_id=sample_id, rewards=rewards, end="ready", summary=SampleSummary(turns=turns, greedy=greedy)
    )
    return replace(made, sample=replace(made.sample, rewards=rewards), indices=(5, 6, 7, 9)), seen


@pytest.mark.row("S026")
def test_remax_equals_the_hand_computed_value() -> None:
    one, seen_one = two_turns("one", 1.0, 0.0, 2.0)
    two, seen_two = two_turns("two", 0.0, 1.0, -1.0)
    _, greedy = two_turns("greedy", 1.0, 1.0, 0.0, greedy=True)  # return 1 + 0.5
    of = group("g0", greedy, seen_one, seen_two)
    remax = make_estimator("remax", WEIGHTS)
    estimate = remax(batch_of([one, two], [of]))
    first = [1 + 0.5 * (0 + 2) - 1.5] * 2 + [1 + 0.5 * 2 - 1.5] * 3
    second = [0 + 0.5 * (1 - 1) - 1.5] * 2 + [0 - 0.5 - 1.5] * 3
    assert estimate.advantages.tolist() == pytest.approx(first + second)
    assert not estimate.dropped
    assert remax.of_group(of) == pytest.approx({"greedy": 0.0, "one": 0.5, "two": -1.5})


@pytest.mark.row("S026")
def test_a_sample_that_equals_the_greedy_one_has_no_advantage() -> None:
    made, seen = two_turns("s", 1.0, 0.5, 0.25)
    _, greedy = two_turns("greedy", 1.0, 0.5, 0.25, greedy=True)
    remax = make_estimator("remax", WEIGHTS)
    assert remax.of_group(group("g0", greedy, seen)) == {"greedy": 0.0, "s": 0.0}
    # Without rewards of turns, it is 0 for each token.
    plain = group("g0", *(replace(m, rewards=m.rewards[:1]) for m in (greedy, seen)))
    assert not remax(batch_of([made], [plain])).advantages.any()


def test_rewards_of_whole_samples_need_no_turns() -> None:
    made = training_sample("s", [prompt([20]), action([21, 22], [-1, -1])])
    greedy = replace(member("greedy", {"correct": 0.25}), summary=SampleSummary(greedy=True))
    estimate = make_estimator("remax")(batch_of([made], [group("g0", greedy, member("s", {"correct": 1.0}))]))
    assert estimate.advantages.tolist() == [0.75, 0.75]


def test_a_group_without_a_scored_greedy_member_is_dropped_with_a_reason() -> None:
    samples = [
        training_sample(name, [prompt([20]), action([21], [-1])], of=of) for name, of in (("a", "g0"), ("b", "g1"))
    ]
    failed = replace(member("x", {"correct": 1.0}, outcome=Outcome.INFRA_FAILURE), summary=SampleSummary(greedy=True))
    greedy = replace(member("y", {"correct": 1.0}), summary=SampleSummary(greedy=True))
    groups = [
        group("g0", failed, member("a", {"correct": 1.0})),
        group("g1", greedy, member("b", {"correct": 1.0}, outcome=Outcome.INFRA_FAILURE)),
    ]
    remax = make_estimator("remax")
    estimate = remax(batch_of(samples, groups))
    assert estimate.dropped == {0: NO_BASELINE, 1: UNSCORED}
    assert estimate.metrics == {"without_baseline": 1.0}
    assert np.isfinite(estimate.advantages).all()
    assert remax.of_group(groups[0]) == {}


def test_a_batch_shows_members_labels_and_values_by_turn_and_segment() -> None:
    one, seen_one = two_turns("one", 1.0, 3.0, 4.0)
    two, seen_two = two_turns("two", 0.0, 5.0, 6.0)
    batch = batch_of([two, one], [replace(group("g0", seen_one, seen_two), labels={"level": "3"})])
    assert batch.members == (seen_two, seen_one)
    assert [context.labels for context in batch.contexts] == [{"level": "3"}] * 2
    by_turn = [turn_rewards(m, {}) for m in batch.members]
    assert batch.per_turn(by_turn).tolist() == [5, 5, 6, 6, 6, 3, 3, 4, 4, 4]
    by_segment = [segment_rewards(s, {}) for s in batch.samples]
    assert [row.tolist() for row in by_segment] == [[0, 5, 0, 6], [0, 3, 0, 4]]
    assert batch.per_segment(by_segment).tolist() == batch.per_turn(by_turn).tolist()
    assert batch.per_turn([np.array([7.0]), np.zeros(0)]).tolist() == [7] * 5 + [0] * 5
    with pytest.raises(ValueError, match="one array per sample, 2, got 1"):
        batch.per_turn(by_turn[:1])


def test_rewards_that_are_not_ok_count_nothing() -> None:
    made, seen = two_turns("s", 1.0, 3.0, 4.0)
    broken = replace(seen.rewards[1], outcome=Outcome.NOT_APPLICABLE)
    rewards = (seen.rewards[0], broken, seen.rewards[2])
    assert turn_rewards(replace(seen, rewards=rewards), {}).tolist() == [0, 4]
    sample = replace(made, sample=replace(made.sample, rewards=rewards))
    assert segment_rewards(sample, {}).tolist() == [0, 0, 0, 4]


def test_a_member_with_rewards_of_turns_alone_is_not_scored() -> None:
    made, seen = two_turns("s", 1.0, 3.0, 4.0)
    turns_only = replace(
        seen, rewards=(Reward(name="correct", value=0, outcome=Outcome.NOT_APPLICABLE), seen.rewards[1])
    )
    _, greedy = two_turns("greedy", 1.0, 1.0, 0.0, greedy=True)
    of = group("g0", greedy, turns_only)
    remax = make_estimator("remax", WEIGHTS)
    assert remax.of_group(of) == {"greedy": 0.0}
    assert remax(batch_of([made], [of])).dropped == {0: UNSCORED}
    assert remax.of_group(group("g1", replace(turns_only, summary=greedy.summary), seen)) == {}


def test_remax_has_no_options() -> None:
    with pytest.raises(Exception, match="remax"):
        make_estimator(Extension("remax", {"x": 1}))


def test_members_of_a_batch_have_the_turns_of_its_table() -> None:
    samples, groups = random_batch()
    batch = batch_of(samples, groups)
    for n, seen in enumerate(batch.members):
        mine = batch["sample"] == n
        assert [turn.num_tokens for turn in seen.summary.turns] == np.bincount(batch["turn"][mine]).tolist()
        assert seen.summary.mean_logprob == pytest.approx(float(batch["behavior"][mine].mean()), abs=1e-5)
