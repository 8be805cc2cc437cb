"""Tokens that were not sampled: who may train on them, NaN that reaches nothing, and the methods that learn from given
solutions."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import GroupContext, Segment, Source, TrainingSample
from rollmesh.shared.errors import ConfigError
from rollmesh.trainer.config import FeatureChoice, LossTermChoice, Normalization, OptimizerConfig, UpdateConfig
from rollmesh.trainer.estimators import make_estimator
from rollmesh.trainer.losses import LOSSES, LossInputs, LossSum, token_weights
from rollmesh.trainer.model_files import published_state
from rollmesh.trainer.recipe import find_recipe, read_recipe
from rollmesh.trainer.samples import DropReason
from rollmesh.trainer.update import BatchTrainer, UpdateOutcome, UpdateResult

from .builders import action, batch_of, group, member, minibatches, prompt, random_batch, training_sample
from .gradient_check import Ragged, check_gradient, loss_of_logits, plugins_of, ragged

SMALL = TinyModelConfig(hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48)
PPO, IMITATION = LossTermChoice("ppo_clip"), LossTermChoice("imitation")
DOUBLE = torch.float64


def given(token_ids: list[int]) -> Segment:
    """Return a solution of a data set, which is trained."""
    sampled = action(token_ids, [0.0] * len(token_ids))
    return replace(
        sampled, source=Source.DATASET, logprobs=None, version=None, kv_step_oldest=None, sampling=-1, arrays={}
    )


def with_solutions(num_groups: int = 3) -> tuple[list[TrainingSample], list[GroupContext]]:
    """Return a random batch with one given solution, of reward 1, in each group."""
    samples, groups = random_batch(num_groups, 3)
    rng = np.random.default_rng(5)
    for number, of in enumerate(groups):
        tokens = rng.integers(13, 109, 6 + number).tolist()
        name = f"given-{number}"
        samples.append(training_sample(name, [prompt(tokens[:3]), given(tokens)], of=of.group))
        groups[number] = replace(of, members=(*of.members, member(name, {"correct": 1.0})))
    return samples, groups


def trainer(*loss: LossTermChoice, **settings: Any) -> BatchTrainer:
    chosen = {"update_rule": minibatches(1), "optimizer": OptimizerConfig(lr=1e-3, warmup_updates=0), **settings}
    return BatchTrainer(
        build_tiny_model(SMALL, seed=1),
        UpdateConfig(loss=loss, **chosen),
        seed=7,
        outputs=["entropy"],
        sources=[Source.DATASET],
    )


def weights(made: BatchTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in published_state(made.model).items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


def reasons(result: UpdateResult) -> set[str | None]:
    return {v.reason for v in result.verdicts if v.sample_id.startswith("given")}


# Who may train on them ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "settings", "reason"),
    [
        ((PPO, IMITATION), {}, None),
        ((PPO,), {}, DropReason.NO_LOGPROBS),
        ((PPO, LossTermChoice("imitation", where="policy")), {}, DropReason.NO_LOGPROBS),
        ((PPO, LossTermChoice("entropy")), {}, None),
        ((PPO, LossTermChoice("kl", {"to": "behavior"})), {}, DropReason.NO_LOGPROBS),
        ((PPO, LossTermChoice("kl", {"to": "proximal"})), {}, None),
        ((PPO, IMITATION), {"estimator": Extension("vcpo")}, DropReason.NO_LOGPROBS),
        ((PPO, IMITATION), {"update_rule": Extension("ess_minibatches")}, DropReason.NO_LOGPROBS),
    ],
)
def test_a_given_solution_is_used_if_every_part_allows_it(loss: Any, settings: Any, reason: str | None) -> None:
    result = trainer(*loss, **settings).update(1, *with_solutions())
    assert reasons(result) == {reason}
    assert all(v.reason is None for v in result.verdicts if not v.sample_id.startswith("given"))


def test_a_given_solution_is_dropped_if_the_run_does_not_admit_its_source() -> None:
    made = BatchTrainer(
        build_tiny_model(SMALL, seed=1), UpdateConfig(loss=(PPO, IMITATION)), seed=7, sources=[Source.HINT]
    )
    assert reasons(made.update(1, *with_solutions())) == {DropReason.SOURCE_NOT_ADMITTED}


def test_a_sampled_token_without_log_prob_is_never_trained() -> None:
    samples, groups = with_solutions()
    lost = replace(samples[0].segments[1], logprobs=None)
    samples[0] = replace(samples[0], segments=(samples[0].segments[0], lost, *samples[0].segments[2:]))
    result = trainer(PPO, IMITATION).update(1, samples, groups)
    assert result.verdicts[0].reason == DropReason.NO_LOGPROBS


def test_samples_without_a_token_of_any_term_are_left_out() -> None:
    result = trainer(IMITATION).update(1, *with_solutions())
    assert reasons(result) == {None}
    assert {v.reason for v in result.verdicts if not v.sample_id.startswith("given")} == {DropReason.LEFT_OUT}
    nothing = trainer(IMITATION).update(1, *random_batch())
    assert nothing.outcome is UpdateOutcome.SKIPPED


def test_a_given_solution_is_in_no_baseline_of_turns() -> None:
    """The recipe of the refined search: four wrong episodes of two turns teach nothing, although each gives the right
    answer."""
    _, recipe = read_recipe(find_recipe("im_rag"))
    chosen = recipe["learner"]["estimator"]
    samples, members = [], []
    for number in range(4):
        turns = [prompt([1]), action([20, 21], [-1.0] * 2), prompt([2]), action([22], [-1.0])]
        for name, path in (("sampled", turns), ("given", [prompt([1, 20, 21, 2]), given([30, 31])])):
            made = training_sample(f"{name}-{number}", path, of="g")
            samples.append(made)
            value = float(name == "given")
            members.append(member(made.sample.sample_id, {"correct": value}, episode=f"e{number}", of=made))
    found = make_estimator(Extension(chosen["name"], chosen["options"]))(batch_of(samples, [group("g", *members)]))
    assert found.advantages.tolist() == [0.0, 0.0, 0.0, 1.0, 1.0] * 4


# NaN ------------------------------------------------------------------------------------------------------------------


NEED_MORE = ("imitation", "shifted_imitation", "one_token_rollout", "dsdr_entropy", "value", "positive_lm", "router")
"""The second term of the test, one that trains given tokens alone, and those that need a column of another estimator or
a mixture of experts."""
FEATURES = {
    "first_prompt": FeatureChoice("other_prompt_logprob", {"omit_roles": ["observation"]}, under="current", grad=True)
}
"""Features that terms of the same name read."""


@pytest.mark.parametrize("name", [n for n in LOSSES.names if n not in NEED_MORE])
def test_no_missing_log_prob_reaches_a_weight_or_a_metric(name: str) -> None:
    """Every other built-in term, beside an imitation, in small micro-batches, over samples some of which mix own and
    given tokens."""
    samples, groups = with_solutions()
    first = samples[0]
    samples[0] = replace(first, segments=(*first.segments, given([40, 41, 42])))
    made = trainer(LossTermChoice(name), IMITATION, features={n: f for n, f in FEATURES.items() if n == name})
    result = made.update(1, samples, groups)
    assert result.outcome is UpdateOutcome.APPLIED
    assert {v.reason for v in result.verdicts} == {None}
    assert all(math.isfinite(value) for value in result.metrics.values()), result.metrics
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights(made).values())
    assert result.metrics["imitation/imitation_nll_share"] > 0


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), None])
def test_garbage_in_place_of_log_probs_changes_nothing(garbage: float | None) -> None:
    samples, groups = with_solutions()
    clean, dirty = trainer(PPO, IMITATION), trainer(PPO, IMITATION)
    clean.update(1, samples, groups)
    spoiled = []
    for sample in samples:
        segments = [
            replace(s, logprobs=np.full(s.num_tokens, garbage, np.float32))
            if s.source is Source.DATASET and garbage is not None
            else s
            for s in sample.segments
        ]
        spoiled.append(replace(sample, segments=tuple(segments)))
    dirty.update(1, spoiled, groups)
    assert same(weights(clean), weights(dirty))


def test_a_term_of_own_tokens_does_not_see_given_ones() -> None:
    """With an imitation of weight 0 the update equals that without the given solutions, whose advantages the others do
    not use."""
    samples, groups = with_solutions()
    own = [s for s in samples if not s.sample.sample_id.startswith("given")]
    with_given, without = trainer(PPO, LossTermChoice("imitation", weight=0.0)), trainer(PPO)
    one = with_given.update(1, samples, groups)
    other = without.update(1, own, groups)
    assert one.metrics["loss"] == pytest.approx(other.metrics["loss"], abs=1e-7)
    assert one.metrics["kl"] == pytest.approx(other.metrics["kl"], rel=1e-6)
    assert one.metrics["ppo_clip/clipped_share"] == pytest.approx(other.metrics["clipped_share"])
    left, right = weights(with_given), weights(without)
    assert all(torch.allclose(left[name], right[name], atol=2e-4) for name in left)


# Token sets -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalization", list(Normalization))
@pytest.mark.parametrize("where", ["policy", "external"])
def test_weights_of_a_token_set_are_those_of_a_step_of_these_tokens(normalization: Normalization, where: Any) -> None:
    """Samples of 3, 2 and 4 tokens; the last 2 of sample 0 and all of sample 2 are given."""
    lengths, sample_weights = [3, 2, 4], [1.0, 0.5, 2.0]
    external = torch.tensor([0, 1, 1, 0, 0, 1, 1, 1, 1], dtype=torch.bool)
    at = external if where == "external" else ~external
    rest = {"external": ([2, 4], [1.0, 2.0]), "policy": ([1, 2], [1.0, 0.5])}[where]
    columns = {
        "token_weight": token_weights(lengths, sample_weights, normalization, 7),
        "sample": torch.arange(3).repeat_interleave(torch.tensor(lengths)),
        "behavior": torch.zeros(9),
        "source": torch.where(external, int(Source.DATASET), int(Source.POLICY)),
    }
    loss = LossSum([LossTermChoice("imitation", where=where)], normalization=normalization)
    prepared = loss.prepare(columns)
    expected = token_weights(*rest, normalization, 7)
    torch.testing.assert_close(prepared["token_weight/imitation"][at], expected)
    assert not prepared["token_weight/imitation"][~at].any()
    logprobs = torch.linspace(-2, -1, 9)
    value, stats = loss(LossInputs(logprobs, columns | prepared))
    torch.testing.assert_close(value, -(expected * logprobs[at]).sum())
    assert torch.equal(stats["imitation_nll"].isnan(), ~at)


def test_a_token_set_has_one_of_three_names() -> None:
    with pytest.raises(ConfigError, match="`where` must be one of policy, external, all, got 'somewhere'"):
        LossSum([LossTermChoice("imitation", where="somewhere")])  # type: ignore[arg-type]


# Imitation ------------------------------------------------------------------------------------------------------------


def test_imitation_is_the_mean_negative_log_likelihood_of_its_tokens() -> None:
    samples, groups = with_solutions()
    made = trainer(LossTermChoice("imitation", weight=3.0))
    nll = []
    for sample in samples[-3:]:
        first, second = sample.segments
        nll += (-made.score(np.concatenate([first.token_ids, second.token_ids]))[first.num_tokens :]).tolist()
    result = made.update(1, samples, groups)
    assert result.metrics["loss"] == pytest.approx(3 * np.mean(nll), rel=1e-4)
    assert result.metrics["imitation_nll_share"] == pytest.approx(np.mean(nll), rel=1e-4)
    assert result.metrics["tokens/external_share"] == 1.0
    for k in range(2, 12):
        result = made.update(k, samples, groups)
    assert result.metrics["imitation_nll_share"] < 0.9 * np.mean(nll)


def mixed(batch: Ragged) -> Ragged:
    """Return the batch with the second half of its samples given, without behavior log-probs."""
    external = batch.columns["sample"] >= 3
    source = torch.where(external, int(Source.DATASET), int(Source.POLICY))
    return batch.with_columns(source=source, behavior=batch.columns["behavior"].masked_fill(external, math.nan))


def test_the_gradients_on_given_tokens_equal_finite_differences() -> None:
    batch = mixed(ragged())
    given_tokens = batch.columns["sample"] >= 3
    both = check_gradient(plugins_of(PPO, IMITATION), batch)
    assert min(float(both[given_tokens].abs().max()), float(both[~given_tokens].abs().max())) > 1e-3
    alone = check_gradient(plugins_of(IMITATION), batch)
    assert alone[~given_tokens].abs().max() == 0
    assert check_gradient(plugins_of(LossTermChoice("rl_plus")), batch, frozen=True).abs().max() > 1e-3


# RL-PLUS --------------------------------------------------------------------------------------------------------------


def rl_plus(pi: list[float], old: list[float], mu: list[float], advantages: list[float], **options: Any) -> Any:
    """Return the loss, its gradient by log pi, and the statistics. A token with mu = 0 is external."""
    logprobs = torch.tensor(pi, dtype=DOUBLE).log().requires_grad_()
    behavior = torch.tensor([math.log(m) if m else math.nan for m in mu], dtype=DOUBLE)
    columns = {
        "behavior": behavior,
        "proximal": torch.tensor(old, dtype=DOUBLE).log(),
        "source": torch.tensor([int(Source.POLICY if m else Source.DATASET) for m in mu]),
        "advantages": torch.tensor(advantages, dtype=DOUBLE),
        "token_weight": torch.full((len(pi),), 1 / len(pi), dtype=DOUBLE),
    }
    loss, stats = LossSum([LossTermChoice("rl_plus", options)])(LossInputs(logprobs, columns))
    return loss, torch.autograd.grad(loss, logprobs)[0].tolist(), stats


def test_rl_plus_equals_the_hand_computed_value() -> None:
    """Own: pi / mu = 2, A = 3. Given: pi = 0.36, old = 0.2, so 0.72 / (0.2 + 0.6) = 0.9, and (1 - 0.36)^0.5 = 0.8, A =
    5."""
    loss, gradient, stats = rl_plus([0.4, 0.36], [0.1, 0.2], [0.2, 0], [3, 5])
    assert loss.item() == pytest.approx(-(2 * 3 + 0.9 * 0.8 * 5) / 2)
    assert gradient == pytest.approx([-3.0, -0.9 * 0.8 * 5 / 2])
    assert stats["external_ratio"].tolist() == pytest.approx([0, 0.9])
    assert stats["exploration"].tolist() == pytest.approx([0, 0.8])


@pytest.mark.row("S033")
def test_rl_plus_weighs_given_tokens_by_how_unlikely_they_are() -> None:
    _, gradient, stats = rl_plus([1.0, 0.5, 1.0 - 1e-12], [1e-30, 0.5, 1e-30], [0, 0, 0], [1, 1, 1], gamma=0.5)
    assert gradient[0] == 0.0, "a token of probability 1 has no weight"
    assert stats["external_ratio"].tolist() == pytest.approx([4.0, 0.8, 4.0]), "at most 4 as old -> 0"
    assert abs(gradient[1]) > 1000 * abs(gradient[2])
    _, plain, _ = rl_plus([0.5], [0.5], [0], [1], gamma=0.0)
    assert plain == pytest.approx([-0.8])


def test_rl_plus_treats_own_tokens_as_an_unclipped_or_a_clipped_surrogate() -> None:
    batch = ragged()
    policy = torch.full_like(batch.columns["sample"], int(Source.POLICY))
    batch = batch.with_columns(source=policy)
    clipped = LossTermChoice("rl_plus", {"clip_low": 0.2, "clip_high": 0.28})
    torch.testing.assert_close(
        loss_of_logits(plugins_of(clipped), batch, batch.logits), loss_of_logits(plugins_of(PPO), batch, batch.logits)
    )
    loss, gradient, _ = rl_plus([0.8, 0.1], [0.1, 0.1], [0.1, 0.4], [1, -1])
    assert loss.item() == pytest.approx(-(8 - 0.25) / 2)
    assert gradient == pytest.approx([-4.0, 0.125])


@pytest.mark.parametrize("name", ["grpo", "dsdr"])
def test_given_solutions_have_an_advantage_and_are_in_no_baseline(name: str) -> None:
    """Own rewards 0, 0, 1 have the mean 1/3; the given solution of reward 1 has the advantage 2/3."""
    samples = [training_sample(f"s{n}", [prompt([20]), action([30], [-1.0])]) for n in range(3)]
    samples.append(training_sample("given", [prompt([20]), given([31, 32])]))
    members = [member(f"s{n}", {"r": float(n == 2)}) for n in range(3)]
    batch = batch_of(samples, [group("g0", *members, member("given", {"r": 1.0}))])
    assert batch.external.tolist() == [False, False, False, True]
    for baseline, mean in (("policy", 1 / 3), ("all", 0.5)):
        made = make_estimator(Extension(name, {"std": "none", "baseline": baseline}))
        expected = [-mean, -mean, 1 - mean, 1 - mean, 1 - mean]
        assert made(batch).advantages.tolist() == pytest.approx(expected)


# RED ------------------------------------------------------------------------------------------------------------------


def red_batch(own: float, off: float, *rates: tuple[float, float], update: int = 1) -> Any:
    """Return groups of two own samples with these rewards and a given solution; entropies are `own` and `off` at every
    token."""
    samples, groups = [], []
    for number, rewards in enumerate(rates):
        name = f"g{number}"
        for n in range(2):
            samples.append(training_sample(f"{name}-{n}", [prompt([20]), action([30], [-1.0])], of=name))
        samples.append(training_sample(f"{name}-x", [prompt([20]), given([31, 32])], of=name))
        members = [member(f"{name}-{n}", {"r": value}) for n, value in enumerate(rewards)]
        groups.append(group(name, *members, member(f"{name}-x", {"r": 1.0})))
    batch = batch_of(samples, groups, update=update)
    at = batch.per_token(batch.external) > 0
    batch.table.columns["start_entropy"] = np.where(at, off, own).astype(np.float32)
    return batch


def test_red_imitates_what_the_policy_fails_with_the_weight_by_hand() -> None:
    """Accuracies 0, 1/2 and 1. Then own entropies change by 0.2 and those on given solutions by 0.8: the weight is 0.2
    / 0.8."""
    made = make_estimator(Extension("red", {"std": "none", "imitate_below": 0.5}))
    rates = ((0.0, 0.0), (1.0, 0.0), (1.0, 1.0))
    first = made(red_batch(1.0, 2.0, *rates))
    assert first.dropped == {5: "SOLVED", 8: "SOLVED"}
    assert first.metrics["imitation_weight"] == 1.0
    assert first.metrics["imitated"] == 1.0
    assert first.advantages.tolist()[4:6] == pytest.approx([0.5, -0.5]), "the given solution is in no baseline"
    second = made(red_batch(0.8, 2.8, *rates, update=2))
    assert second.sample_weights is not None
    assert second.sample_weights.tolist()[:3] == pytest.approx([1, 1, 0.25])


@pytest.mark.row("S039")
def test_the_weight_of_red_falls_if_the_entropy_changes_on_given_solutions() -> None:
    found = []
    for change in (0.1, 0.2, 0.4, 50.0):
        made = make_estimator(Extension("red"))
        made(red_batch(1.0, 2.0, (0.0, 0.0)))
        found.append(made(red_batch(0.8, 2.0 + change, (0.0, 0.0), update=2)).metrics["imitation_weight"])
    assert found == pytest.approx([2.0, 1.0, 0.5, 0.1], rel=1e-4)
    other = make_estimator(Extension("red", {"power": 1.0}))
    other(red_batch(1.0, 2.0, (0.0, 0.0)))
    assert other(red_batch(0.8, 2.1, (0.0, 0.0), update=2)).metrics["imitation_weight"] == pytest.approx(0.5, rel=1e-4)


def test_red_counts_a_refreshed_batch_once_and_restores_its_averages() -> None:
    made, again = (make_estimator(Extension("red")) for _ in range(2))
    made(red_batch(1.0, 2.0, (0.0, 0.0)))
    second = red_batch(0.8, 2.4, (0.0, 0.0), update=2)
    weight = made(second).metrics["imitation_weight"]
    assert (
        made(dataclasses.replace(second, repeat=1)).metrics["imitation_weight"]
        == weight
        == pytest.approx(0.5, rel=1e-4)
    )
    again.load_state(made.state())
    third = red_batch(0.9, 2.1, (0.0, 0.0), update=3)
    assert again(third).metrics == made(third).metrics


@pytest.mark.row("S039")
def test_red_drops_the_solution_of_a_solved_prompt_and_shifts_the_author_with_the_accuracy() -> None:
    """The recipe, with own accuracies 0, 1/2 and 1. The shares of the own samples are the accuracy of all tokens of a
    group."""
    chosen = read_recipe(find_recipe("red"))[1]["learner"]["estimator"]
    made = make_estimator(Extension(chosen["name"], chosen["options"]))
    found = made(red_batch(1.0, 2.0, (0.0, 0.0), (1.0, 0.0), (1.0, 1.0)))
    assert found.dropped == {8: "SOLVED"}
    assert found.columns["accuracy"].tolist() == pytest.approx([0.0] * 4 + [0.5] * 4 + [1.0] * 4)
    by_hand = (1 - 1 / 3) / np.sqrt(2 / 9)  # rewards 0, 0 and 1 of the given solution
    assert found.advantages.tolist()[2:4] == pytest.approx([by_hand] * 2, rel=1e-4)


def shifted(pi: float, accuracy: float, advantage: float) -> tuple[float, float, float]:
    """Return the loss of one given token, its gradient by log pi, and its ratio."""
    logprobs = torch.tensor([math.log(pi)], dtype=DOUBLE, requires_grad=True)
    columns = {
        "accuracy": torch.tensor([accuracy], dtype=DOUBLE),
        "source": torch.tensor([int(Source.DATASET)]),
        "advantages": torch.tensor([advantage], dtype=DOUBLE),
        "token_weight": torch.ones(1, dtype=DOUBLE),
        "token_weight/shifted_imitation": torch.ones(1, dtype=DOUBLE),
    }
    loss, stats = LossSum([LossTermChoice("shifted_imitation")])(LossInputs(logprobs, columns))
    return loss.item(), torch.autograd.grad(loss, logprobs)[0].item(), stats["author_ratio"].item()


@pytest.mark.parametrize(
    ("pi", "accuracy", "ratio"),
    [(0.2, 0.0, 1.0), (0.2, 0.5, 0.2 / 0.6), (0.2, 1.0, 0.2), (1e-12, 0.0, 1.0), (1e-12, 1.0, 1e-12)],
)
def test_a_given_token_is_imitated_where_the_policy_fails_and_reinforced_where_it_succeeds(
    pi: float, accuracy: float, ratio: float
) -> None:
    """The gradient by log pi is -A r: that of imitation for accuracy 0, however unlikely the token is."""
    assert shifted(pi, accuracy, 2.0) == pytest.approx((-2 * ratio, -2 * ratio, ratio))


@pytest.mark.row("S039")
def test_the_ratio_of_the_published_code_of_red() -> None:
    """Changes relative to the last batch: own 1.0 -> 0.8, given 2.0 -> 2.8, so |1 - 1.4| / |1 - 0.8| = 2."""
    options = {"relative": True, "decay": 0.0, "power": 1.0, "weight_min": 1.0, "weight_max": 7.0}
    made = make_estimator(Extension("red", options))
    made(red_batch(1.0, 2.0, (0.0, 0.0)))
    assert made(red_batch(0.8, 2.8, (0.0, 0.0), update=2)).metrics["imitation_weight"] == pytest.approx(2, rel=1e-4)
    assert made(red_batch(0.4, 2.8, (0.0, 0.0), update=3)).metrics["imitation_weight"] == 1.0, "the least"
    assert made(red_batch(0.39, 0.1, (0.0, 0.0), update=4)).metrics["imitation_weight"] == 7.0, "the largest"


@pytest.mark.row("S033")
def test_in_rl_plus_a_solution_that_alone_is_right_has_a_bounded_advantage() -> None:
    chosen = read_recipe(find_recipe("rl_plus"))[1]["learner"]["estimator"]
    found = make_estimator(Extension(chosen["name"], chosen["options"]))(red_batch(1.0, 2.0, (0.0, 0.0), (1.0, 0.0)))
    assert found.advantages.tolist() == pytest.approx([0, 0, 1, 1, 0.5, -0.5, 0.5, 0.5])


@pytest.mark.parametrize("recipe", ["rl_plus", "red", "grpo_imitation"])
def test_a_recipe_learns_a_given_solution(recipe: str) -> None:
    _, tree = read_recipe(find_recipe(recipe))
    config = config_from_dict(UpdateConfig, {**tree["learner"], "optimizer": {"lr": 3e-3, "warmup_updates": 0}})
    made = BatchTrainer(build_tiny_model(SMALL, seed=1), config, seed=7, sources=[Source.DATASET])
    samples, groups = with_solutions()
    for index, of in enumerate(groups):  # own samples fail
        groups[index] = replace(
            of,
            members=tuple(
                m if m.sample_id.startswith("given") else member(m.sample_id, {"correct": 0.0}) for m in of.members
            ),
        )
    solution = np.concatenate([s.token_ids for s in samples[-1].segments])
    before = made.score(solution)[3:].sum()
    for k in range(1, 9):
        result = made.update(k, samples, groups)
        assert reasons(result) == {None}
    assert made.score(solution)[3:].sum() > before + 3
