"""Estimators that read the summaries of a group's members, against values by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from msgspec.structs import replace

from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import (
    GroupContext,
    MemberOutcome,
    Outcome,
    Reward,
    SampleSummary,
    TrainingSample,
    TurnSummary,
)
from rollmesh.shared.errors import ConfigError
from rollmesh.trainer.batch import UpdateBatch
from rollmesh.trainer.config import LossTermChoice, UpdateConfig
from rollmesh.trainer.estimators import Estimate, Estimator, make_estimator
from rollmesh.trainer.estimators.base import UNDECIDED
from rollmesh.trainer.estimators.copo import entropy_factor
from rollmesh.trainer.estimators.v0 import V0, V0Options, rank_correlation
from rollmesh.trainer.estimators.v05 import V05Options, weight_of_prior
from rollmesh.trainer.plugins import Plugins
from rollmesh.trainer.update import checked_estimate

from .builders import action, batch_of, group, member, prompt, training_sample
from .gradient_check import check_gradient, loss_of_logits, plugins_of, ragged


def estimator(name: str, weights: Mapping[str, float] | None = None, **options: Any) -> Estimator:
    return make_estimator(Extension(name, options), weights)


def of_turns(
    sample_id: str, rewards: Sequence[float], *, seen: str = "", whole: float | None = None, episode: str = ""
) -> MemberOutcome:
    """Return a member with one turn per reward, whose observations are the letters of `seen`."""
    seen = seen or "abcdefgh"[: len(rewards)]
    turns = tuple(
        TurnSummary(segment=2 * i + 1, num_tokens=2, mean_logprob=-1.0, observation=o) for i, o in enumerate(seen)
    )
    found = tuple(Reward(name="r", value=v, segment=2 * i + 1) for i, v in enumerate(rewards))
    if whole is not None:
        found += (Reward(name="whole", value=whole),)
    return MemberOutcome(
        sample_id=sample_id, rewards=found, end="ready", episode=episode, summary=SampleSummary(turns=turns)
    )


def leased(sample_id: str, of: str, num_turns: int = 1) -> TrainingSample:
    """Return a sample with two tokens per turn."""
    segments = [prompt([20])]
    for turn in range(num_turns):
        parent = len(segments) - 1
        segments.append(action([21, 22], [-1.0, -1.0], parent=parent))
        if turn < num_turns - 1:
            segments.append(replace(prompt([23]), parent=parent + 1))
    return training_sample(sample_id, segments, of=of)


def answered(name: str, *members: tuple[str, float]) -> GroupContext:
    """Return a group with one member per answer and reward."""
    rewards = [(Reward(name="r", value=value, answer=answer),) for answer, value in members]
    return group(
        name, *(MemberOutcome(sample_id=f"{name}{i}", rewards=found, end="ready") for i, found in enumerate(rewards))
    )


def scalars(made: Estimator, of: UpdateBatch) -> list[float]:
    """Return the advantage of each sample, which all of its tokens have."""
    found = made(of).advantages
    assert np.array_equal(found, of.per_token(of.first(found)))
    return [float(a) for a in of.first(found)]


def batch(*groups: GroupContext) -> UpdateBatch:
    """Return a batch of all members."""
    return batch_of(
        [leased(m.sample_id, g.group, max(1, len(m.summary.turns))) for g in groups for m in g.members], groups
    )


def per_turn(made: Estimator, of: UpdateBatch) -> list[list[float]]:
    """Return the advantages of the turns of each sample."""
    found = made(of).advantages.reshape(-1, 2)
    assert (found[:, 0] == found[:, 1]).all(), "both tokens of a turn have its advantage"
    num = (of.lengths // 2).tolist()
    return [part[:, 0].tolist() for part in np.split(found, np.cumsum(num)[:-1])]


# TRLOO ----------------------------------------------------------------------------------------------------------------


def test_trloo_equals_the_hand_computed_value() -> None:
    of = batch(group("g", *(of_turns(f"g{i}", [r]) for i, r in enumerate([1.0, 0.0, 0.0]))))
    assert per_turn(estimator("trloo"), of) == [[1.0], [-0.5], [-0.5]]


def test_returns_are_discounted_and_compared_at_the_same_turn() -> None:
    # returns with 0.5: (1 + 0.5 * 1, 1), (0 + 0.5 * 0 + 0.25 * 4, 2, 4), (2)
    members = [of_turns("g0", [1.0, 1.0]), of_turns("g1", [0.0, 0.0, 4.0]), of_turns("g2", [2.0])]
    found = per_turn(estimator("trloo", discount=0.5), batch(group("g", *members)))
    assert found == [[1.5 - 1.5, 1.0 - 2.0], [1.0 - 1.75, 2.0 - 1.0, 4.0], [2.0 - 1.25]]


def test_the_advantage_of_a_turn_does_not_depend_on_rewards_before_it() -> None:
    made = estimator("trloo")
    found = [
        per_turn(made, batch(group("g", of_turns("g0", [before, 1.0]), of_turns("g1", [0.0, 0.0]))))
        for before in (0.0, 9.0)
    ]
    assert found[0][0][1] == found[1][0][1] == 1.0
    assert found[0][0][0] != found[1][0][0]


def test_a_reward_of_the_whole_sample_is_one_of_its_last_turn() -> None:
    one, two = of_turns("g0", [0.0, 1.0], whole=2.0), of_turns("g1", [0.0, 0.0], whole=0.0)
    assert per_turn(estimator("trloo", {"r": 1.0, "whole": 0.5}), batch(group("g", one, two))) == [[2, 2], [-2, -2]]
    assert per_turn(estimator("trloo", {"whole": 0.5}), batch(group("g", one, two))) == [[1, 1], [-1, -1]]


def test_a_group_whose_turns_agree_has_no_gradient_and_one_that_differs_late_has() -> None:
    made = estimator("trloo")
    same = group("g", *(of_turns(f"g{i}", [0.1, 0.1]) for i in range(3)))
    assert set(made.of_group(same).values()) == {0.0}
    late = group("g", of_turns("g0", [1.0, 0.0]), of_turns("g1", [0.0, 1.0]))
    assert per_turn(made, batch(late)) == [[0.0, -1.0], [0.0, 1.0]]
    assert made.of_group(late) == {"g0": -1.0, "g1": 1.0}


def test_samples_of_an_episode_are_not_their_own_baseline() -> None:
    members = [
        of_turns("g0", [1.0], episode="e0"),
        of_turns("g1", [0.0], episode="e0"),
        of_turns("g2", [0.0], episode="e1"),
        of_turns("g3", [1.0], episode="e2"),
    ]
    # the baselines are 0.5 for e0, mean(0.5, 1) for e1, and mean(0.5, 0) for e2
    assert per_turn(estimator("trloo"), batch(group("g", *members))) == [[0.5], [-0.5], [-0.75], [0.75]]


def test_a_failure_of_the_infrastructure_in_any_turn_excludes_the_member() -> None:
    failed = of_turns("g0", [0.0, 0.0])
    failed = replace(failed, rewards=(*failed.rewards[:1], replace(failed.rewards[1], outcome=Outcome.INFRA_FAILURE)))
    nothing = replace(of_turns("g1", [0.0, 0.0]), rewards=())
    of = batch(group("g", failed, nothing, of_turns("g2", [1.0, 0.0]), of_turns("g3", [0.0, 0.0])))
    for name in ("trloo", "hgpo"):
        found = estimator(name)(of)
        assert found.dropped == {0: "UNSCORED", 1: "UNSCORED"}
        assert set(estimator(name).of_group(of.groups[0])) == {"g2", "g3"}
    assert per_turn(estimator("trloo"), of)[2:] == [[1.0, 0.0], [-1.0, 0.0]]


@pytest.mark.parametrize(("name", "options", "half"), [("trloo", {}, 0.5), ("hgpo", {"scale_by_std": False}, 0.25)])
def test_members_without_a_summary_are_one_turn_with_all_of_their_rewards(
    name: str, options: dict[str, Any], half: float
) -> None:
    members = [member(f"g{i}", {"r": r}) for i, r in enumerate([1.0, 0.0])]
    members[1] = replace(members[1], rewards=(*members[1].rewards, Reward(name="r", value=0.5, segment=3)))
    of = batch_of([leased("g0", "g", 2), leased("g1", "g", 2)], [group("g", *members)])
    assert per_turn(estimator(name, **options), of) == [[half, half], [-half, -half]]
    assert estimator(name).of_group(group("g")) == {}


# HGPO -----------------------------------------------------------------------------------------------------------------

PLAIN: dict[str, Any] = {"scale_by_std": False, "discount": 1.0}


@pytest.mark.row("S020")
def test_hgpo_equals_the_hand_computed_value() -> None:
    # returns g0: 1, 1; g1: 0, 0; g2: 4, 4. The second turns all see x, and only those of g0 and g1 have seen a before
    members = [
        of_turns("g0", [0.0, 1.0], seen="ax"),
        of_turns("g1", [0.0, 0.0], seen="ax"),
        of_turns("g2", [0.0, 4.0], seen="bx"),
    ]
    of = batch(group("g", *members))
    mean = 5 / 3
    one = [1 - mean, 0 - mean, 4 - mean]
    expected = [[0.5, (2 * one[0] + 3 * 0.5) / 5], [-0.5, (2 * one[1] - 3 * 0.5) / 5], [0.0, one[2]]]
    found = per_turn(estimator("hgpo", **PLAIN), of)
    assert [a for values in found for a in values] == pytest.approx([a for values in expected for a in values])
    scaled = per_turn(estimator("hgpo", discount=1.0), of)
    std = (sum(a * a for a in one) / 3) ** 0.5
    assert scaled[0] == pytest.approx([1.0, (2 * one[0] / std + 3 * 1.0) / 5], rel=1e-5)


@pytest.mark.row("S020")
def test_without_history_turns_with_equal_observations_are_compared() -> None:
    members = [of_turns("g0", [1.0, 0.0], seen="ax"), of_turns("g1", [0.0, 2.0], seen="bx")]
    found = per_turn(estimator("hgpo", history=0, **PLAIN), batch(group("g", *members)))
    assert found == [[0.0, -1.0], [0.0, 1.0]]
    with_history = per_turn(estimator("hgpo", history=2, **PLAIN), batch(group("g", *members)))
    assert with_history == found, "another observation before: they share the level of the observation alone"


@pytest.mark.row("S020")
def test_a_turn_that_is_alone_has_the_trajectory_term_or_nothing() -> None:
    # rewards per member 1 and 3; no two turns are alike
    of = batch(group("g", of_turns("g0", [1.0], seen="a"), of_turns("g1", [1.0, 2.0], seen="bc")))
    assert per_turn(estimator("hgpo", **PLAIN), of) == [[0.0], [0.0, 0.0]]
    assert per_turn(estimator("hgpo", trajectory_term=True, **PLAIN), of) == [[-1.0], [1.0, 1.0]]
    shared = batch(group("g", of_turns("g0", [1.0], seen="a"), of_turns("g1", [0.0, 3.0], seen="ac")))
    assert per_turn(estimator("hgpo", trajectory_term=True, **PLAIN), shared) == [[-1.0], [1.0, 1.0]]


def test_levels_are_weighted_by_the_power() -> None:
    members = [of_turns("g0", [0.0, 1.0], seen="ax"), of_turns("g1", [0.0, 0.0], seen="ax")]
    members.append(of_turns("g2", [0.0, 2.0], seen="bx"))
    of = batch(group("g", *members))
    # the second turn of g0 has 0 at level 1 (mean 1), so that level 2 alone counts; g1 has -1 and -0.5
    assert per_turn(estimator("hgpo", **PLAIN), of)[0][1] == 0.5
    for power, expected in ((0.0, -0.75), (1.0, (-2 - 1.5) / 5), (2.0, (-4 - 4.5) / 13)):
        assert per_turn(estimator("hgpo", power=power, **PLAIN), of)[1][1] == pytest.approx(expected)


def test_members_that_are_not_leased_are_in_the_clusters() -> None:
    context = group("g", of_turns("g0", [1.0]), of_turns("g1", [0.0]), of_turns("g2", [0.0]))
    of = batch_of([leased("g0", "g")], [context])
    assert per_turn(estimator("hgpo", **PLAIN), of) == [[pytest.approx(2 / 3)]]
    assert per_turn(estimator("trloo"), of) == [[1.0]]


def test_a_turn_that_samples_of_one_episode_share_is_one_turn() -> None:
    """Two samples of an episode with the same first turn, and another episode that has seen the same."""
    first = [of_turns("g0", [0.0, 1.0], seen="ax", episode="e0"), of_turns("g1", [0.0, 3.0], seen="ay", episode="e0")]
    assert per_turn(estimator("hgpo", **PLAIN), batch(group("g", *first))) == [[0.0, 0.0], [0.0, 0.0]]
    both = group("g", *first, of_turns("g2", [0.0, 4.0], seen="az", episode="e1"))
    # mean of the first turn: ((1 + 3) / 2 + 4) / 2 = 3
    assert per_turn(estimator("hgpo", **PLAIN), batch(both)) == [[-2.0, 0.0], [0.0, 0.0], [1.0, 0.0]]


# Unlikeliness ---------------------------------------------------------------------------------------------------------


def with_logprob(found: MemberOutcome, mean: float) -> MemberOutcome:
    turns = (
        TurnSummary(segment=1, num_tokens=3, mean_logprob=mean),
        TurnSummary(segment=3, num_tokens=1, mean_logprob=mean),
    )
    return replace(found, summary=SampleSummary(turns=turns))


def test_members_that_are_not_leased_have_their_rank() -> None:
    logprobs = [-1.0, -3.0, -2.0, -0.5]
    members = [with_logprob(member(f"g{i}", {"r": float(i < 3)}), v) for i, v in enumerate(logprobs)]
    context = group("g", *members)
    # ranks 2, 0, 1, 3; rewards 1 - 0.25 * 2 / 4, 1, 1 - 0.25 / 4, 0
    rewards = np.array([0.875, 1.0, 0.9375, 0.0])
    expected = (rewards - rewards.mean()) / rewards.std()
    made = estimator("unlikeliness")
    assert scalars(made, batch_of([leased("g1", "g")], [context])) == pytest.approx([expected[1]], rel=1e-4)
    found = made.of_group(context)
    assert [found[f"g{i}"] for i in range(4)] == pytest.approx(expected.tolist(), rel=1e-4)
    assert made.of_group(group("g", *members[:2])) != {"g0": UNDECIDED, "g1": UNDECIDED}


def test_equal_logprobs_share_the_mean_of_their_ranks() -> None:
    copies = group("g", *(with_logprob(member(f"g{i}", {"r": 1.0}), -1.0) for i in range(3)))
    assert set(estimator("unlikeliness").of_group(copies).values()) == {0.0}
    assert scalars(estimator("unlikeliness", std="none"), batch_of([leased("g0", "g")], [copies])) == [0.0]


# V0.5 -----------------------------------------------------------------------------------------------------------------


def predicted(name: str, prior: float, *rewards: float) -> GroupContext:
    return group(name, *(member(f"{name}{i}", {"r": r, "prior": prior}) for i, r in enumerate(rewards)))


def test_v05_equals_the_hand_computed_value() -> None:
    made = estimator("v05", {"r": 1.0, "prior": 0.0})
    # n = 4: s2 = 1 / 16. (1 - 0.5)^2 = 1 / 4, so that the prior has the weight 1 / 4; (0.25 - 0.4)^2 < s2: the baseline
    # is the prior
    of = batch(predicted("a", 0.5, 1.0, 1.0, 1.0, 1.0), predicted("b", 0.4, 1.0, 0.0, 0.0, 0.0))
    assert scalars(made, of) == pytest.approx([0.125] * 4 + [0.6, -0.4, -0.4, -0.4])
    assert made(of).metrics == pytest.approx({"prior_share": 1.0, "prior_weight_mean": 0.625, "conflict_share": 0.5})
    assert made.of_group(of.groups[0]) == pytest.approx({f"a{i}": 0.125 for i in range(4)}), "agreement has a gradient"
    assert estimator("v05").of_group(of.groups[0]) == made.of_group(of.groups[0]), "the prior is never optimized"


def test_the_baseline_of_v05_is_better_than_the_mean_if_the_prior_is_right_and_ignores_it_if_it_is_wrong() -> None:
    options = V05Options()
    rng = np.random.default_rng(0)
    for rate, prior, num in ((0.5, 0.5, 4), (0.2, 0.2, 4), (0.9, 0.1, 4), (0.9, 0.1, 64)):
        means = rng.binomial(num, rate, 4000) / num
        weights = np.array([weight_of_prior(m, prior, num, options) for m in means])
        baselines = (1 - weights) * means + weights * prior
        if prior == rate:
            assert np.mean((baselines - rate) ** 2) < 0.5 * np.mean((means - rate) ** 2)
        else:
            assert weights.mean() < (0.2 if num == 4 else 0.01)
            assert np.mean((baselines - rate) ** 2) < 2 * np.mean((means - rate) ** 2)


def test_without_a_prior_the_baseline_of_v05_is_the_mean_of_the_episodes() -> None:
    made = estimator("v05")
    of = batch(
        group("g", *(member(f"g{i}", {"r": r}, episode=e) for i, (r, e) in enumerate(((1, "x"), (0, "x"), (0, "y")))))
    )
    assert scalars(made, of) == [0.75, -0.25, -0.25]
    only = batch(group("g", member("g0", {"prior": 0.5}), member("g1", {"prior": 0.5, "r": 1.0})))
    found = made(only)
    assert found.dropped == {0: "UNSCORED"}, "a prior is not a reward"
    assert made.of_group(group("g", member("g0", {"r": 1.0}, outcome=Outcome.INFRA_FAILURE))) == {}
    with pytest.raises(ConfigError, match="`low` must be < high = 0.0, got 1.0"):
        estimator("v05", low=1.0, high=0.0)


# COPO -----------------------------------------------------------------------------------------------------------------


@pytest.mark.row("S025")
def test_copo_equals_the_hand_computed_value() -> None:
    solved = answered("a", ("7", 1.0), ("7", 1.0))
    agreed = answered("b", ("3", 0.0), ("3", 0.0))
    mixed = answered("c", ("5", 1.0), ("4", 0.0))
    made, of = estimator("copo", epsilon=1e-9), batch(solved, agreed, mixed)
    # H = 0, 0 and 1 bit: w = sigmoid(-10) and sigmoid(10); global rewards 1, 0, 0.5 with z = sqrt(1.5), its negative, 0
    small = 1 / (1 + np.exp(10))
    z = 1.5**0.5 * (1 - small)
    assert scalars(made, of) == pytest.approx([z, z, -z, -z, 1 - small, small - 1], rel=1e-5)
    assert made(of).metrics == pytest.approx({"answer_entropy_mean": 1 / 3, "local_share_mean": (1 + small) / 3})
    assert made.of_group(solved) == {"a0": UNDECIDED, "a1": UNDECIDED}


def test_the_discount_lowers_the_global_reward_of_groups_with_many_answers() -> None:
    mixed, solved = answered("a", ("1", 1.0), ("2", 1.0), ("3", 1.0), ("4", 1.0)), answered("b", *[("1", 1.0)] * 4)
    assert entropy_factor(list(mixed.members)) == (1 - 1 / 4) / 2
    found = scalars(estimator("copo", entropy_discount=True, threshold=50.0), batch(mixed, solved))
    assert found == pytest.approx([-1.0] * 4 + [1.0] * 4, rel=1e-4)  # global rewards 1 - 0.375 * 2 = 0.25 and 1


def test_members_without_an_answer_share_one_and_groups_without_any_are_local() -> None:
    none = answered("a", ("", 1.0), ("", 0.0))
    some = answered("b", ("", 0.0), ("", 0.0), ("2", 1.0), ("2", 1.0))
    found = estimator("copo")(batch(none, some))
    assert found.metrics["answer_entropy_mean"] == 1.0
    assert scalars(estimator("copo"), batch(none)) == pytest.approx([1.0, -1.0], rel=1e-4)


def test_copo_survives_failures_lone_groups_and_several_samples_per_episode() -> None:
    failed = group("a", member("a0", {"r": 1.0}, outcome=Outcome.INFRA_FAILURE))
    alone = answered("b", ("1", 1.0))
    shared = answered("c", ("1", 1.0), ("1", 1.0), ("2", 0.0))
    shared = replace(shared, members=tuple(replace(m, episode="xxy"[i]) for i, m in enumerate(shared.members)))
    found = estimator("copo")(batch(failed, alone, shared))
    assert found.dropped == {0: "UNSCORED"}
    assert found.metrics["answer_entropy_mean"] == 0.5, "0 bits for the lone episode, 1 bit for the two of c"
    assert scalars(estimator("copo"), batch(alone)) == [0.0]


# DSDR -----------------------------------------------------------------------------------------------------------------


def written(name: str, *members: tuple[str, float], episodes: str = "") -> GroupContext:
    """Return a group with one member per text and reward."""
    made = [member(f"{name}{i}", {"r": r}, episode=episodes[i : i + 1]) for i, (_, r) in enumerate(members)]
    return group(
        name,
        *(replace(m, summary=SampleSummary(text=text)) for m, (text, _) in zip(made, members, strict=True)),
    )


def diversity(of: UpdateBatch) -> list[float]:
    return [float(s) for s in of.first(estimator("dsdr")(of).columns["diversity_share"])]


ONE, OTHER = "x = 2 + 3", "y = 2 * 4"
"""Two texts of five words, of which two are the same, each with a formula that the other one lacks."""


@pytest.mark.row("S031")
def test_dsdr_equals_the_hand_computed_value() -> None:
    of = batch(written("g", (ONE, 1.0), (ONE, 1.0), (OTHER, 1.0), (OTHER, 0.0)))
    # the cosine of both is 2 / 5, so every member has (0 + 0.3 + 0.3) / 3 = 0.2 to the others, and no formula is new
    found = estimator("dsdr", bonus=0.1)
    rewards = np.array([1.01, 1.01, 1.01, 0.0])
    assert scalars(found, of) == pytest.approx(((rewards - rewards.mean()) / rewards.std()).tolist(), rel=1e-4)
    # without the wrong one: (0 + 0.3) / 2 = 0.15 for the copies, 0.3 for the other one, whose formula is new
    of = batch(written("g", (ONE, 1.0), (ONE, 1.0), (OTHER, 1.0), ("", 0.0)))
    rewards = np.array([1.0075, 1.0075, 1.05, 0.0])  # d = 0.15 / 2, and 0.3 / 2 + 1 / 2, limited to 0.5
    expected = (rewards - rewards.mean()) / rewards.std()
    assert scalars(found, of) == pytest.approx(expected.tolist(), rel=1e-4)
    assert list(found.of_group(of.groups[0]).values()) == pytest.approx(expected.tolist(), rel=1e-4)
    exps = np.exp(np.array([0.075, 0.075, 0.5]) * 5)
    assert diversity(of) == pytest.approx([*(exps / exps.sum()).tolist(), 0.0])
    assert found(of).metrics == pytest.approx({"diversity_mean": 0.65 / 3, "correct": 3.0})


@pytest.mark.row("S031")
def test_copies_get_a_smaller_bonus_than_different_solutions_and_wrong_ones_get_none() -> None:
    made = estimator("dsdr", std="none", mean="none", bonus=0.1)
    copies, different = written("a", (ONE, 1.0), (ONE, 1.0)), written("b", (ONE, 1.0), (OTHER, 1.0))
    assert made.of_group(copies) == {"a0": 1.0, "a1": 1.0}
    assert made.of_group(different) == {"b0": 1.05, "b1": 1.05}
    assert set(estimator("dsdr").of_group(copies).values()) == {0.0}, "a solved group of copies may be filtered"
    assert diversity(batch(copies)) == [0.5, 0.5]
    mixed = batch(written("c", (ONE, 1.0), (OTHER, 0.0)))
    most = estimator("dsdr", std="none", mean="none", bonus=0.1, formula_share=1.0, diversity_max=1.0)
    assert most.of_group(mixed.groups[0]) == {"c0": 1.1, "c1": 0.0}, "bounded, and only for the right one"
    assert diversity(mixed) == [1.0, 0.0]


def test_an_encoder_compares_texts_by_the_mean_of_its_states(tmp_path: Path) -> None:
    """A tiny BERT with random weights in a folder. The reward service, which has no torch, leaves groups undecided."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "x", "y", "=", "2", "3", "4", "+", "*"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    model = transformers.BertModel(transformers.BertConfig(vocab_size=len(words), **sizes)).eval()  # type: ignore[no-untyped-call]
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        ids = [[2, 5, 7, 8, 11, 9, 3], [2, 6, 7, 8, 12, 10, 3]]
        one, other = (model(torch.tensor([i])).last_hidden_state[0].mean(0) for i in ids)
        cosine = float(torch.cosine_similarity(one, other, dim=0))
    made = estimator("dsdr", encoder=str(tmp_path), formula_share=0.0, std="none", mean="none", bonus=1.0)
    of = batch(written("g", (ONE, 1.0), (OTHER, 1.0), ("", 1.0), (ONE, 0.0)))
    different = (1 - cosine) / 2
    expected = [1 + different / 2, 1 + different, 1.0, 0.0]  # the wrong one is a copy of the first
    assert different > 1e-3
    assert scalars(made, of) == pytest.approx(expected, abs=1e-6)
    plain = estimator("dsdr", encoder=str(tmp_path))
    assert set(plain.of_group(written("g", (ONE, 1.0), (OTHER, 1.0))).values()) == {UNDECIDED}
    assert set(plain.of_group(written("g", (ONE, 0.0), (OTHER, 0.0))).values()) == {0.0}
    with pytest.raises(ConfigError, match=r"the encoder .*none cannot be loaded"):
        estimator("dsdr", encoder=str(tmp_path / "none"))(of)


def test_without_texts_dsdr_is_grpo_and_the_entropy_is_distributed_equally() -> None:
    of = batch(written("g", ("", 1.0), ("", 1.0), ("", 0.0)), written("h", (ONE, 0.0), (OTHER, 0.0)))
    assert scalars(estimator("dsdr"), of) == scalars(estimator("grpo"), of)
    assert diversity(of) == [0.5, 0.5, 0.0, 0.0, 0.0]
    lone = batch(written("g", (ONE, 1.0), ("", 1.0), ("", 0.0)))
    assert scalars(estimator("dsdr"), lone) == scalars(estimator("grpo"), lone), "nothing to compare with"


def test_samples_of_one_episode_are_not_compared_and_share_its_weight() -> None:
    of = batch(written("g", (ONE, 1.0), (OTHER, 1.0), (ONE, 1.0), episodes="xxy"))
    # g0 equals g2; g1 differs from g2 by 0.3 / 2 + 0.5, at most 0.5; g2: the mean distance to x is 0.15, and the
    # formula is known
    exps = np.exp(np.array([0.0, 0.5, 0.075]) * 5) * [0.5, 0.5, 1.0]
    assert diversity(of) == pytest.approx((exps / exps.sum()).tolist())


def test_the_entropy_term_of_dsdr_equals_the_hand_computed_value() -> None:
    """Samples of 2, 1 and 1 tokens, of which the last one is another group and wrong. Entropies ln 2, 0, ln 2, ln 2.
    Estimated from tokens of probability 1/2 that were sampled with 1/4, h = 2 ln 2."""
    of = ragged(lengths=(2, 1, 1), vocabulary=2)
    of = of.with_columns(
        diversity_share=torch.tensor([0.25, 0.25, 0.75, 0.0], dtype=torch.float64), group=torch.tensor([0, 0, 0, 1])
    )
    logits = torch.zeros(4, 2, dtype=torch.float64)
    logits[1, 0] = 100.0
    loss = loss_of_logits(plugins_of(LossTermChoice("dsdr_entropy", {"exact": True})), of, logits)
    assert loss.item() == pytest.approx(-(0.25 / 2 + 0.75) * np.log(2) / 2)
    of = of.with_columns(behavior=torch.full((4,), float(np.log(0.25)), dtype=torch.float64))
    loss = loss_of_logits(plugins_of(LossTermChoice("dsdr_entropy")), of, torch.zeros(4, 2, dtype=torch.float64))
    assert loss.item() == pytest.approx(-(0.25 / 2 + 0.25 / 2 + 0.75) * 2 * np.log(2) / 2)
    limited = plugins_of(LossTermChoice("dsdr_entropy", {"weight_max": 1.0}))
    loss = loss_of_logits(limited, of, torch.zeros(4, 2, dtype=torch.float64))
    assert loss.item() == pytest.approx(-(0.25 / 2 + 0.25 / 2 + 0.75) * np.log(2) / 2)


@pytest.mark.row("S031")
@pytest.mark.parametrize("exact", [False, True])
def test_the_gradient_of_the_entropy_term_equals_finite_differences_and_is_zero_for_wrong_samples(exact: bool) -> None:
    of = ragged()
    share = torch.tensor([0.0, 1.0, 0.0, 0.3, 0.0, 0.7], dtype=torch.float64)[of.columns["sample"]]
    plugins = plugins_of(LossTermChoice("dsdr_entropy", {"exact": exact}))
    gradient = check_gradient(plugins, of.with_columns(diversity_share=share))
    assert gradient.abs().max() > 1e-3
    assert (gradient[share == 0] == 0).all()


def test_columns_of_an_estimator_are_checked() -> None:
    of = batch(written("g", (ONE, 1.0), (OTHER, 0.0)))
    found = estimator("dsdr")(of)
    assert checked_estimate(found, of, ("diversity_share",)).columns["diversity_share"].shape == (4,)
    missing = checked_estimate(dataclasses.replace(found, columns={}), of, ("diversity_share",))
    assert missing.dropped == {0: "WRONG_SHAPE", 1: "WRONG_SHAPE"}
    bad = np.array([0.0, 0.0, np.nan, 0.0], np.float32)
    assert set(
        checked_estimate(dataclasses.replace(found, columns={"diversity_share": bad}), of, ("diversity_share",)).dropped
    ) == {1}
    assert checked_estimate(Estimate(advantages=found.advantages, columns={"more": bad}), of).columns == {}
    with pytest.raises(ValueError, match="`rollout.outputs` must contain diversity_share.*choose an estimator"):
        plugins_of(LossTermChoice("dsdr_entropy")).check_outputs(())
    Plugins(UpdateConfig(estimator=Extension("dsdr"), loss=(LossTermChoice("dsdr_entropy"),))).check_outputs(())


# V0 -------------------------------------------------------------------------------------------------------------------


def asked(
    name: str, tokens: Sequence[int], *rewards: float, **labels: str
) -> tuple[list[TrainingSample], GroupContext]:
    """Return the samples of a group with this prompt, and the group."""
    context = group(name, *(member(f"{name}{i}", {"r": r}) for i, r in enumerate(rewards)))
    samples = [
        training_sample(m.sample_id, [prompt(tokens), action([21, 22], [-1.0, -1.0])], of=name) for m in context.members
    ]
    return samples, replace(context, labels=labels)


def asking(*groups: tuple[list[TrainingSample], GroupContext], update: int = 1) -> UpdateBatch:
    return batch_of([s for samples, _ in groups for s in samples], [g for _, g in groups], update=update)


def test_v0_equals_the_hand_computed_value() -> None:
    made = estimator("v0", bandwidth=0.5)
    first = asking(asked("a", [20, 30], 1.0, 1.0), asked("b", [20, 40], 0.0))
    assert scalars(made, first) == [0.5, 0.5, -0.5], "without a context the prediction is 0.5"
    # token 20 is in both prompts and has no weight; the cosine with a is 1 and with b 0. The mean of the three episodes
    # is 2 / 3
    second = asking(asked("c", [30], 1.0), asked("d", [50], 1.0), update=2)
    k = np.exp(-2.0)
    of_c = (2 / 3 + 2 * 1.0) / (1 + 2 + k)
    of_d = (2 / 3 + 2 * k) / (1 + 3 * k)
    assert scalars(made, second) == pytest.approx([1 - of_c, 1 - of_d])
    assert made.of_group(second.groups[0]) == {"c0": UNDECIDED}


def test_the_prediction_of_v0_is_that_before_the_batch_and_repeats_with_it() -> None:
    made = estimator("v0")
    of = asking(asked("a", [30], 1.0))
    again = dataclasses.replace(of, repeat=1)
    assert scalars(made, of) == scalars(made, again) == [0.5]
    assert made(again).metrics["context"] == 1.0


def test_a_context_of_a_weaker_policy_lowers_the_prediction_and_ranks_held_out_prompts() -> None:
    rng = np.random.default_rng(0)
    made = {}
    for name, shift in (("strong", 0.2), ("weak", -0.2)):
        one = V0(weights={}, options=V0Options())
        prompts = [rng.integers(100, 110, 6).tolist() for _ in range(200)]
        rates = [np.clip(np.mean(np.array(p) < 105) + shift, 0, 1) for p in prompts]
        one(
            asking(
                *(
                    asked(f"{name}{i}", p, float(rng.random() < r))
                    for i, (p, r) in enumerate(zip(prompts, rates, strict=True))
                )
            )
        )
        made[name] = one
    held_out = [rng.integers(100, 110, 6).tolist() for _ in range(60)]
    features = [made["weak"].features_of(g, s[0]) for s, g in (asked(f"h{i}", p, 0.0) for i, p in enumerate(held_out))]
    easy = np.array([np.mean(np.array(p) < 105) for p in held_out])
    values = {name: one.predict(features) for name, one in made.items()}
    assert values["weak"].mean() < values["strong"].mean() - 0.1
    assert rank_correlation(values["strong"], easy) > 0.3
    made["strong"].load_state(made["weak"].state())
    assert made["strong"].predict(features).tolist() == values["weak"].tolist(), "the context is all that it knows"


def test_labels_are_features_and_the_context_is_bounded() -> None:
    made = estimator("v0", context_max=2)
    made(asking(asked("a", [20], 1.0, level="1"), asked("b", [20], 0.0, level="2"), asked("c", [20], 0.0, level="3")))
    assert isinstance(made, V0)
    assert [pair[0] for pair in made.state()["context"]] == [{"level=2": 1, "20": 1}, {"level=3": 1, "20": 1}]
    made.load_state({"context": [[{"level=1": 1}, 1.0, 1], [{"level=2": 1}, 0.0, 1]]})
    one, two = made.predict([{"level=1": 1}, {"level=2": 1}])
    assert one > 0.7
    assert two < 0.3
    failed = made(asking(([leased("d0", "d")], group("d", member("d0", {"r": 1.0}, outcome=Outcome.INFRA_FAILURE)))))
    assert failed.dropped == {0: "UNSCORED"}
    assert failed.metrics["context"] == 2.0


def test_the_rank_correlation_counts_ties_at_their_mean() -> None:
    assert rank_correlation(np.array([1.0, 2.0, 3.0]), np.array([2.0, 4.0, 9.0])) == pytest.approx(1.0)
    # ranks 1, 2.5, 2.5 and 3, 1, 2: covariance -1.5 / 2 over sqrt(1.5 / 2 * 2 / 2)
    assert rank_correlation(np.array([1.0, 2.0, 2.0]), np.array([3.0, 1.0, 2.0])) == pytest.approx(-1.5 / 3**0.5)
    assert rank_correlation(np.ones(3), np.array([1.0, 2.0, 3.0])) == 0.0
    assert rank_correlation(np.empty(0), np.empty(0)) == 0.0
