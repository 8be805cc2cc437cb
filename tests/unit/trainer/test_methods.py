"""Estimators and update rules of published methods, against values by hand. Their memory passes through a
checkpoint."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import GroupContext, TrainingSample
from rollmesh.shared.errors import ConfigError
from rollmesh.trainer.batch import UpdateBatch
from rollmesh.trainer.estimators import Estimate, Estimator, make_estimator
from rollmesh.trainer.estimators.base import ESTIMATORS, UNDECIDED
from rollmesh.trainer.update_rules import UPDATE_RULES, OptimizerStep, UpdateRule

from .builders import action, batch_of, group, member, prompt, training_sample


def sample(sample_id: str, of: str, logprobs: Sequence[float] = (-1.0, -1.0)) -> TrainingSample:
    return training_sample(sample_id, [prompt([20]), action([21] * len(logprobs), logprobs)], of=of)


def estimator(name: str, weights: Mapping[str, float] | None = None, **options: Any) -> Estimator:
    return make_estimator(Extension(name, options), weights)


def rewarded(name: str, *rewards: float) -> GroupContext:
    """Return a group with one member per reward, called g0, g1, ... for the group g."""
    return group(name, *(member(f"{name}{i}", {"r": r}) for i, r in enumerate(rewards)))


def batch(*groups: GroupContext, update: int = 1) -> UpdateBatch:
    """Return a batch of all members, each with two tokens."""
    return batch_of([sample(m.sample_id, g.group) for g in groups for m in g.members], groups, update=update)


def scalars(made: Estimator, of: UpdateBatch) -> list[float]:
    return per_sample(made(of), of)


def per_sample(found: Estimate, of: UpdateBatch) -> list[float]:
    advantages = of.first(found.advantages)
    assert np.array_equal(found.advantages, of.per_token(advantages)), "one advantage per sample"
    return [float(a) for a in advantages]


# Lite PPO -------------------------------------------------------------------------------------------------------------


@pytest.mark.row("S017")
def test_lite_ppo_divides_by_the_deviation_of_the_batch() -> None:
    # rewards 1, 0 and 0.5, 0.4; over the batch: mean 0.475, variance (0.2756 + 0.2256 + 0.0006 + 0.0056) / 4 = 0.126875
    made, of = estimator("grpo", std="batch"), batch(rewarded("a", 1.0, 0.0), rewarded("b", 0.5, 0.4))
    std = 0.126875**0.5
    assert scalars(made, of) == pytest.approx([0.5 / std, -0.5 / std, 0.05 / std, -0.05 / std], rel=1e-5)
    assert scalars(estimator("grpo"), of)[2] == pytest.approx(1.0, abs=1e-4), (
        "std: group makes it as large as the others"
    )
    assert made.of_group(of.groups[1]) == pytest.approx({"b0": 0.05, "b1": -0.05})


@pytest.mark.row("S017")
@pytest.mark.parametrize(
    ("mean", "std", "expected"),
    [
        ("group", "none", [0.5, -0.5, 0.25, -0.25]),
        ("batch", "none", [0.625, -0.375, 0.125, -0.375]),
        ("none", "none", [1.0, 0.0, 0.5, 0.0]),
        ("batch", "group", [1.25, -0.75, 0.5, -1.5]),
        ("none", "group", [2.0, 0.0, 2.0, 0.0]),
        ("none", "batch", [1.0 / 0.41458, 0.0, 0.5 / 0.41458, 0.0]),
    ],
)
def test_mean_and_deviation_have_their_own_scope(mean: str, std: str, expected: list[float]) -> None:
    # means 0.5 and 0.25, of the batch 0.375; deviations 0.5 and 0.25, of the batch sqrt(0.171875) = 0.41458
    of = batch(rewarded("a", 1.0, 0.0), rewarded("b", 0.5, 0.0))
    assert scalars(estimator("grpo", mean=mean, std=std), of) == pytest.approx(expected, rel=1e-4)


def test_the_scope_batch_without_groups_is_an_empty_estimate() -> None:
    of = batch(rewarded("a", 1.0))
    assert scalars(estimator("grpo", std="batch"), of) == [0.0]
    assert estimator("grpo", mean="batch").of_group(of.groups[0]) == {"a0": UNDECIDED}


# MC-GRPO --------------------------------------------------------------------------------------------------------------


@pytest.mark.row("S016")
def test_mc_grpo_drops_its_pivot_and_only_centers_if_most_rewards_agree() -> None:
    of = batch(rewarded("a", 0.0, 0.0, 1.0))
    found = estimator("mc_grpo")(of)
    assert per_sample(found, of) == [0.0, 0.0, 1.0]  # the MAD is 0
    assert found.dropped == {0: "PIVOT"}
    assert found.metrics == {"pivots": 1}
    scaled = scalars(estimator("mc_grpo", zero_mad="scale", advantage_max=50.0), of)
    assert scaled == [0.0, 0.0, 50.0]  # 1 / 0.001, limited


def test_mc_grpo_scales_by_the_median_absolute_deviation() -> None:
    # median 0.4; deviations 0.4, 0.3, 0, 0.2, 0.6 with median 0.3
    of = batch(rewarded("a", 0.0, 0.1, 0.4, 0.6, 1.0))
    found = estimator("mc_grpo")(of)
    assert per_sample(found, of) == pytest.approx([v / 0.301 for v in (-0.4, -0.3, 0.0, 0.2, 0.6)], rel=1e-5)
    assert found.dropped == {2: "PIVOT"}


@pytest.mark.row("S016")
def test_mc_grpo_trains_all_but_one_episode_of_every_group() -> None:
    rng = np.random.default_rng(0)
    of = batch(*(rewarded(f"g{n}", *rng.integers(0, 3, 5).tolist()) for n in range(20)))
    dropped = estimator("mc_grpo")(of).dropped
    assert np.bincount([n // 5 for n in dropped], minlength=20).tolist() == [1] * 20


@pytest.mark.row("S016")
def test_the_median_gives_a_wrong_sign_less_often_than_the_mean() -> None:
    """Groups of three from a skewed distribution: one in ten rewards is an outlier of 10, the others are 0 or 1; the
    mean is 1.45."""
    rng = np.random.default_rng(1)
    wrong = {"mc_grpo": 0, "grpo": 0}
    for n in range(300):
        rewards = np.where(rng.random(3) < 0.1, 10.0, rng.integers(0, 2, 3)).tolist()
        for name in wrong:
            made = estimator("grpo", std="none") if name == "grpo" else estimator(name)
            found = made.of_group(rewarded(f"g{n}", *rewards))
            typical = [a for a, r in zip(found.values(), rewards, strict=True) if r == 1.0]
            wrong[name] += sum(a < 0 for a in typical)  # 1 is the better of the two usual rewards
    assert 0 < wrong["mc_grpo"] < 0.5 * wrong["grpo"]


def test_mc_grpo_takes_the_median_of_episodes() -> None:
    members = [member("s0", {"r": 0.0}, episode="e0"), member("s1", {"r": 1.0}, episode="e0")]
    context = group("g", *members, member("s2", {"r": 0.0}, episode="e1"), member("s3", {"r": 4.0}, episode="e2"))
    # episodes 0.5, 0, 4: median 0.5, deviations 0, 0.5, 3.5 with median 0.5
    assert estimator("mc_grpo").of_group(context) == pytest.approx(
        {"s0": -0.5 / 0.501, "s1": 0.5 / 0.501, "s2": -0.5 / 0.501, "s3": 3.5 / 0.501}
    )
    assert estimator("mc_grpo").of_group(group("none")) == {}


# RiskPO ---------------------------------------------------------------------------------------------------------------


README: dict[str, Any] = {"shift": True, "credit": "uniform", "scale_by_std": False}
"""The formula without sharing."""


@pytest.mark.row("S024")
def test_risk_po_equals_the_hand_computed_value() -> None:
    # two groups per bundle; outcomes 2, 1, 1, 0; their quantiles at 0.25 and 0.75 are 0.75 and 1.25
    settings: dict[str, Any] = {"bundle_groups": 2, "low": 0.25, "high": 0.75, "quantiles": "batch"}
    made = estimator("risk_po", **settings, **README)
    of = batch(rewarded("a", 1.0, 1.0, 0.0, 0.0), rewarded("b", 1.0, 0.0, 1.0, 0.0))
    # s = 1: A_RVaR = (0.25 - 0.5) / 0.5, A_CVaR = 0; s = 0: A_RVaR = -0.5 / 0.5, A_CVaR = -0.75 / 0.25
    one, none = -0.5 / 2.5, (1.5 * -3.0 - 1.0) / 2.5
    found = made(of)
    assert per_sample(found, of) == pytest.approx([0.0, one, one, none] * 2)
    assert found.metrics == {"quantile_low": 0.75, "quantile_high": 1.25, "outcome_mean": 1.0}
    std = 0.5**0.5
    scaled = estimator("risk_po", **settings, **(README | {"scale_by_std": True}))
    assert scalars(scaled, of) == pytest.approx([0.0, one / std, one / std, none / std] * 2)
    # by default without the shift of -0.5 / 0.5 and shared: s = 2: 1 / 2.5, s = 1: 0.5 / 2.5, s = 0: -4.5 / 2.5;
    # R - m is 0.5, 0.5 for s = 2, 0.5, -0.5 for s = 1, whose sum is 0, and -0.5, -0.5 for s = 0, so all shares are 1/2
    shared = [v / 2 / std for v in (0.4, 0.2, 0.2, -1.8)] * 2
    assert scalars(estimator("risk_po", **settings), of) == pytest.approx(shared)


def test_risk_po_shares_the_advantage_of_an_outcome_by_its_credit() -> None:
    """The rewards are 1, 0.4 and 0, 0 with the means 0.7 and 0; the outcomes 1 and 0.4 have the quantiles 0.55 and
    0.85, so the advantages are 0.3 / 0.5 / 2.5 = 0.24 and -1.5 * 0.15 / 0.25 / 2.5 = -0.36."""
    of = batch(rewarded("a", 1.0, 0.4), rewarded("b", 0.0, 0.0))
    expected = {
        "uniform": [0.24, -0.36, 0.24, -0.36],
        "score": [0.12, -0.18, 0.36, -0.54],
        "std": [0.8, -1.2, 0.24, -0.36],
        "sum_mean": [0.24, -0.36, 0.0, 0.0],
    }
    settings: dict[str, Any] = {"bundle_groups": 2, "low": 0.25, "high": 0.75, "scale_by_std": False}
    for credit, values in expected.items():
        found = scalars(estimator("risk_po", quantiles="batch", credit=credit, **settings), of)
        assert found == pytest.approx(values), credit
    alone = scalars(estimator("risk_po", bundle_groups=5), batch(rewarded("a", 1.0)))
    assert alone == [0.0], "one outcome, which is both quantiles"


@pytest.mark.row("S024")
def test_risk_po_decays_entropy_more_slowly_than_the_mean_objective() -> None:
    """A policy with 6 answers, of which one is right: after equally many exact steps the mean objective has less
    entropy."""

    def entropy_after(name: str, **options: Any) -> float:
        rng, logits = np.random.default_rng(0), np.array([1.5, 0, 0, 0, 0, 0])
        made = estimator(name, **options)
        for update in range(1, 41):
            chances = np.exp(logits) / np.exp(logits).sum()
            drawn = rng.choice(6, p=chances, size=(2, 8))
            of = batch(
                *(rewarded(f"g{n}", *(row == 0).astype(float).tolist()) for n, row in enumerate(drawn)), update=update
            )
            for answer, advantage in zip(drawn.ravel(), scalars(made, of), strict=True):
                logits = logits + 0.02 * advantage * ((np.arange(6) == answer) - chances)
        return float(-(chances * np.log(chances)).sum())

    assert entropy_after("risk_po", bundle_groups=2) > entropy_after("grpo") + 0.3


def test_risk_po_tracks_quantiles_and_uses_those_before_the_batch() -> None:
    made = estimator("risk_po", bundle_groups=1, low=0.25, high=0.75, quantile_lr=0.1)
    first = batch(rewarded("a", 0.0, 1.0, 2.0, 3.0))
    found = made(first)
    assert (found.metrics["quantile_low"], found.metrics["quantile_high"]) == (0.75, 2.25)  # of the batch
    # below them: 1/4 and 3/4, so they stay
    second = batch(rewarded("b", 0.0, 0.0, 0.0, 1.0), update=2)
    assert made(second).metrics["quantile_low"] == 0.75
    moved = [0.75 + 0.1 * (0.25 - 0.75), 2.25 + 0.1 * (0.75 - 1.0)]
    third = made(batch(rewarded("c", 0.0), update=3)).metrics
    assert [third["quantile_low"], third["quantile_high"]] == pytest.approx(moved)


@pytest.mark.row("S024")
def test_tracked_quantiles_converge_to_those_of_the_distribution() -> None:
    made, rng = estimator("risk_po", bundle_groups=1, quantile_lr=0.05), np.random.default_rng(3)
    for update in range(1, 301):
        found = made(batch(rewarded("g", *rng.uniform(0, 1, 32).tolist()), update=update))
    assert found.metrics["quantile_low"] == pytest.approx(0.2, abs=0.05)
    assert found.metrics["quantile_high"] == pytest.approx(0.8, abs=0.05)


def test_a_refreshed_batch_counts_once() -> None:
    made = estimator("risk_po", bundle_groups=1)
    of = batch(rewarded("a", 0.0, 1.0, 2.0, 3.0))
    again = UpdateBatch(update=1, samples=of.samples, groups=of.groups, table=of.table, repeat=1)
    one, state = made(of), made.state()
    assert np.array_equal(made(again).advantages, one.advantages)
    assert made.state() == state


def test_risk_po_bundles_what_has_a_partner() -> None:
    failed = group("b", member("b0", {"r": 1.0}), member("b1", {}))
    made = estimator("risk_po", bundle_groups=2, quantiles="batch")
    of = batch(rewarded("a", 1.0, 0.0, 1.0), failed, rewarded("c", 1.0))
    found = made(of)
    assert found.dropped == {1: "UNBUNDLED", 2: "UNBUNDLED", 4: "UNSCORED"}
    assert found.metrics["outcome_mean"] == 2.0  # the bundle of c alone is scaled to two groups
    assert made.of_group(failed) == {"b0": UNDECIDED}


def test_levels_must_be_in_order() -> None:
    with pytest.raises(ConfigError, match="`low` must be < high = 0.2, got 0.8"):
        estimator("risk_po", low=0.8, high=0.2)


# MSSR -----------------------------------------------------------------------------------------------------------------


def with_columns(of: UpdateBatch, **columns: Sequence[float]) -> UpdateBatch:
    of.table.columns.update({name: np.array(values, np.float32) for name, values in columns.items()})
    return of


@pytest.mark.row("S019")
def test_mssr_equals_the_hand_computed_value() -> None:
    """Probabilities of the tokens 1/2, 1 and 1/4, 1/2: -p log p is 0.347, 0, 0.347, 0.347. One rollout per prompt."""
    made = estimator("mssr", first_visit="train", epsilon=1e-9)
    logprobs = np.log([0.5, 1.0, 0.25, 0.5]).tolist()
    first = with_columns(batch(rewarded("a", 1.0), rewarded("b", 0.0)), proximal=logprobs)
    found = made(first)
    # R - 0.5 = +-0.5, normalized +-1; the shaping is min(0.4 H, 1 / 2)
    shaping = 0.4 * 0.5 * np.log(2)
    assert found.advantages.tolist() == pytest.approx([1 + shaping, 1.0, -1 + shaping, -1 + shaping])
    assert found.metrics == {"rho": 0.96, "value_mean": 0.5, "prompts": 2, "first_visit_share": 0.0}
    assert made.of_group(first.groups[0]) == {"a0": UNDECIDED}
    vocabulary = estimator("mssr", first_visit="train", epsilon=1e-9, entropy="vocabulary")
    assert (vocabulary.needs, made.needs) == (("start_entropy",), ("proximal",))
    with_columns(first, start_entropy=[1.0, 5.0, 0.5, 5.0])
    assert vocabulary(first).advantages.tolist() == pytest.approx([1.4, 1.5, -0.8, -0.5])
    # a = 0.96 * 4 + 1, b = 0.96 * 4, and the other way round; normalized they are +-1 again
    up, down = 4.84 / 8.68, 3.84 / 8.68
    second = estimator("mssr", entropy_weight=0.0)
    second.load_state(made.state())
    of = batch(rewarded("a", 1.0), rewarded("b", 1.0), update=2)
    raw = np.array([1 - up, 1 - down])
    expected = (raw - raw.mean()) / raw.std()
    assert scalars(second, of) == pytest.approx(expected.tolist(), rel=1e-4)


def test_the_first_visit_of_a_prompt_sets_its_pass_rate_and_is_not_trained() -> None:
    made = estimator("mssr", entropy_weight=0.0, epsilon=1e-9)
    of = batch(rewarded("a", 1.0, 0.0), rewarded("b", 1.0), group("c", member("c0", {})))
    found = made(of)
    assert found.dropped == {0: "FIRST_VISIT", 1: "FIRST_VISIT", 2: "FIRST_VISIT", 3: "UNSCORED"}
    assert found.metrics["first_visit_share"] == 1.0
    again = UpdateBatch(update=1, samples=of.samples, groups=of.groups, table=of.table, repeat=1)
    assert made(again).dropped == found.dropped
    assert made.state()["beta"] == {"task-of-a": [4.0, 4.0], "task-of-b": [8.0, 0.0]}, "N0 = 8"
    # second visits: A = 1 - 0.5 and 0 - 1, normalized; c is visited for the first time
    second = batch(rewarded("a", 1.0), rewarded("b", 0.0), rewarded("c", 0.0), update=2)
    found = made(second)
    assert found.advantages.tolist() == pytest.approx([1, 1, -1, -1, 0, 0])
    assert found.dropped == {2: "FIRST_VISIT"}
    assert made.state()["beta"] == {
        "task-of-a": pytest.approx([0.96 * 4 + 1, 0.96 * 4]),
        "task-of-b": pytest.approx([0.96 * 8, 1.0]),
        "task-of-c": [0.0, 8.0],
    }


@pytest.mark.row("S019")
def test_the_shaping_never_changes_a_sign() -> None:
    rng = np.random.default_rng(0)
    of = batch(*(rewarded(f"g{n}", *rng.integers(0, 2, 2).tolist()) for n in range(8)))
    with_columns(of, start_entropy=rng.uniform(0, 5, 32).tolist())
    settings: dict[str, Any] = {"first_visit": "train", "entropy": "vocabulary"}
    plain, shaped = (estimator("mssr", entropy_weight=w, **settings)(of).advantages for w in (0.0, 0.4))
    assert (np.sign(shaped) == np.sign(plain)).all()
    assert (shaped >= plain).all()
    assert not np.array_equal(shaped, plain)


@pytest.mark.row("S019")
def test_the_pass_rate_converges_and_follows_a_change() -> None:
    made = estimator("mssr", rho_min=0.9, rho_max=0.9, entropy_weight=0.0)
    rng = np.random.default_rng(2)
    seen = []
    for update in range(1, 401):
        rate = 0.8 if update <= 200 else 0.2
        made(batch(rewarded("g", float(rng.random() < rate)), update=update))
        seen.append(made.value("task-of-g"))  # type: ignore[attr-defined]
    assert np.mean(seen[100:200]) == pytest.approx(0.8, abs=0.05)
    assert np.mean(seen[230:400]) == pytest.approx(0.2, abs=0.05), "30 visits are three times 1 / (1 - rho)"
    assert seen[199] > 0.5 > seen[215]


@pytest.mark.parametrize(("kl", "rho"), [(None, 0.96), (0.0, 0.96), (0.006, 2**-0.1), (0.06, 0.875), (-0.1, 0.96)])
def test_rho_falls_with_the_drift_of_the_last_update(kl: float | None, rho: float) -> None:
    assert estimator("mssr").rho(kl) == pytest.approx(rho)  # type: ignore[attr-defined]


def test_a_lone_sample_is_not_normalized_and_a_failed_one_is_not_a_visit() -> None:
    made = estimator("mssr", entropy_weight=0.0, first_visit="train")
    assert scalars(made, batch(rewarded("a", 1.0))) == [0.5]
    failed = made(batch(group("b", member("b0", {}))))
    assert failed.dropped == {0: "UNSCORED"}
    assert failed.metrics["prompts"] == 1


# ACE ------------------------------------------------------------------------------------------------------------------


@pytest.mark.row("S029")
def test_ace_equals_the_hand_computed_value() -> None:
    of = batch(rewarded("a", 1.0, 0.0, 0.0, 0.0))
    # shifts 1, 2, -3 and -40 (limited to -20), two tokens each
    with_columns(of, proximal=[-1] * 8, reference=[-1.5, -1.5, -2, -2, 0.5, 0.5, 19, 19])
    base, found = estimator("grpo")(of), estimator("ace")(of)
    one, wrong = (float(base.advantages[n]) for n in (0, 2))
    factors = [1 + np.log1p(np.exp(c)) for c in (2.0, -3.0, -20.0)]
    assert found.advantages[:2].tolist() == [one, one], "positive advantages are those of grpo, bit for bit"
    assert per_sample(found, of)[1:] == pytest.approx([wrong * f for f in factors], rel=1e-6)
    assert per_sample(found, of)[3] == pytest.approx(wrong), "an error that is corrected keeps its penalty"
    assert found.metrics["factor_mean"] == pytest.approx(np.mean(factors))


def test_the_options_of_ace() -> None:
    of = batch(rewarded("a", 1.0, 0.0))
    with_columns(of, proximal=[-1] * 4, reference=[-1, -1, -2, -3])
    assert scalars(estimator("ace", modulation="relu", strength=0.5, std="none"), of) == [0.5, -0.5 * (1 + 0.5 * 3)]
    assert scalars(estimator("ace", modulation="relu", shift="mean", std="none"), of) == [0.5, -0.5 * (1 + 1.5)]


# VCPO -----------------------------------------------------------------------------------------------------------------


@pytest.mark.row("S028")
def test_vcpo_equals_the_hand_computed_value() -> None:
    # behavior -1 per token; w = 2 and 1, g^2 = 1 and 3: b = 4 * 1 / (4 * 1 + 1 * 3) = 4 / 7; std 0.5
    of = batch(rewarded("a", 1.0, 0.0))
    half = np.log(2) / 2
    with_columns(of, proximal=[-1 + half, -1 + half, -1, -1], gradient_square=[1, 1, 3, 3])
    found = estimator("vcpo")(of)
    assert per_sample(found, of) == pytest.approx([6 / 7, -8 / 7], rel=1e-4)
    assert found.metrics["sequence_ess"] == pytest.approx(9 / 10)
    # without importance: b = 1 / 4
    assert scalars(estimator("vcpo", importance=False, scale_by_std=False), of) == pytest.approx([0.75, -0.25])


@pytest.mark.row("S028")
def test_vcpo_with_equal_weights_is_grpo() -> None:
    of = batch(rewarded("a", 1.0, 0.0, 0.0, 0.5), rewarded("b", 1.0, 1.0))
    with_columns(of, proximal=[-1] * 12, gradient_square=[2] * 12)
    found = estimator("vcpo")(of)
    assert np.allclose(found.advantages, estimator("grpo")(of).advantages)
    assert found.metrics["sequence_ess"] == 1.0
    assert estimator("vcpo").of_group(of.groups[0]) == pytest.approx(estimator("grpo").of_group(of.groups[0]))
    with_columns(of, gradient_square=[0] * 12)
    assert np.allclose(estimator("vcpo")(of).advantages, found.advantages), "without gradients it is the mean"


@pytest.mark.row("S028")
def test_the_reported_sample_size_falls_as_staleness_rises() -> None:
    """The policy moves by a random step per update, so that log-probs of a batch of lag n are n steps away."""
    rng, found = np.random.default_rng(0), []
    of = batch(*(rewarded(f"g{n}", 0.0, 1.0) for n in range(32)))
    with_columns(of, gradient_square=[1] * 128)
    for lag in (0, 1, 4, 16):
        drift = np.repeat(rng.normal(0.0, 0.1 * lag**0.5, 64), 2)
        with_columns(of, proximal=(-1 + drift).tolist())
        found.append(estimator("vcpo")(of).metrics["sequence_ess"])
    assert found[0] == pytest.approx(1.0)
    assert found == sorted(found, reverse=True)
    assert found[-1] < 0.8


@pytest.mark.row("S028")
def test_the_learning_rate_follows_the_effective_sample_size() -> None:
    of = batch(rewarded("a", *[0.0, 1.0] * 4))
    with_columns(of, proximal=[-1] * 16)
    assert [s.lr_factor for s in steps("ess_minibatches", of, num_minibatches=2)] == [1.0, 1.0]
    with_columns(of, proximal=[9.0] * 2 + [-9.0] * 14)  # w = exp(20) and exp(-16)
    (step,) = steps("ess_minibatches", of, num_minibatches=1)
    assert step.lr_factor == pytest.approx(8**-0.5)
    (step,) = steps("ess_minibatches", of, num_minibatches=1, power=1.0)
    assert step.lr_factor == pytest.approx(1 / 8)
    refreshed = steps("ess_minibatches", of, num_minibatches=2, refresh=True)
    assert [(bool(s.samples), s.refresh) for s in refreshed] == [(True, False), (False, True), (True, False)]


# W-REINFORCE ----------------------------------------------------------------------------------------------------------


@pytest.mark.row("S036", missing="That evaluations report pass@k for k up to 256.")
def test_w_reinforce_weighs_outcomes() -> None:
    of = batch(rewarded("a", 1.0, 0.0), rewarded("b", 1.0, 1.0))
    assert scalars(estimator("w_reinforce"), of) == pytest.approx([0.1, -1.0, 0.1, 0.1])
    negative = estimator("w_reinforce", positive=0.0)
    assert scalars(negative, of) == [0.0, -1.0, 0.0, 0.0]
    assert set(negative.of_group(of.groups[1]).values()) == {0.0}, "a solved group has no gradient and may be filtered"
    with pytest.raises(ConfigError, match="`positive` or `negative` must be > 0, got 0 for both"):
        estimator("w_reinforce", positive=0.0, negative=0.0)


def test_penalties_keep_more_entropy_than_rewards() -> None:
    """A softmax over five actions of which two are right: the expected gradient of each half until one has the same
    success."""
    right = np.array([True, True, False, False, False])
    entropies = {}
    for name, positive in (("psr", 1.0), ("nsr", 0.0)):
        made = estimator("w_reinforce", positive=positive, negative=1.0 - positive)
        advantages = np.array([made.of_group(rewarded("g", float(r)))["g0"] for r in right])
        logits = np.array([1.0, 0.0, 0.5, 0.0, -0.5])
        while True:
            p = np.exp(logits) / np.exp(logits).sum()
            if p[right].sum() >= 0.9:
                break
            logits = logits + 0.05 * p * (advantages - p @ advantages)
        entropies[name] = -(p * np.log(p)).sum()
    assert entropies["nsr"] > entropies["psr"]


# Unlikeliness ---------------------------------------------------------------------------------------------------------


@pytest.mark.row("S038")
def test_unlikeliness_equals_the_hand_computed_value() -> None:
    # mean log-probs -1, -3, -2 and -0.5: ranks 2, 0, 1, 3; rewards 1 - 0.25 * 2 / 4, 1, 0, 0
    context = rewarded("a", 1.0, 1.0, 0.0, 0.0)
    of = batch_of([sample(f"a{i}", "a", [v, v]) for i, v in enumerate([-1.0, -3.0, -2.0, -0.5])], [context])
    rewards = np.array([0.875, 1.0, 0.0, 0.0])
    expected = (rewards - rewards.mean()) / rewards.std()
    assert scalars(estimator("unlikeliness"), of) == pytest.approx(expected.tolist(), rel=1e-4)
    assert scalars(estimator("unlikeliness", beta=0.0), of) == scalars(estimator("grpo"), of)


def test_a_member_that_is_not_leased_gets_the_mean_factor() -> None:
    context = rewarded("a", 1.0, 1.0, 1.0)
    of = batch_of([sample("a0", "a", [-2.0]), sample("a1", "a", [-1.0])], [context])
    # factors 1 and 1 - 0.25 / 2, and for a2 their mean: the mean reward is 0.9375
    assert scalars(estimator("unlikeliness", std="none"), of) == pytest.approx([0.0625, -0.0625])


def test_unlikeliness_keeps_solved_groups_and_not_failed_ones() -> None:
    made = estimator("unlikeliness")
    assert made.of_group(rewarded("a", 1.0, 1.0)) == {"a0": UNDECIDED, "a1": UNDECIDED}
    assert made.of_group(rewarded("a", 0.0, 0.0)) == {"a0": 0.0, "a1": 0.0}
    assert made.of_group(rewarded("a", 1.0, 0.0)) == estimator("grpo").of_group(rewarded("a", 1.0, 0.0))


# Turn by turn ---------------------------------------------------------------------------------------------------------


def rule(name: str, **options: Any) -> UpdateRule:
    made: UpdateRule = UPDATE_RULES.make(Extension(name, options))
    return made


def steps(name: str, of: UpdateBatch, **options: Any) -> list[OptimizerStep]:
    return list(rule(name, **options).steps(of, np.random.default_rng(0)))


def two_turns() -> UpdateBatch:
    """Return two samples: one of two turns with two tokens each, and one of one turn."""
    segments = [prompt([20]), action([30, 31], [-1, -1]), prompt([22]), action([32, 33], [-1, -1], parent=2)]
    samples = [training_sample("g0", segments, of="g"), training_sample("g1", segments[:2], of="g")]
    return with_columns(batch_of(samples, [rewarded("g", 1.0, 0.0)]), proximal=[-1.0] * 6)


@pytest.mark.row("S035")
def test_turns_are_trained_in_reverse_with_the_correction_by_hand() -> None:
    of = two_turns()
    found = rule("turn_by_turn").steps(of, np.random.default_rng(0))
    last = next(found)
    assert (list(last.samples), last.refresh) == ([0], False)
    assert last.tokens is not None
    assert last.advantage_factors is not None
    assert last.tokens.tolist() == [False, False, True, True, False, False]
    assert last.advantage_factors.tolist() == [1.0] * 6
    refresh = next(found)
    assert (list(refresh.samples), refresh.refresh) == ([], True)
    with_columns(of, proximal=[-1.0, -1.0, -0.95, -0.85, -1.0, -1.0])  # the mean over the turn rises by 0.1
    first = next(found)
    assert sorted(first.samples) == [0, 1]
    assert first.tokens is not None
    assert first.advantage_factors is not None
    assert first.tokens.tolist() == [True, True, False, False, True, True]
    assert first.advantage_factors.tolist() == pytest.approx([np.exp(0.1)] * 4 + [1.0] * 2)
    assert next(found, None) is None


def test_the_correction_is_limited_and_can_be_off() -> None:
    factors = []
    for options in ({}, {"correction_high": 0.05}, {"correction": False}):
        of = two_turns()
        found = rule("turn_by_turn", **options).steps(of, np.random.default_rng(0))
        next(found), next(found)
        with_columns(of, proximal=[-1.0, -1.0, 0.0, 0.0, -1.0, -1.0])
        step = next(found)
        assert step.advantage_factors is not None
        factors.append(float(step.advantage_factors[0]))
    assert factors == pytest.approx([1.2, 1.05, 1.0])


@pytest.mark.parametrize(("order", "turns"), [("reverse", [1, 0]), ("forward", [0, 1])])
def test_the_order_of_turns_is_an_option(order: str, turns: list[int]) -> None:
    of = two_turns()
    found = [s for s in steps("turn_by_turn", of, order=order, num_minibatches=2) if s.samples]
    assert [int(of["turn"][s.tokens].max()) for s in found] == [t for t in turns for _ in range(2 if t == 0 else 1)]
    assert {len(s.samples) for s in found} == {1}


# Memory ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["risk_po", "mssr", "v0"])
def test_memory_passes_through_a_checkpoint(name: str, tmp_path: Path) -> None:
    chosen: dict[str, dict[str, Any]] = {
        "mssr": {"entropy_weight": 0.0, "first_visit": "train"},
        "risk_po": {"bundle_groups": 1},
    }
    options = chosen.get(name, {"initial": 0.9})
    made, again = estimator(name, **options), estimator(name, **options)
    made(batch(rewarded("a", 1.0, 0.0, 0.0), rewarded("b", 1.0, 1.0, 0.0)))
    torch.save(made.state(), tmp_path / "state.pt")
    again.load_state(torch.load(tmp_path / "state.pt", weights_only=True))
    second = batch(rewarded("a", 1.0, 1.0, 0.0), rewarded("c", 0.0, 0.0, 1.0), update=2)
    one, two, fresh = (e(second) for e in (made, again, estimator(name, **options)))
    assert np.array_equal(one.advantages, two.advantages)
    assert one.metrics == two.metrics
    assert not np.array_equal(one.advantages, fresh.advantages), "the memory matters"


def test_of_group_runs_without_torch() -> None:
    """The reward service calls it, and has no torch."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from rollmesh.trainer.estimators import ESTIMATORS, make_estimator\n"
        "from rollmesh.shared.domain.trajectory import GroupContext, MemberOutcome, Reward\n"
        "members = tuple(MemberOutcome(sample_id=str(i), rewards=(Reward(name='r', value=i),), end='') for i in (0, 1))\n"
        "for name in ESTIMATORS.names:\n"
        "    print(name, make_estimator(name).of_group(GroupContext(group='g', task='t', members=members)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(ESTIMATORS.names)
