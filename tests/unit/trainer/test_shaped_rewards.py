"""Estimators that make one reward of several numbers of a member before the advantages of GRPO, against values by
hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec.structs import replace

from rollmesh.shared.domain.trajectory import (
    GroupContext,
    MemberOutcome,
    Outcome,
    Reward,
    SampleSummary,
    TurnSummary,
)
from rollmesh.shared.errors import ConfigError
from rollmesh.trainer.estimators.base import UNDECIDED
from rollmesh.trainer.estimators.grpo_lambda import first_groups

from .builders import batch_of, group, member
from .test_member_methods import leased, of_turns
from .test_methods import batch, estimator, scalars

# G-RA -----------------------------------------------------------------------------------------------------------------

PLAIN: dict[str, Any] = {"mean": "none", "std": "none"}
"""The advantage is the reward."""
WEIGHTS = {"patch": 1.0, "r": 0.5, "brief": 2.0}


def with_patch(sample_id: str, patch: float, turns: list[float], **whole: float) -> MemberOutcome:
    """Return a member with the outcome `patch`, further rewards of the whole sample, and the reward r of each turn."""
    made = of_turns(sample_id, turns)
    outcome = (Reward(name="patch", value=patch), *(Reward(name=name, value=v) for name, v in whole.items()))
    return replace(made, rewards=(*outcome, *made.rewards))


@pytest.mark.row("S097")
def test_g_ra_counts_rewards_of_turns_behind_the_gate() -> None:
    """Three perfect turns with weight 0.5 are 1.5: worth nothing without a patch, and 1 + 1.5 with one. A patch
    with one good turn of three has 1 + 0.5, as much as perfect turns without a patch have with D-RA."""
    members = [with_patch("g0", 0.0, [1, 1, 1]), with_patch("g1", 1.0, [1, 1, 1]), with_patch("g2", 1.0, [0, 1, 0])]
    of = batch(group("g", *members))
    gated, direct = (estimator("g_ra", WEIGHTS, gate="patch", accumulate=how, **PLAIN) for how in ("gated", "direct"))
    assert scalars(gated, of) == [0.0, 2.5, 1.5]
    assert scalars(direct, of) == [1.5, 2.5, 1.5], "direct accumulation pays as much for no patch as for one"
    # means: the outcome 2 / 3; turns 1.5, 1.5, 0.5 offered; 0, 1.5, 0.5 added
    shared = {"outcome_mean": 2 / 3, "steps_offered_mean": 3.5 / 3, "gate_open_share": 2 / 3}
    assert gated(of).metrics == pytest.approx({**shared, "steps_mean": 2 / 3})
    assert direct(of).metrics == pytest.approx({**shared, "steps_mean": 3.5 / 3})
    assert gated.of_group(of.groups[0]) == {"g0": 0.0, "g1": 2.5, "g2": 1.5}
    centered = estimator("g_ra", WEIGHTS, gate="patch")
    assert scalars(centered, of) == pytest.approx([-1.2977, 1.1355, 0.1622], abs=1e-4)  # mean 4 / 3, variance 19 / 18


def test_the_gate_opens_at_the_threshold_of_the_reward_without_its_weight() -> None:
    of = batch(group("g", *(with_patch(f"g{i}", patch, [1.0]) for i, patch in enumerate([0.49, 0.5, 0.51]))))
    made = estimator("g_ra", {"patch": 0.1, "r": 1.0}, gate="patch", threshold=0.5, **PLAIN)
    assert scalars(made, of) == pytest.approx([0.049, 1.05, 1.051])


def test_rewards_of_the_whole_sample_can_be_behind_the_gate() -> None:
    """A penalty for length of -0.25 with weight 2, which only a patch pays."""
    of = batch(group("g", *(with_patch(f"g{i}", patch, [], brief=-0.25) for i, patch in enumerate([0.0, 1.0]))))
    assert scalars(estimator("g_ra", WEIGHTS, gate="patch", gated=["brief"], **PLAIN), of) == [0.0, 0.5]
    assert scalars(estimator("g_ra", WEIGHTS, gate="patch", **PLAIN), of) == [-0.5, 0.5]


def test_a_gate_that_does_not_apply_is_closed_and_a_failure_of_a_turn_excludes_the_member() -> None:
    members = [with_patch(f"g{i}", 1.0, [1.0]) for i in range(5)]
    outcomes = {0: (0, Outcome.NOT_APPLICABLE), 1: (0, Outcome.INFRA_FAILURE), 2: (2, Outcome.INFRA_FAILURE)}
    outcomes[3] = (2, Outcome.NOT_APPLICABLE)
    for i, (at, outcome) in outcomes.items():
        rewards = (*members[i].rewards[:1], Reward(name="brief", value=0.0), *members[i].rewards[1:])
        changed = [replace(r, outcome=outcome) if n == at else r for n, r in enumerate(rewards)]
        members[i] = replace(members[i], rewards=tuple(changed))
    made = estimator("g_ra", WEIGHTS, gate="patch", **PLAIN)
    found = made(batch(group("g", *members)))
    assert found.dropped == {1: "UNSCORED", 2: "UNSCORED"}
    assert made.of_group(group("g", *members)) == {"g0": 1.0, "g3": 1.0, "g4": 1.5}
    assert found.metrics["gate_open_share"] == pytest.approx(2 / 3)
    assert made(batch(group("g", members[1]))).metrics["outcome_mean"] == 0.0


def test_samples_of_an_episode_and_members_that_are_not_leased_are_in_the_baseline_of_g_ra() -> None:
    members = [with_patch("g0", 1.0, [1.0]), with_patch("g1", 0.0, [1.0]), with_patch("g2", 0.0, [1.0])]
    members = [replace(m, episode="x" if m.sample_id != "g2" else "y") for m in members]
    of = batch_of([leased("g0", "g")], [group("g", *members)])
    made = estimator("g_ra", WEIGHTS, gate="patch", std="none")
    assert scalars(made, of) == pytest.approx([1.5 - 0.375])  # episodes (1.5 + 0) / 2 and 0
    assert made(of).metrics["outcome_mean"] == 0.25
    equal = group("g", *(with_patch(f"g{i}", 0.0, [float(i)]) for i in range(3)))
    assert set(made.of_group(equal).values()) == {0.0}, "a group whose gates are closed has no gradient"
    assert scalars(made, batch(group("g", with_patch("g0", 1.0, [1.0])))) == [0.0]


def test_a_gate_that_is_gated_is_rejected_and_the_names_of_rewards_are_declared() -> None:
    with pytest.raises(ConfigError, match=r"`gated` must not contain the gate `patch`, got \['patch'\]"):
        estimator("g_ra", gate="patch", gated=["patch"])
    assert estimator("g_ra", gate="patch", gated=["brief"]).rewards == ("patch", "brief")
    assert scalars(estimator("g_ra", std="none"), batch(group("g", member("g0", {"correct": 1.0})))) == [0.0]


# GRPO-lambda ----------------------------------------------------------------------------------------------------------


def sized(name: str, *members: tuple[float, int], episodes: str = "") -> GroupContext:
    """Return a group with one member per reward and number of sampled tokens; 0 is a member without a summary."""
    made = []
    for i, (reward, length) in enumerate(members):
        turns = (TurnSummary(segment=1, num_tokens=length, mean_logprob=-1.0),) if length else ()
        one = member(f"{name}{i}", {"r": reward}, episode=episodes[i : i + 1])
        made.append(replace(one, summary=SampleSummary(turns=turns)))
    return group(name, *made)


SIGMOID = 1 / (1 + math.exp(-math.sqrt(1.5)))
"""Lengths 10, 20 and 30 have the mean 20 and the variance 200 / 3, so that the last score is 10 / sqrt(200 / 3)."""
BRIEF = [1 - 0.6 * (1 - SIGMOID), 0.7, 1 - 0.6 * SIGMOID]


@pytest.mark.row("S107")
def test_the_reward_of_grpo_lambda_depends_on_the_rank_of_the_group_in_the_batch() -> None:
    """Five groups, of which one favors brevity: a with 3 of 4 right, then b with 2 of 2. The others have 0 or 1."""
    made = estimator("grpo_lambda", **PLAIN)
    a = sized("a", (1, 10), (1, 20), (1, 30), (0, 5))
    low = [sized(name, (1, 10), (0, 90), (0, 20)) for name in "xyz"]
    with_half, with_all = (batch(*low, a, sized("b", (1, 10), (right, 30))) for right in (0.0, 1.0))
    assert scalars(made, with_half) == pytest.approx([*[1, 0, 0] * 3, *BRIEF, 0, 1, 0])
    assert scalars(made, with_all) == pytest.approx(
        [*[1, 0, 0] * 3, 1, 1, 1, 0, 1 - 0.6 / (1 + math.e), 1 - 0.6 / (1 + 1 / math.e)]
    )
    assert made(with_all).metrics == pytest.approx(
        {"brief_groups": 1, "brief_accuracy_min": 1.0, "accuracy_mean": (1 + 0.75 + 1) / 5}
    )
    other = [sized(name, (1, 70), (0, 1), (0, 300)) for name in "xyz"]
    again = batch(*other, a, sized("b", (1, 10), (0, 30)))
    assert scalars(made, again)[:9] == scalars(made, with_half)[:9], "a group of low accuracy does not pay for length"
    plain = scalars(estimator("grpo_lambda"), with_all)
    assert plain[0] == pytest.approx(math.sqrt(2), rel=1e-4), "advantages of grpo: 1 - 1 / 3 over sqrt(2) / 3"
    assert plain[-2:] == pytest.approx([1, -1], rel=1e-4)


@pytest.mark.parametrize(("share", "num"), [(0.0, 0), (0.01, 1), (0.2, 3), (0.21, 4), (1.0, 15)])
def test_the_share_of_groups_that_favor_brevity(share: float, num: int) -> None:
    accuracies = [n / 15 for n in range(15)]
    assert first_groups(accuracies, share) == list(range(14, 14 - num, -1))
    assert first_groups([0.5, 1.0, 0.5], 0.6) == [1, 0], "equal accuracies are ranked in the order of the batch"
    assert first_groups([], share) == []


def test_a_group_of_right_answers_is_kept_for_its_lengths() -> None:
    made = estimator("grpo_lambda")
    assert made.of_group(sized("a", (1, 5), (1, 9))) == {"a0": UNDECIDED, "a1": UNDECIDED}
    assert made.of_group(sized("a", (0, 5), (0, 9))) == {"a0": 0.0, "a1": 0.0}
    assert made.of_group(sized("a", (1, 5), (0, 9))) == pytest.approx({"a0": 1.0, "a1": -1.0}, rel=1e-4)
    assert made.of_group(sized("a", (1, 5))) == {"a0": 0.0}
    assert made.of_group(group("a")) == {}
    assert set(estimator("grpo_lambda", share=0.0).of_group(sized("a", (1, 5), (1, 9))).values()) == {0.0}


def test_lengths_of_grpo_lambda_are_those_of_all_correct_members_and_episodes_count_once() -> None:
    made = estimator("grpo_lambda", share=1.0, **PLAIN)
    context = sized("a", (1, 10), (1, 20), (1, 30), (0, 5))
    of = batch_of([leased("a2", "a")], [context])
    assert scalars(made, of) == pytest.approx(BRIEF[2:])
    # Episodes of lengths (10, 10) and 30: mean 20, deviation 10. The last member has no summary, and is not leased.
    several = sized("a", (1, 10), (1, 10), (1, 30), (1, 0), episodes="xxyz")
    of = batch_of([leased(f"a{i}", "a") for i in range(3)], [several])
    assert scalars(made, of) == pytest.approx([1 - 0.6 / (1 + math.e)] * 2 + [1 - 0.6 / (1 + 1 / math.e)])
    assert scalars(made, batch(sized("a", (1, 7), (1, 7)))) == pytest.approx([0.7, 0.7]), "equal lengths"
    assert scalars(made, batch(sized("a", (1, 0), (1, 0)))) == pytest.approx([0.7, 0.7]), "of two trained tokens each"


def test_a_failed_member_has_no_part_in_the_accuracy() -> None:
    failed = group("a", member("a0", {"r": 0.0}, outcome=Outcome.INFRA_FAILURE), member("a1", {"r": 1.0}))
    found = estimator("grpo_lambda", **PLAIN)(batch(failed, group("b", member("b0", {}))))
    assert found.dropped == {0: "UNSCORED", 2: "UNSCORED"}
    assert found.metrics == {"brief_groups": 1, "brief_accuracy_min": 1.0, "accuracy_mean": 1.0}
