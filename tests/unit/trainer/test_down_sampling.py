"""Estimators that train a part of the samples or tokens of a batch, against values by hand."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from rollmesh.shared.domain.trajectory import MemberOutcome, Outcome, Reward, SampleSummary, TurnSummary
from rollmesh.shared.errors import ConfigError
from rollmesh.trainer.estimators.roc import RocOptions, format_penalty, num_negative

from .builders import batch_of, group, member
from .test_member_methods import leased
from .test_methods import batch, estimator, per_sample

# GRPO-RoC -------------------------------------------------------------------------------------------------------------

ONLY_CORRECT = {"correct": 1.0}


def calling(sample_id: str, correct: float, calls: str, *, text: str = "", answer: str = "7") -> MemberOutcome:
    """Return a member with one turn per letter of `calls`: a call that succeeded (+) or failed (-), or no call (.)."""
    rewards = [Reward(name="correct", value=correct, answer=answer)]
    for i, call in enumerate(calls):
        outcome = Outcome.NOT_APPLICABLE if call == "." else Outcome.OK
        rewards.append(Reward(name="called", value=float(call == "+"), segment=2 * i + 1, outcome=outcome))
    turns = tuple(TurnSummary(segment=2 * i + 1, num_tokens=2, mean_logprob=-1.0) for i in range(len(calls)))
    summary = SampleSummary(turns=turns, text=text)
    return MemberOutcome(sample_id=sample_id, rewards=tuple(rewards), end="ready", summary=summary)


@pytest.mark.row("S087", missing="Thousands of calls with isolated timeouts, which the tests of the sandbox show.")
def test_roc_keeps_the_cleanest_right_episodes_and_the_proportion() -> None:
    """Four right and two wrong of six, of which three stay: 3 * 2 / 6 = 1 wrong one, and the two right ones with error
    shares 0 and 1 / 3; not those with 1 / 2 (no call) and 1. Advantages: 1 - 2 / 3 and 0 - 2 / 3."""
    calls = {"g0": "--", "g1": "+-+", "g2": ".", "g3": "++"}
    members = [calling(name, 1.0, made) for name, made in calls.items()]
    members += [calling(name, 0.0, "---") for name in ("g4", "g5")]
    of = batch(group("g", *members))
    made = estimator("roc", ONLY_CORRECT, keep=3, positive_min=1, negative_min=1, std="none")
    found = made(of)
    stays = [n for n in range(6) if n not in found.dropped]
    assert set(found.dropped.values()) == {"DOWN_SAMPLED"}
    assert [n for n in stays if n < 4] == [1, 3], "of right episodes, those with the fewest failed calls survive"
    assert len(stays) == 3
    assert per_sample(found, of) == pytest.approx([0 if n in found.dropped else (n < 4) - 2 / 3 for n in range(6)])
    assert found.metrics == pytest.approx(
        {"down_sampled_share": 0.5, "error_share": (1 + 1 / 3 + 0.5) / 4, "error_share_kept": 1 / 6}
    )
    assert made.of_group(of.groups[0]) == pytest.approx({f"g{n}": a for n, a in enumerate(per_sample(found, of))})
    assert made(of).dropped == found.dropped


def test_wrong_episodes_of_roc_stay_whatever_their_errors() -> None:
    """Which of the wrong episodes stays depends on the name of the group, and with `best` on the errors."""
    clean: dict[str, set[bool]] = {"any": set(), "best": set()}
    for n in range(8):
        members = [calling("s0", 1.0, "+"), calling("s1", 0.0, "+"), calling("s2", 0.0, "-"), calling("s3", 1.0, "+")]
        for negatives, seen in clean.items():
            made = estimator("roc", ONLY_CORRECT, keep=2, positive_min=1, negative_min=1, negatives=negatives)
            seen.add(1 not in made(batch(group(f"g{n}", *members))).dropped)
    assert clean == {"any": {True, False}, "best": {True}}


@pytest.mark.parametrize(
    ("positive", "negative", "stays"),
    [(16, 16, 8), (4, 28, 14), (1, 31, 15), (2, 30, 14), (31, 1, 1), (30, 2, 2), (32, 0, 0), (0, 32, 16), (11, 21, 10)],
)
def test_the_proportion_of_roc_is_kept_within_rounding_and_the_least_numbers(
    positive: int, negative: int, stays: int
) -> None:
    """16 of 32, at least two of each as far as there are two: half of the wrong ones, rounded, but 14 of 28 and 30."""
    assert num_negative(positive, negative, RocOptions()) == stays


def test_the_choice_of_roc_fits_for_all_proportions() -> None:
    for keep in (4, 5, 7):
        options = RocOptions(keep=keep)
        for positive in range(12):
            for negative in range(max(0, keep + 1 - positive), 12):
                num = num_negative(positive, negative, options)
                assert 0 <= num <= negative
                assert 0 <= keep - num <= positive
                assert num >= min(2, negative, keep)
                assert keep - num >= min(2, positive, keep)


@pytest.mark.parametrize(
    ("text", "answer", "penalty"),
    [
        ("so <answer>7</answer>", "7", 0.0),
        ("<answer>7</answer> or <answer>8</answer>", "8", 0.5),
        ("<answer>7</answer>" * 5, "7", 1.0),
        ("<answer>7", "7", 1.0),
        ("<answer>7</answer></answer>", "7", 1.0),
        ("no answer", "7", 1.0),
        ("", "7", 0.0),
        ("", "", 1.0),
    ],
)
def test_the_penalty_of_the_format(text: str, answer: str, penalty: float) -> None:
    """Two turns, so that one answer too many costs 1 / 2."""
    made = calling("g0", 1.0, "++", text=text, answer=answer)
    assert format_penalty(made, "<answer>", "</answer>") == penalty


def test_the_form_of_the_answer_counts_as_much_as_errors_in_roc() -> None:
    """Penalties 0 + 1, 1 / 3 + 0 and 2 / 3 + 1 / 3."""
    once, twice = "<answer>7</answer>", "<answer>7</answer>, <answer>7</answer>"
    members = [calling("g0", 1.0, "+++", text="7"), calling("g1", 1.0, "+-+", text=once)]
    members.append(calling("g2", 1.0, "--+", text=twice))
    made = estimator("roc", ONLY_CORRECT, keep=1, positive_min=1, negative_min=0)
    assert set(made(batch(group("g", *members))).dropped) == {0, 2}


def test_roc_without_errors_of_the_format_chooses_by_calls_alone() -> None:
    members = [calling("g0", 1.0, "+", answer=""), calling("g1", 1.0, "-")]
    made = estimator("roc", ONLY_CORRECT, keep=1, positive_min=0, negative_min=0, format_penalty=False)
    assert set(made(batch(group("g", *members))).dropped) == {1}


def test_small_groups_failures_and_samples_of_one_episode_in_roc() -> None:
    made = estimator("roc", ONLY_CORRECT, keep=2, positive_min=1, negative_min=1, std="none")
    failed = member("g0", {"correct": 0.0}, outcome=Outcome.INFRA_FAILURE)
    of = batch(group("g", failed, calling("g1", 1.0, "-"), calling("g2", 0.0, "+")))
    assert made(of).dropped == {0: "UNSCORED"}
    assert per_sample(made(of), of) == [0.0, 0.5, -0.5]
    assert made(batch(group("g", calling("g0", 1.0, "-")))).dropped == {}, "a group of one stays"
    equal = group("g", *(calling(f"g{i}", 1.0, "+") for i in range(4)))
    assert set(made.of_group(equal).values()) == {0.0}
    # Episode x has two samples, of which one has the error; x and z are right, and z has no error.
    members = [calling("g0", 1.0, "-"), calling("g1", 1.0, "+"), calling("g2", 0.0, "+"), calling("g3", 1.0, "+")]
    members = [replace(m, episode=e) for m, e in zip(members, "xxyz", strict=True)]
    assert made(batch(group("g", *members))).dropped == {0: "DOWN_SAMPLED", 1: "DOWN_SAMPLED"}


def test_a_member_that_stays_and_is_not_leased_is_in_the_baseline_of_roc() -> None:
    members = [calling("g0", 1.0, "+"), calling("g1", 1.0, "-"), calling("g2", 0.0, "+")]
    made = estimator("roc", ONLY_CORRECT, keep=2, positive_min=1, negative_min=1, std="none")
    of = batch_of([leased("g1", "g", 1), leased("g2", "g", 1)], [group("g", *members)])
    found = made(of)
    assert found.dropped == {0: "DOWN_SAMPLED"}
    assert per_sample(found, of) == [0.0, -0.5]


def test_more_than_stay_cannot_be_required() -> None:
    with pytest.raises(ConfigError, match=r"`keep` must be >= positive_min \+ negative_min = 4, got 3"):
        estimator("roc", keep=3)
    assert estimator("roc").rewards == ("called",)
