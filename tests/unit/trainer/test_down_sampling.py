"""Estimators that train a part of the samples or tokens of a batch, against values by hand."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from rollmesh.shared.domain.trajectory import (
    FinishReason,
    GroupContext,
    MemberOutcome,
    Outcome,
    Reward,
    SampleSummary,
    TurnSummary,
)
from rollmesh.shared.errors import ConfigError
from rollmesh.trainer.batch import UpdateBatch
from rollmesh.trainer.estimators.d3s import largest, scheduled, widest_subset
from rollmesh.trainer.estimators.parrot import dominated
from rollmesh.trainer.estimators.pf_ppo import STRATEGIES, filter_weights, r_squared
from rollmesh.trainer.estimators.roc import RocOptions, format_penalty, num_negative

from .builders import batch_of, group, member
from .test_adjusted_rewards import campo_batch, looped
from .test_member_methods import leased
from .test_methods import batch, estimator, per_sample, rewarded, with_columns

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


@pytest.mark.row("S087")
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


# PF-PPO ---------------------------------------------------------------------------------------------------------------

RELIABLE = ([0.0, 0.4, 0.6, 1.0], [0.0, 1.0, 0.0, 1.0])
"""Rewards that agree with the true scores at the extremes alone. Over all, the covariance is (0.25 - 0.05 - 0.05 +
0.25) / 4 = 0.1 and the variances are 0.13 and 0.25: R^2 = 0.01 / 0.0325. Over the extremes it is 1."""
PLATEAU = ([0.0, 0.5, 1.0], [0.0, 0.0, 0.0])


def labeled(name: str, rewards: list[float], truths: list[float]) -> GroupContext:
    """Return a group with rewards of a model, and true scores."""
    return group(
        name,
        *(member(f"{name}{i}", {"r": r, "truth": t}) for i, (r, t) in enumerate(zip(rewards, truths, strict=True))),
    )


@pytest.mark.row("S062")
def test_pf_ppo_weights_samples_by_the_reliability_of_their_rewards() -> None:
    of = batch(rewarded("a", *RELIABLE[0]))
    found = estimator("pf_ppo")(of)
    assert found.dropped == {1: "DOWN_SAMPLED", 2: "DOWN_SAMPLED"}, "max_min keeps only extremes"
    assert found.sample_weights is not None
    assert found.sample_weights[[0, 3]].tolist() == [1.0, 1.0]
    std = 0.13**0.5
    assert per_sample(found, of) == pytest.approx([v / std for v in (-0.5, -0.1, 0.1, 0.5)], rel=1e-4), "of all members"
    made = estimator("pf_ppo", truth="truth", strategy="pow")
    chosen = made(batch(labeled("a", *RELIABLE)))
    assert chosen.dropped == found.dropped, "the true scores choose max_min"
    assert chosen.metrics == pytest.approx(
        {"filtered_share": 0.5, "strategy": 1.0, "agreement": 1.0, "agreement_all": 0.01 / 0.0325}
    )


def test_the_weights_of_each_filter_by_hand() -> None:
    """Squares 0, 0.16, 0.36 and 1 with the sum 1.52; 0.4 and three times 0.1 with the sum 0.7. The mean is 1."""
    rewards = np.array(RELIABLE[0])
    found = {name: filter_weights(name, rewards, 2.0).tolist() for name in STRATEGIES}
    assert found["pow"] == pytest.approx([0, 0.64 / 1.52, 1.44 / 1.52, 4 / 1.52])
    assert found["max_min"] == [2, 0, 0, 2]
    assert found["max_random"] == pytest.approx([4 / 7, 4 / 7, 4 / 7, 16 / 7])
    assert found["all"] == [1, 1, 1, 1]
    assert filter_weights("pow", np.array([-2.0, 1.0]), 1.0).tolist() == pytest.approx([4 / 3, 2 / 3])
    assert filter_weights("pow", np.zeros(3), 2.0).tolist() == [1, 1, 1]
    assert filter_weights("max_min", np.zeros(0), 2.0).tolist() == []


def test_the_filter_of_pf_ppo_never_agrees_less_than_all_samples() -> None:
    rng = np.random.default_rng(0)
    chosen = set()
    for n in range(40):
        truths = rng.integers(0, 2, (3, 6)).astype(float)
        rewards = truths + rng.normal(0, 1, (3, 6)) * (rng.random((3, 6)) < 0.7) * (n % 4)
        made = estimator("pf_ppo", truth="truth")
        metrics = made(
            batch(
                *(
                    labeled(f"g{i}", r, t)
                    for i, (r, t) in enumerate(zip(rewards.tolist(), truths.tolist(), strict=True))
                )
            )
        ).metrics
        assert metrics["agreement"] >= metrics["agreement_all"]
        chosen.add(metrics["strategy"])
    assert len(chosen) > 2, "several filters are the best one of some labeled set"


def test_r_squared_equals_the_hand_computed_value() -> None:
    rewards, truths = (np.array(values) for values in RELIABLE)
    assert r_squared(rewards, truths, np.ones(4)) == pytest.approx(0.01 / 0.0325)
    assert r_squared(rewards, truths, np.array([1.0, 0, 0, 1])) == pytest.approx(1.0)
    # weights 1, 2, 1 of 0, 1, 2 and 0, 1, 0: the covariance is 0; and a constant has none
    assert r_squared(np.arange(3.0), np.array([0.0, 1, 0]), np.array([1.0, 2, 1])) == pytest.approx(0.0)
    assert r_squared(rewards, np.ones(4), np.ones(4)) == 0.0


def test_true_scores_are_remembered_over_updates_once_and_in_the_checkpoint() -> None:
    made = estimator("pf_ppo", truth="truth", strategy="all", groups_max=2)
    of = batch(labeled("a", *RELIABLE))
    again = dataclasses.replace(of, repeat=1)
    assert made(of).metrics == made(again).metrics
    assert made.state() == {"labeled": [[list(values) for values in RELIABLE]]}
    resumed = estimator("pf_ppo", truth="truth", strategy="all", groups_max=2)
    resumed.load_state(made.state())
    unlabeled = batch(rewarded("b", 0.1, 0.5, 0.9))
    assert resumed(unlabeled).dropped == {1: "DOWN_SAMPLED"}, "the scores of the update before choose max_min"
    assert estimator("pf_ppo", truth="truth", strategy="all")(unlabeled).dropped == {}
    for name in ("c", "d"):
        resumed(batch(labeled(name, *PLATEAU)))
    assert resumed.state() == {"labeled": [[list(values) for values in PLATEAU]] * 2}
    assert resumed(unlabeled).dropped == {}, "no filter agrees with constant scores, so that the configured one applies"


def test_the_true_score_is_never_optimized() -> None:
    of = batch(labeled("a", [0.0, 1.0], [5.0, 0.0]))
    assert per_sample(estimator("pf_ppo", truth="truth", std="none")(of), of) == [-0.5, 0.5]
    only = batch(group("a", member("a0", {"truth": 1.0}), member("a1", {"r": 1.0})))
    assert estimator("pf_ppo", truth="truth")(only).dropped == {0: "UNSCORED"}
    assert estimator("pf_ppo", truth="truth").rewards == ("truth",)
    assert estimator("pf_ppo").rewards == ()


def test_the_scope_of_pf_ppo_decides_what_is_extreme_and_weights_have_the_mean_1() -> None:
    of = batch(rewarded("a", 0.0, 0.5), rewarded("b", 0.5, 0.7, 1.0))
    assert set(estimator("pf_ppo")(of).dropped) == {3}
    assert set(estimator("pf_ppo", scope="batch")(of).dropped) == {1, 2, 3}
    # weights by group 1, 1 and 1.5, 0, 1.5, of which four samples are used: the mean is 1.25
    weights = estimator("pf_ppo")(of).sample_weights
    assert weights is not None
    assert weights.tolist() == pytest.approx([0.8, 0.8, 1.2, 0, 1.2])
    lone = estimator("pf_ppo")(batch(rewarded("a", 0.3)))
    assert (lone.dropped, lone.sample_weights.tolist()) == ({}, [1.0])  # type: ignore[union-attr]
    failed = batch(group("a", member("a0", {"r": 0.0}, outcome=Outcome.INFRA_FAILURE), member("a1", {"r": 1.0})))
    assert estimator("pf_ppo")(failed).dropped == {0: "UNSCORED"}
    assert estimator("pf_ppo")(failed).metrics["filtered_share"] == 0.0, "a failure is not filtered"


def test_best_and_worst_are_those_of_all_members_also_if_they_are_not_leased() -> None:
    of = batch_of([leased("a0", "a"), leased("a1", "a")], [rewarded("a", 0.0, 0.5, 1.0)])
    assert estimator("pf_ppo")(of).dropped == {1: "DOWN_SAMPLED"}


# D3S ------------------------------------------------------------------------------------------------------------------


def uncertain(of: UpdateBatch, entropy: list[float]) -> UpdateBatch:
    return with_columns(of, start_entropy=entropy)


@pytest.mark.row("S057")
def test_d3s_chooses_the_samples_of_largest_variance_and_the_tokens_of_largest_signal() -> None:
    """Advantages -0.5, -0.3, 0.1 and 0.7 about the mean 0.5. Two of four: -0.5 and 0.7. Their tokens have |A| H of 0.5
    times 1 and 3, and 0.7 times 1 and 2: 0.5, 1.5, 0.7, 1.4, of which half are 1.5 and 1.4. In the third of five
    updates, the shares have risen from 0.5 to 0.75: three samples, and 5 of their 6 tokens."""
    made = estimator("d3s", std="none", samples_first=0.5, tokens_first=0.5, relax_updates=4)
    context = rewarded("a", 0.0, 0.2, 0.6, 1.2)
    entropy = [1.0, 3.0, 9.0, 9.0, 9.0, 9.0, 1.0, 2.0]
    found = made(uncertain(batch(context), entropy))
    assert found.dropped == {1: "DOWN_SAMPLED", 2: "DOWN_SAMPLED"}
    assert found.token_mask is not None
    assert found.token_mask.tolist() == [False, True, False, False, False, False, False, True]
    # variances: of -0.5 and 0.7 0.36; of all (0.25 + 0.09 + 0.01 + 0.49) / 4
    assert found.metrics == pytest.approx(
        {"sample_share": 0.5, "token_share": 0.5, "variance": 0.36, "variance_all": 0.21}
    )
    later = made(uncertain(batch(context, update=3), entropy))
    assert later.dropped == {2: "DOWN_SAMPLED"}, "-0.5, -0.3, 0.7 vary more than -0.5, 0.1, 0.7"
    assert later.token_mask is not None
    assert later.token_mask.tolist() == [False, True, True, True, False, False, True, True]
    last = made(uncertain(batch(context, update=5), entropy))
    assert last.dropped == {}
    assert last.token_mask is not None
    assert last.token_mask.all()


def test_the_chosen_subset_has_the_largest_variance_of_all_subsets_of_its_size() -> None:
    rng = np.random.default_rng(0)
    for n in range(60):
        values = rng.normal(size=6) if n % 2 else rng.integers(0, 2, 6).astype(float)
        for size in range(1, 7):
            best = max(float(np.var(values[list(subset)])) for subset in itertools.combinations(range(6), size))
            chosen = widest_subset(values, size)
            assert len(set(chosen)) == size
            assert float(np.var(values[chosen])) == pytest.approx(best)


def test_rewards_of_0_and_1_give_as_many_right_as_wrong_samples() -> None:
    values = np.array([1.0] * 5 + [0.0] * 3)
    assert np.bincount(values[widest_subset(values, 4)].astype(int)).tolist() == [2, 2]
    assert np.bincount(values[widest_subset(values, 8)].astype(int)).tolist() == [3, 5]
    assert widest_subset(np.zeros(4), 2) == [0, 3], "equal values: one of the small and one of the large"


@pytest.mark.parametrize("update", [1, 2, 11, 60, 101, 5000])
def test_the_share_of_tokens_follows_the_schedule(update: int) -> None:
    """0.2 + 0.8 (k - 1) / 100 of 400 tokens, until all are trained."""
    rng = np.random.default_rng(update)
    of = batch(*(rewarded(f"g{n}", *rng.random(4).tolist()) for n in range(50)), update=update)
    signal = rng.random(400)
    made = estimator("d3s", samples_first=1.0)
    mask = made(uncertain(of, signal.tolist())).token_mask
    assert mask is not None
    expected = min(1.0, 0.2 + 0.8 * (update - 1) / 100)
    assert mask.sum() == pytest.approx(400 * expected, abs=1)
    products = np.abs(made(of).advantages) * of["start_entropy"]
    assert mask.all() or products[mask].min() >= products[~mask].max(), "kept tokens are those with the largest |A| H"
    assert scheduled(0.2, 1.0, update, 100) == pytest.approx(expected)


def test_the_pool_of_d3s_is_the_group_or_the_batch() -> None:
    """Advantages of +-0.1 and +-0.5: half of the batch are the two extremes of the second group."""
    of = uncertain(batch(rewarded("a", 0.4, 0.6), rewarded("b", 0.0, 1.0)), [1.0] * 8)
    assert estimator("d3s", std="none")(of).dropped == {}, "two of a group stay at least"
    assert set(estimator("d3s", std="none", pool="batch")(of).dropped) == {0, 1}


def test_groups_of_one_failures_and_truncated_samples_in_d3s() -> None:
    failed = group("b", member("b0", {"r": 0.0}, outcome=Outcome.INFRA_FAILURE), member("b1", {"r": 1.0}))
    found = estimator("d3s", std="none")(uncertain(batch(rewarded("a", 1.0), failed), [1.0] * 6))
    assert found.dropped == {1: "UNSCORED"}
    assert found.metrics["sample_share"] == 1.0, "a failure is not among the samples"
    assert found.token_mask is not None
    assert not found.token_mask[2:4].any()
    stopped = [looped(f"s{n}", 0.0, FinishReason.STOP) for n in (1, 2)]
    cut = campo_batch(looped("s0", 0.0), *stopped, rewards=(0.0, 1.0, 1.0))
    made = estimator("d3s", std="none", drop_truncated=True)
    found = made(uncertain(cut, [1.0] * int(cut.lengths.sum())))
    assert found.dropped == {0: "TRUNCATED"}
    assert found.metrics["variance_all"] == found.metrics["variance"] == 0.0, "both others have one advantage"
    assert estimator("d3s").needs == ("start_entropy",)
    of = uncertain(batch_of([leased("a1", "a"), leased("a2", "a")], [rewarded("a", 0.0, 0.4, 0.5)]), [1.0] * 4)
    assert per_sample(estimator("d3s", std="none")(of), of) == pytest.approx([0.1, 0.2]), "the mean is that of all"
    assert largest(np.array([1.0, 3.0, 2.0]), np.array([0, 2]), 0.5).tolist() == [2]
    assert largest(np.zeros(3), np.array([], dtype=np.int64), 0.5).tolist() == []


# Parrot ---------------------------------------------------------------------------------------------------------------


def scored(name: str, *rewards: dict[str, float], **options: Any) -> GroupContext:
    return group(name, *(member(f"{name}{i}", r, **options) for i, r in enumerate(rewards)))


TRADE = [{"x": 1.0, "y": 0.0}, {"x": 0.5, "y": 0.5}, {"x": 0.5, "y": 0.4}, {"x": 0.0, "y": 1.0}, {"x": 0.0, "y": 0.9}]


@pytest.mark.row("S128")
def test_parrot_trains_the_pareto_front() -> None:
    """The third is below the second in y, and the fifth below the fourth. Weighted sums 1, 1, 0.9, 1, 0.9: the mean is
    0.96."""
    of = batch(scored("a", *TRADE))
    made = estimator("parrot", std="none")
    found = made(of)
    assert found.dropped == {2: "DOMINATED", 4: "DOMINATED"}
    assert per_sample(found, of) == pytest.approx([0.04, 0.04, -0.06, 0.04, -0.06])
    assert found.metrics == {"front_share": pytest.approx(0.6)}
    assert made.of_group(of.groups[0]) == pytest.approx({"a0": 0.04, "a1": 0.04, "a2": 0, "a3": 0.04, "a4": 0})
    other = estimator("parrot", {"x": 0.1, "y": 7.0}, std="none")
    assert other(of).dropped == found.dropped, "the front does not depend on the weights"
    assert set(estimator("parrot", {"x": 1.0}, std="none")(of).dropped) == {1, 2, 3, 4}, "y does not count"
    assert set(estimator("parrot", {"x": 1.0, "y": -1.0})(of).dropped) == {1, 2, 3, 4}, "a smaller y is better"


def test_the_front_equals_the_definition() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        rows = rng.integers(0, 4, (8, 3)).astype(float)
        expected = [any((a >= b).all() and (a != b).any() for a in rows) for b in rows]
        assert dominated(rows).tolist() == expected
    assert dominated(np.zeros((0, 2))).tolist() == []
    assert dominated(np.ones((3, 2))).tolist() == [False] * 3, "equal samples are all on the front"


def test_the_pool_of_parrot_is_the_group_or_the_batch() -> None:
    of = batch(scored("a", *TRADE), scored("b", {"x": 2.0, "y": 0.5}, {"x": 0.1, "y": 0.6}))
    assert set(estimator("parrot")(of).dropped) == {2, 4}
    assert set(estimator("parrot", pool="batch")(of).dropped) == {0, 1, 2, 4}


def test_failures_other_rewards_and_members_that_are_not_leased_in_parrot() -> None:
    failed = member("a0", {"x": 9.0, "y": 9.0}, outcome=Outcome.INFRA_FAILURE)
    partial = member("a1", {"x": 9.0})
    of = batch(group("a", failed, partial, member("a2", {"x": 1.0, "y": 1.0})))
    assert estimator("parrot")(of).dropped == {0: "UNSCORED"}, "nothing is known of y"
    assert estimator("parrot")(of).metrics["front_share"] == 1.0, "a failure is not below the front"
    of = batch_of([leased("a2", "a"), leased("a0", "a")], [scored("a", *TRADE)])
    assert estimator("parrot")(of).dropped == {0: "DOMINATED"}
    assert estimator("parrot")(batch(scored("a", {"x": 1.0}))).dropped == {}
    twins = group("a", *(member(f"a{i}", {"x": float(i)}, episode="e") for i in range(2)), member("a2", {"x": 0.0}))
    assert set(estimator("parrot")(batch(twins)).dropped) == {0, 2}
