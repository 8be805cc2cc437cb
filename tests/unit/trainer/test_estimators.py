"""GRPO, Dr. GRPO and GDPO against hand-computed numbers; which rewards and members count."""

from typing import Any

import pytest
from msgspec.structs import replace

from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import (
    GroupContext,
    MemberOutcome,
    Outcome,
    Reward,
    SampleSummary,
    TrainingSample,
)
from rollmesh.shared.errors import ConfigError
from rollmesh.trainer.estimators import Estimator, make_estimator
from rollmesh.trainer.estimators.base import filled
from rollmesh.trainer.estimators.returns import token_rewards

from .builders import action, batch_of, group, member, prompt, training_sample

CENTERED: dict[str, dict[str, Any]] = {"grpo": {"std": "none"}, "gdpo": {"scale_by_std": False}}
"""Options with which an estimator only centers."""


def sample(sample_id: str, of: str = "g") -> TrainingSample:
    return training_sample(sample_id, [prompt([20]), action([21, 22], [-1, -1])], of=of)


def estimator(name: str = "grpo", weights: dict[str, float] | None = None, **options: Any) -> Estimator:
    return make_estimator(Extension(name, options), weights)


def scalars(made: Estimator, groups: list[GroupContext], ids: list[str], of: str = "g") -> list[float | None]:
    batch = batch_of([sample(i, of) for i in ids], groups)
    found = made(batch)
    return [None if n in found.dropped else float(a) for n, a in enumerate(batch.first(found.advantages))]


def two_rewards(*pairs: tuple[float, float], name: str = "g") -> GroupContext:
    return group(name, *(member(f"{name}{i}", {"a": x, "b": y}) for i, (x, y) in enumerate(pairs)))


def test_grpo_equals_the_hand_computed_value() -> None:
    # rewards 1, 0, 0, 0: mean 0.25, std sqrt(3)/4 = 0.4330 -> 1.7321 and -0.5774
    members = [member(f"s{i}", {"correct": float(i == 0)}) for i in range(4)]
    found = scalars(estimator(), [group("g", *members)], ["s0", "s1", "s2", "s3"])
    assert found == pytest.approx([1.7321, -0.5774, -0.5774, -0.5774], abs=1e-4)


def test_dr_grpo_only_centers() -> None:
    members = [member(f"s{i}", {"correct": float(i == 0)}) for i in range(4)]
    found = scalars(estimator(std="none"), [group("g", *members)], ["s0", "s3"])
    assert found == pytest.approx([0.75, -0.25])


def test_a_baseline_counts_episodes_and_not_their_samples() -> None:
    """Three samples are of a correct episode and one of a wrong one. The mean over episodes is 0.5, over samples
    0.75."""
    right = [member(f"s{i}", {"r": 1.0}, episode="e0") for i in range(3)]
    context = group("g", *right, member("s3", {"r": 0.0}, episode="e1"))
    ids = ["s0", "s1", "s2", "s3"]
    found = scalars(estimator(std="none"), [context], ids)
    assert found == pytest.approx([0.5, 0.5, 0.5, -0.5])
    for name in ("grpo", "gdpo"):
        assert scalars(estimator(name), [context], ids) == pytest.approx([1, 1, 1, -1], abs=1e-4)


def test_samples_of_one_episode_may_differ() -> None:
    members = [member("s0", {"r": 1.0}, episode="e0"), member("s1", {"r": 0.0}, episode="e0")]
    context = group("g", *members, member("s2", {"r": 0.0}, episode="e1"))
    found = scalars(estimator(std="none"), [context], ["s0", "s1", "s2"])
    assert found == pytest.approx([0.75, -0.25, -0.25])  # means of the episodes: 0.5 and 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["grpo", "gdpo"])
def test_a_reward_that_is_not_finite_is_a_failure_of_its_member_alone(name: str, value: float) -> None:
    context = group("g", member("s0", {"r": 1.0}), member("s1", {"r": value}), member("s2", {"r": 0.0}))
    found = scalars(estimator(name, **CENTERED[name]), [context], ["s0", "s1", "s2"])
    assert found == [pytest.approx(0.5), None, pytest.approx(-0.5)]


def test_grpo_uses_untrained_members_for_the_baseline() -> None:
    context = group(
        "g", member("s0", {"r": 1.0}), member("s1", {"r": 0.0}, end="stale"), member("s2", {"r": 0.0}, end="filtered")
    )
    found = scalars(estimator(std="none"), [context], ["s0"])
    assert found == pytest.approx([2 / 3])


def test_infrastructure_failures_are_neither_averaged_in_nor_trained_on() -> None:
    failed = member("s2", {"r": 0.0}, outcome=Outcome.INFRA_FAILURE)
    context = group("g", member("s0", {"r": 1.0}), member("s1", {"r": 0.0}), failed, member("s3", {}))
    for name in ("grpo", "gdpo"):
        found = scalars(estimator(name, **CENTERED[name]), [context], ["s0", "s1", "s2", "s3"])
        assert found == [pytest.approx(0.5), pytest.approx(-0.5), None, None]


def test_one_failed_reward_makes_the_whole_member_unusable() -> None:
    rewards = (Reward(name="a", value=1.0), Reward(name="b", value=0.0, outcome=Outcome.INFRA_FAILURE))
    context = group(
        "g", member("s0", {"a": 1.0, "b": 1.0}), MemberOutcome(sample_id="s1", rewards=rewards, end="ready")
    )
    assert scalars(estimator(), [context], ["s1"]) == [None]


def test_a_reward_that_is_not_applicable_enters_no_mean_and_no_deviation() -> None:
    """b has the mean 3 over s0 and s1: their sums are 0 + 1 - 3 = -2 and 1 + 5 - 3 = 3, that of s2 is 1 (a alone), so
    that the mean is 2/3. The variance is 2/9 of a, 4 of b over s0 and s1, and twice the covariance 2/3."""
    rewards = (Reward(name="a", value=1.0), Reward(name="b", value=9.0, outcome=Outcome.NOT_APPLICABLE))
    context = group(
        "g",
        member("s0", {"a": 0.0, "b": 1.0}),
        member("s1", {"a": 1.0, "b": 5.0}),
        MemberOutcome(sample_id="s2", rewards=rewards, end="ready"),
    )
    ids = ["s0", "s1", "s2"]
    assert scalars(estimator(std="none"), [context], ids) == pytest.approx([-8 / 3, 7 / 3, 1 / 3])
    by_hand = [value / 3 / (50 / 9) ** 0.5 for value in (-8, 7, 1)]
    assert scalars(estimator(std="group"), [context], ids) == pytest.approx(by_hand, rel=1e-4)


STYLED = group(
    "g",
    *(
        member(f"s{n}", {"correct": 1.0} if style is None else {"correct": 1.0, "style": style})
        for n, style in enumerate((1.0, 0.0, None, None))
    ),
)
"""`style` is 1, 0, and not applicable to two members, which agree with the others in the other reward."""


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("grpo", {}, [1, -1, 0, 0]),
        ("gdpo", {}, [1, -1, 0, 0]),
        ("vcpo", {"scale_by_std": True}, [1, -1, 0, 0]),
        ("roles", {"scope": "group"}, [1, -1, 0, 0]),
        ("grpo", {"std": "none"}, [0.5, -0.5, 0, 0]),
        ("v05", {}, [0.5, -0.5, 0, 0]),
        ("pf_ppo", {"std": "none", "truth": "other"}, [0.5, -0.5, 0, 0]),
        ("g_ra", {"std": "none", "gated": ["style"]}, [0.5, -0.5, 0, 0]),
        ("g_ra", {"std": "none", "gate": "style"}, [0.5, -0.5, 0, 0]),
        ("trloo", {}, [2 / 3, -2 / 3, 0, 0]),
        ("hgpo", {"scale_by_std": False}, [0.5, -0.5, 0, 0]),
    ],
)
def test_members_that_a_reward_does_not_apply_to_change_nothing_for_the_others(
    name: str, options: dict[str, Any], expected: list[float]
) -> None:
    found = estimator(name, **options).of_group(STYLED)
    assert list(found.values()) == pytest.approx(expected, abs=1e-5)


def test_a_deviation_of_two_rewards_of_which_one_applies_to_half_of_the_members() -> None:
    """The variance of `correct`, 1, 0, 1, 0, is 1/4. `style`, 1, 0, adds 1/4 over two members, and twice the covariance
    1/8 over four."""
    members = [
        member(f"s{n}", {"correct": c, **s})
        for n, (c, s) in enumerate(zip((1, 0, 1, 0), ({"style": 1.0}, {"style": 0.0}, {}, {}), strict=True))
    ]
    found = estimator("grpo").of_group(group("g", *members))
    assert list(found.values()) == pytest.approx([x / 0.75**0.5 for x in (1, -1, 0.5, -0.5)], abs=1e-5)


def test_estimators_per_token_read_rewards_that_are_filled_in() -> None:
    ids = [f"s{n}" for n in range(4)]
    batch = batch_of([sample(name) for name in ids], [STYLED])
    rewards, dropped = token_rewards(batch, {})
    assert batch.sums(rewards).tolist() == [2.0, 1.0, 1.5, 1.5]
    assert not dropped
    greedy = replace(STYLED.members[1], summary=SampleSummary(greedy=True))
    remax = make_estimator("remax").of_group(replace(STYLED, members=(STYLED.members[0], greedy, *STYLED.members[2:])))
    assert list(remax.values()) == [1.0, 0.0, 0.0, 0.0]
    failed = group("g", *STYLED.members, member("x", {"style": 9.0}, outcome=Outcome.INFRA_FAILURE))
    assert filled(failed).members[-1] is failed.members[-1]
    assert filled(failed).members[:-1] == filled(STYLED).members


def test_segment_rewards_do_not_enter_the_sample_sum() -> None:
    rewards = (Reward(name="a", value=1.0), Reward(name="a", value=50.0, segment=1))
    context = group("g", MemberOutcome(sample_id="s0", rewards=rewards, end="ready"), member("s1", {"a": 0.0}))
    assert scalars(estimator(std="none"), [context], ["s0"]) == pytest.approx([0.5])


def test_weights_select_and_scale_rewards() -> None:
    context = two_rewards((1, 0), (0, 1))
    found = scalars(estimator(weights={"a": 2.0}, std="none"), [context], ["g0", "g1"])
    assert found == pytest.approx([1.0, -1.0])


def test_a_group_that_agrees_has_no_advantage() -> None:
    for name in ("grpo", "gdpo"):
        found = scalars(estimator(name), [two_rewards((1, 1), (1, 1))], ["g0", "g1"])
        assert found == pytest.approx([0.0, 0.0], abs=1e-9)


@pytest.mark.row("S015")
def test_gdpo_before_whitening_equals_the_published_example() -> None:
    found = estimator("gdpo").of_group(two_rewards((1, 0), (0, 1), (0, 1), (0, 0)))
    assert found["g0"] == pytest.approx(0.732, abs=1e-3)
    assert found["g1"] == pytest.approx(0.423, abs=1e-3)
    grpo = scalars(estimator(), [two_rewards((1, 0), (0, 1), (0, 1), (0, 0))], ["g0", "g1"])
    assert grpo[0] == pytest.approx(grpo[1])


@pytest.mark.row("S015")
def test_gdpo_tells_groups_apart_that_grpo_on_the_sum_cannot() -> None:
    one, both = two_rewards((0, 0), (1, 0)), two_rewards((0, 0), (1, 1))
    gdpo = estimator("gdpo")
    assert list(gdpo.of_group(one).values()) == pytest.approx([-1, 1], abs=1e-4)
    assert list(gdpo.of_group(both).values()) == pytest.approx([-2, 2], abs=1e-4)
    for context in (one, both):
        assert scalars(estimator(), [context], ["g0", "g1"]) == pytest.approx([-1, 1], abs=1e-4)


@pytest.mark.row("S015")
def test_gdpo_with_weight_zero_equals_gdpo_without_that_reward() -> None:
    pairs = ((1.0, 3.0), (0.0, 7.0), (0.0, 1.0))
    without = group("g", *(member(f"g{i}", {"a": a}) for i, (a, _) in enumerate(pairs)))
    ids = ["g0", "g1", "g2"]
    weighted = scalars(estimator("gdpo", weights={"a": 1.0, "b": 0.0}), [two_rewards(*pairs)], ids)
    assert weighted == scalars(estimator("gdpo", weights={"a": 1.0}), [without], ids)


def test_gdpo_whitens_over_the_whole_batch() -> None:
    # before whitening: -1, 1 and -2, 2 -> mean 0, std sqrt(10/4) = 1.5811
    groups = [two_rewards((0, 0), (1, 0), name="x"), two_rewards((0, 0), (1, 1), name="y")]
    found = estimator("gdpo")(batch_of([sample("x1", "x"), sample("y1", "y")], groups))
    assert found.advantages[::2].tolist() == pytest.approx([0.6325, 1.2649], abs=1e-4)


def test_gdpo_keeps_a_small_weight_small_where_grpo_blows_it_up() -> None:
    settled = group("g", member("g0", {"correct": 1.0, "short": 0.0}), member("g1", {"correct": 1.0, "short": 1.0}))
    weights = {"correct": 1.0, "short": 0.1}
    grpo = scalars(estimator(weights=weights), [settled], ["g1"])
    assert grpo == pytest.approx([1.0], abs=1e-4)
    gdpo = estimator("gdpo", weights=weights).of_group(settled)
    assert gdpo["g1"] == pytest.approx(0.1, abs=1e-5)


def test_every_trained_token_has_the_advantage_of_its_sample() -> None:
    groups = [group("g", member("s0", {"r": 1.0}), member("s1", {"r": 0.0}))]
    assert estimator()(batch_of([sample("s1"), sample("s0")], groups)).advantages.tolist() == pytest.approx(
        [-1, -1, 1, 1], abs=1e-4
    )


def test_missing_context_and_unknown_names_are_rejected() -> None:
    with pytest.raises(ValueError, match="context is missing"):
        batch_of([sample("s0")], [])
    with pytest.raises(ValueError, match="does not list sample s0"):
        batch_of([sample("s0")], [group("g", member("s1", {"r": 1.0}))])
    with pytest.raises(ConfigError, match="there is no estimator `gea`; known: grpo, gdpo, .*did you mean `gae`"):
        estimator("gea")
    with pytest.raises(ConfigError, match=r"options of estimator `grpo`: .*`epsilon` must be > 0"):
        estimator(epsilon=0)
    with pytest.raises(ConfigError, match=r"`weights`: unknown key"):
        make_estimator(Extension("gdpo", {"weights": {"a": 1}}))
