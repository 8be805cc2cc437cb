"""Features of hidden states, and the estimators that read them: VERL and RepExp. Values by hand, bounds, memory."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.errors import ConfigError
from rollmesh.trainer.batch import UpdateBatch
from rollmesh.trainer.config import OptimizerConfig, PackingConfig, UpdateConfig
from rollmesh.trainer.estimators import make_estimator
from rollmesh.trainer.estimators.base import UNDECIDED
from rollmesh.trainer.estimators.rep_exp import elliptical_bonus, normalized
from rollmesh.trainer.feature_pass import computed_features
from rollmesh.trainer.features import FeatureInputs, FeatureRequest
from rollmesh.trainer.forward import ForwardPlan
from rollmesh.trainer.hidden_features import (
    EffectiveRank,
    EffectiveRankOptions,
    MeanState,
    MeanStateOptions,
    effective_rank,
)
from rollmesh.trainer.samples import build_table
from rollmesh.trainer.update import BatchTrainer

from .builders import action, batch_of, group, member, minibatches, prompt, random_batch, training_sample

SMALL = TinyModelConfig(hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48)


def inputs_of(*samples: Tensor) -> FeatureInputs:
    """Return the inputs for the hidden states of each sample."""
    states = torch.cat(samples)
    number = torch.arange(len(samples)).repeat_interleave(torch.tensor([len(s) for s in samples]))
    empty = torch.zeros(len(states))
    return FeatureInputs(
        logits=empty[:, None], token_ids=number, logprobs=empty, hidden=states, columns={"sample": number}
    )


def axes(*numbers: int, width: int = 5) -> Tensor:
    """Return +e_i and -e_i for each number."""
    return torch.cat([torch.stack([torch.eye(width)[n], -torch.eye(width)[n]]) for n in numbers])


# Effective rank -------------------------------------------------------------------------------------------------------


@pytest.mark.row("S041")
def test_a_matrix_of_rank_one_has_effective_rank_one() -> None:
    rng = torch.Generator().manual_seed(0)
    line = torch.randn(30, 1, generator=rng) * torch.randn(1, 16, generator=rng) + 3.0
    assert effective_rank(line) == pytest.approx(1.0, abs=1e-4)
    assert effective_rank(torch.full((7, 16), 2.5)) == 1.0, "equal rows"
    assert effective_rank(torch.randn(1, 16, generator=rng)) == 1.0, "one row"


@pytest.mark.row("S041")
def test_an_isotropic_cloud_has_the_effective_rank_of_its_dimensions() -> None:
    assert effective_rank(axes(0, 1, 2)) == pytest.approx(3.0)
    rng = torch.Generator().manual_seed(0)
    cloud = torch.zeros(4000, 64)
    cloud[:, :6] = torch.randn(4000, 6, generator=rng)
    assert effective_rank(cloud) == pytest.approx(6.0, abs=0.01)
    assert effective_rank(cloud[:5]) < 4.5, "five centered rows span four dimensions"


def test_the_effective_rank_of_two_unequal_directions_by_hand() -> None:
    states = torch.cat([3 * axes(0), axes(1)])  # singular values 3 sqrt 2 and sqrt 2: shares 3/4 and 1/4
    expected = np.exp(-(0.75 * np.log(0.75) + 0.25 * np.log(0.25)))
    assert effective_rank(states) == pytest.approx(expected)


def test_ranks_velocity_and_acceleration_along_a_response_by_hand() -> None:
    """Strides of two rows add a dimension each: the ranks are 1, 2, 3; velocities 0, 1, 3 - 1.5; accelerations 0, 0,
    0.5."""
    first = torch.cat([axes(0, 1, 2), torch.zeros(1, 5)])  # the last row changes no singular value
    second = axes(0)[:1]
    found = EffectiveRank(options=EffectiveRankOptions(stride=2))(inputs_of(first, second))
    assert found.shape == (8, 4)
    assert found[:7, 0].tolist() == pytest.approx([3.0] * 7)
    assert found[:7, 1].tolist() == pytest.approx([1, 1, 2, 2, 3, 3, 3])
    assert found[:7, 2].tolist() == pytest.approx([0, 0, 1, 1, 1.5, 1.5, 1.5])
    assert found[:7, 3].tolist() == pytest.approx([0, 0, 0, 0, 0.5, 0.5, 0.5])
    assert found[7].tolist() == [1, 1, 0, 0], "shorter than a stride"


def test_the_features_of_a_model_equal_those_of_its_states_whatever_the_packing() -> None:
    model = build_tiny_model(SMALL, seed=1)
    made = BatchTrainer(model, UpdateConfig(), seed=1)
    samples, _ = random_batch()
    table = build_table(samples, update=1)
    requests = {
        "rank": FeatureRequest(EffectiveRank(options=EffectiveRankOptions(stride=4))),
        "mean": FeatureRequest(MeanState(options=MeanStateOptions(dimensions=8, projection_seed=3))),
    }
    for size in (64, 4096):
        packing = PackingConfig(row_tokens=64, micro_batch_tokens=size)
        found = computed_features(model, table, requests, ForwardPlan(made.forward_choice.mode, packing))
        begin = 0
        for sequence, length in zip(table.sequences, table.lengths.tolist(), strict=True):
            ids = torch.as_tensor(sequence.token_ids, dtype=torch.long)
            with torch.no_grad():
                states = model.base_model(input_ids=ids[None]).last_hidden_state[0, :-1]
            states = states[torch.as_tensor(sequence.target_mask[1:] == 1)]
            assert found["rank"][begin, 0] == pytest.approx(effective_rank(states), rel=1e-4)
            expected = MeanState(options=MeanStateOptions(dimensions=8, projection_seed=3))(inputs_of(states))
            np.testing.assert_allclose(found["mean"][begin : begin + length], expected.numpy(), atol=1e-5)
            begin += length


def test_the_projection_keeps_distances_and_depends_on_its_seed_alone() -> None:
    states = [torch.randn(3, 400, generator=torch.Generator().manual_seed(n)) for n in range(20)]
    made = MeanState(options=MeanStateOptions(dimensions=256))(inputs_of(*states))[::3]
    means = torch.stack([s.mean(0) for s in states])
    ratio = torch.pdist(made) / torch.pdist(means)
    assert float(ratio.mean()) == pytest.approx(1.0, abs=0.05)
    again = MeanState(options=MeanStateOptions(dimensions=256))(inputs_of(*states))[::3]
    other = MeanState(options=MeanStateOptions(dimensions=256, projection_seed=1))(inputs_of(*states))[::3]
    assert torch.equal(made, again)
    assert not torch.equal(made, other)


# VERL -----------------------------------------------------------------------------------------------------------------


def verl(**options: Any) -> Any:
    return make_estimator(Extension("verl_rank", {"stride": 1, **options}))


def batch_with(columns: dict[str, Any], *lengths: int, rewards: tuple[float, ...], update: int = 1) -> UpdateBatch:
    """Return one group with a sample per length and reward, and further columns."""
    samples = [
        training_sample(f"s{n}", [prompt([20]), action([21] * length, [-1.0] * length)], of="g")
        for n, length in enumerate(lengths)
    ]
    made = batch_of(samples, [group("g", *(member(f"s{n}", {"r": r}) for n, r in enumerate(rewards)))], update=update)
    made.table.columns.update({name: np.asarray(values, np.float32) for name, values in columns.items()})
    return made


TWO = [
    *([3, 1, 0, 0], [3, 2, 1, 0], [3, 3, 1.5, 0.5]),
    *([6, 2, 0, 0], [6, 5, 4, 0], [6, 6, 4, 1]),
]
"""Two samples of three strides: (rank, velocity, acceleration) are (3, 1.25, 0.5) and (6, 4, 1)."""


@pytest.mark.row("S041")
def test_verl_equals_the_hand_computed_value() -> None:
    """With the averages (2, 1, 0.5), the deviations are (0.5, 0.25, 0) and (2, 3, 1), and the gates 1/2 and
    sigmoid(2)."""
    made = verl()
    made.load_state({"averages": [2.0, 1.0, 0.5]})
    found = made(batch_with({"verl_rank_ranks": TWO}, 3, 3, rewards=(1.0, 0.0)))
    first = 0.5 * np.tanh(0.5) + 0.5 * np.tanh(0.25)
    assert first < 0.5
    gate = 1 / (1 + np.exp(-2))
    assert gate * np.tanh(2) + (1 - gate) * np.tanh(3) > 0.5, "the second bonus is limited to half of the advantage"
    assert found.advantages.tolist() == pytest.approx([1 + first] * 3 + [-0.5] * 3, abs=1e-5)
    assert made.state()["averages"] == pytest.approx([0.7 * 2 + 0.3 * 4.5, 0.7 + 0.3 * 2.625, 0.35 + 0.3 * 0.75])
    assert {name: found.metrics[name] for name in ("rank", "velocity", "acceleration", "ranked_share")} == (
        pytest.approx({"rank": 4.5, "velocity": 2.625, "acceleration": 0.75, "ranked_share": 1.0})
    )
    assert found.metrics["gate"] == pytest.approx((0.5 + gate) / 2)


def test_the_bonus_can_be_at_the_last_token_alone() -> None:
    made = verl(tokens="last")
    made.load_state({"averages": [2.0, 1.0, 0.5]})
    found = made(batch_with({"verl_rank_ranks": TWO}, 3, 3, rewards=(1.0, 0.0))).advantages
    assert found.tolist() == pytest.approx([1, 1, 1 + 0.5 * np.tanh(0.5) + 0.5 * np.tanh(0.25), -1, -1, -0.5], abs=1e-5)


@pytest.mark.row("S041")
def test_the_bonus_never_exceeds_half_of_the_advantage_and_is_never_negative() -> None:
    rng = np.random.default_rng(0)
    made, plain = verl(weight=5.0), make_estimator("grpo")
    seen = 0.0
    for update in range(1, 30):
        lengths = tuple(rng.integers(1, 8, 6).tolist())
        ranks = rng.normal(2.0, 3.0, (sum(lengths), 4))
        of = batch_with({"verl_rank_ranks": ranks}, *lengths, rewards=tuple(rng.normal(size=6)), update=update)
        base, found = plain(of).advantages, made(of).advantages
        assert (found >= base).all()
        assert (found - base <= np.abs(base) / 2 + 1e-6).all()
        seen = max(seen, float((found - base).max()))
    assert seen > 0.1


def test_the_first_update_has_no_bonus_and_a_further_estimate_counts_once() -> None:
    made = verl()
    of = batch_with({"verl_rank_ranks": TWO}, 3, 3, rewards=(1.0, 0.0))
    assert made(of).advantages.tolist() == pytest.approx([1.0] * 3 + [-1.0] * 3, abs=1e-5)
    assert made.state()["averages"] == pytest.approx([4.5, 2.625, 0.75])
    again = UpdateBatch(update=1, samples=of.samples, groups=of.groups, table=of.table, repeat=1)
    assert made(again).advantages.tolist() == pytest.approx([1.0] * 3 + [-1.0] * 3, abs=1e-5)
    assert made.state()["averages"] == pytest.approx([4.5, 2.625, 0.75])


def test_an_answer_of_fewer_than_three_strides_has_no_bonus_and_does_not_count() -> None:
    made = verl()
    made.load_state({"averages": [2.0, 1.0, 0.5]})
    short = [[9, 9, 0, 0], [9, 9, 9, 0]]
    found = made(batch_with({"verl_rank_ranks": [*TWO[:3], *short]}, 3, 2, rewards=(0.0, 1.0)))
    assert found.advantages.tolist()[3:] == pytest.approx([1.0, 1.0], abs=1e-5)
    assert found.metrics["ranked_share"] == 0.5
    assert made.state()["averages"][0] == pytest.approx(0.7 * 2 + 0.3 * 3)


def test_the_averages_pass_through_a_checkpoint(tmp_path: Path) -> None:
    made, again = verl(), verl()
    of = batch_with({"verl_rank_ranks": TWO}, 3, 3, rewards=(1.0, 0.0))
    made(of)
    torch.save(made.state(), tmp_path / "state.pt")
    again.load_state(torch.load(tmp_path / "state.pt", weights_only=True))
    second = batch_with({"verl_rank_ranks": np.array(TWO) * 1.5}, 3, 3, rewards=(1.0, 0.0), update=2)
    one, two, fresh = (e(second) for e in (made, again, verl()))
    assert np.array_equal(one.advantages, two.advantages)
    assert not np.array_equal(one.advantages, fresh.advantages)


# RepExp ---------------------------------------------------------------------------------------------------------------


def rep_exp(**options: Any) -> Any:
    return make_estimator(Extension("rep_exp", options))


@pytest.mark.row("S037")
@pytest.mark.parametrize("kind", ["leverage", "leave_one_out"])
def test_a_duplicate_has_a_lower_bonus_than_an_orthogonal_answer(kind: Any) -> None:
    states = np.array([[1.0, 0, 0, 0], [1.0, 0, 0, 0], [0, 1.0, 0, 0], [0, 0, 1.0, 0]])
    one, two, three, four = elliptical_bonus(states, kind, ridge=0.01)
    assert one == pytest.approx(two)
    assert three == pytest.approx(four)
    assert one < 0.8 * three


def test_bonuses_equal_those_of_the_matrices() -> None:
    rng = np.random.default_rng(0)
    states = rng.normal(size=(6, 3))
    centered = states - states.mean(0)
    covariance = 0.05 * np.eye(3) + centered.T @ centered

    def bonus(matrix: NDArray[np.float64], h: NDArray[np.float64]) -> float:
        return float(h @ np.linalg.solve(matrix, h))

    assert elliptical_bonus(states, "leverage", 0.05) == pytest.approx([bonus(covariance, h) for h in centered])
    expected = [bonus(covariance - np.outer(h, h), h) for h in centered]
    assert elliptical_bonus(states, "leave_one_out", 0.05) == pytest.approx(expected)
    assert elliptical_bonus(states[:1], "leave_one_out", 0.05) == pytest.approx([0.0]), "alone"


def test_a_covariance_over_updates_equals_that_of_all_answers_and_passes_through_a_checkpoint(tmp_path: Path) -> None:
    """The bonus of a group is the leverage among all answers to the task so far, computed here from the matrix. An
    answer that an earlier update has seen has a lower bonus."""
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(3, 2)), np.array([[3.0, 0], [0, 3.0], [0, 3.0]])

    def bonuses(made: Any, states: NDArray[np.float64], repeat: int = 0) -> list[float]:
        of = batch_with({"rep_exp_state": states}, 1, 1, 1, rewards=(1.0, 1.0, 1.0))
        of = UpdateBatch(update=1, samples=of.samples, groups=of.groups, table=of.table, repeat=repeat)
        return [float(v) for v in made(of).advantages]

    def expected(states: NDArray[np.float64], every: NDArray[np.float64]) -> list[float]:
        centered, mean = every - every.mean(0), every.mean(0)
        matrix = 0.05 * np.eye(2) + centered.T @ centered
        return [float((h - mean) @ np.linalg.solve(matrix, h - mean)) for h in states]

    settings: dict[str, Any] = {"covariance": "task", "ridge": 0.05, "beta": 1.0, "mean": "none", "std": "none"}
    made, again = rep_exp(**settings), rep_exp(**settings)
    one = expected(first, first)
    assert bonuses(made, first) == pytest.approx([1 + b for b in one], abs=1e-5)
    assert elliptical_bonus(first, "leverage", 0.05) == pytest.approx(one), "the first group alone"
    state = made.state()
    assert bonuses(made, first, repeat=1) == pytest.approx([1 + b for b in one], abs=1e-5)
    torch.save(state, tmp_path / "state.pt")
    again.load_state(torch.load(tmp_path / "state.pt", weights_only=True))
    two = [1 + b for b in expected(second, np.concatenate([first, second]))]
    assert bonuses(made, second) == pytest.approx(two, abs=1e-5)
    assert bonuses(again, second) == bonuses(made, second, repeat=1)
    seen = [bonuses(made, second)[0] for _ in range(4)]
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] - 1 < 0.5 * (two[0] - 1), "novelty wears off"
    assert rep_exp().state() == {}
    with pytest.raises(ConfigError, match="`kind` must be leverage with covariance: task, got leave_one_out"):
        rep_exp(covariance="task", kind="leave_one_out")


def test_the_normalizations_by_hand() -> None:
    bonus = np.array([1.0, 3.0])
    assert normalized(bonus, "none").tolist() == [1, 3]
    assert normalized(bonus, "std").tolist() == [1, 3]
    assert normalized(2 * bonus, "std").tolist() == [1, 3]
    assert normalized(bonus, "z_score").tolist() == [-1, 1]
    assert normalized(np.array([2.0, 2.0]), "z_score").tolist() == [0, 0]


STATES = np.array([[1.0, 0], [1.0, 0], [0, 1.0]])


def rep_exp_batch(*rewards: float) -> UpdateBatch:
    """Return one group of one token per sample, with the states of the first two equal, and one member more if there
    are four rewards."""
    return batch_with({"rep_exp_state": STATES}, 1, 1, 1, rewards=rewards)


def test_the_bonus_is_added_to_the_reward_before_the_group_is_compared() -> None:
    bonus = elliptical_bonus(STATES, "leverage", 0.01)
    sums = np.array([1.0, 0.0, 1.0]) + 0.1 * bonus
    expected = (sums - sums.mean()) / sums.std()
    found = rep_exp(beta=0.1)(rep_exp_batch(1.0, 0.0, 1.0))
    assert found.advantages.tolist() == pytest.approx(expected.tolist(), abs=1e-4)
    assert found.metrics["bonus_max"] == pytest.approx(bonus.max())


def test_a_member_that_is_not_trained_gets_the_mean_bonus() -> None:
    bonus = elliptical_bonus(STATES, "leverage", 0.01)
    sums = np.array([1.0, 0.0, 1.0, 0.0]) + 0.5 * np.append(bonus, bonus.mean())
    expected = ((sums - sums.mean()) / sums.std())[:3]
    found = rep_exp(beta=0.5)(rep_exp_batch(1.0, 0.0, 1.0, 0.0))
    assert found.advantages.tolist() == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.row("S037")
@pytest.mark.parametrize(
    ("rewards", "options", "has_bonus"),
    [
        ((0.0, 0.0, 0.0), {}, False),
        ((0.0, 0.0, 0.0), {"skip_none_right": False}, True),
        ((1.0, 1.0, 1.0), {}, True),
        ((1.0, 1.0, 1.0), {"skip_all_right": True}, False),
        ((1.0, 0.0, 1.0), {}, True),
        ((1.0, 0.0, 1.0), {"skip_some_right": True}, False),
        ((0.0, 0.0, 0.0), {"skip_none_right": False, "skip_wrong": True}, False),
    ],
)
def test_the_gates_work_per_group(rewards: tuple[float, ...], options: dict[str, Any], has_bonus: bool) -> None:
    of = rep_exp_batch(*rewards)
    made = rep_exp(**options)
    assert (made(of).metrics["bonus_max"] > 0) is has_bonus
    equal = len(set(rewards)) == 1
    undecided = set(made.of_group(of.groups[0]).values()) == {UNDECIDED}
    assert undecided is (equal and has_bonus), "the finalizer keeps a group whose bonuses differ"


def test_a_wrong_answer_may_have_no_bonus() -> None:
    found = rep_exp(skip_wrong=True, beta=1.0, std="none")(rep_exp_batch(1.0, 0.0, 1.0))
    bonus = elliptical_bonus(STATES, "leverage", 0.01)
    sums = np.array([1 + bonus[0], 0.0, 1 + bonus[2]])
    assert found.advantages.tolist() == pytest.approx((sums - sums.mean()).tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("name", "options", "metric"),
    [
        ("verl_rank", {"stride": 2}, "estimator/acceleration"),
        ("rep_exp", {"under": "start", "dimensions": 4}, "estimator/bonus_mean"),
        ("rep_exp", {"under": "reference"}, "estimator/bonus_max"),
    ],
)
def test_the_methods_update_a_model(name: str, options: dict[str, Any], metric: str) -> None:
    config = UpdateConfig(
        estimator=Extension(name, options),
        update_rule=minibatches(2),
        optimizer=OptimizerConfig(lr=1e-3, warmup_updates=0),
    )
    made = BatchTrainer(build_tiny_model(SMALL, seed=1), config, seed=7)
    assert (made.reference is not None) is (options.get("under") == "reference")
    for k in (1, 2):
        samples, groups = random_batch(seed=k, step=k - 1)
        found: dict[str, float] = made.update(k, samples, groups).metrics
        assert np.isfinite(found[metric])
    assert found[metric] != 0
