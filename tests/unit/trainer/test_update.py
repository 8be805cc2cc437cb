"""The update: determinism, accumulation, the non-finite guard, verdicts."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from transformers import PreTrainedModel

from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.mesh.config import MeshConfig
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import (
    TRAINED_MEASURES,
    FinishReason,
    GroupContext,
    Outcome,
    SamplingParams,
    Source,
    TrainingSample,
)
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import LearnerCodeFailed
from rollmesh.trainer.batch import UpdateBatch
from rollmesh.trainer.config import LossTermChoice, Normalization, OptimizerConfig, PackingConfig, UpdateConfig
from rollmesh.trainer.model_files import published_state
from rollmesh.trainer.recipe import recipe_names
from rollmesh.trainer.samples import DropReason, build_table, drop_reason
from rollmesh.trainer.update import BatchTrainer, UpdateOutcome

from .builders import action, group, member, minibatches, prompt, random_batch, training_sample
from .mixtures import recorded, tiny_mixture
from .representatives import REPRESENTATIVES

SMALL = TinyModelConfig(hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48)


def trainer(config: UpdateConfig | None = None, *, seed: int = 7) -> BatchTrainer:
    config = config or UpdateConfig()
    model = tiny_mixture() if config.router_replay else build_tiny_model(SMALL, seed=1)
    return BatchTrainer(model, config, seed=seed, outputs=["entropy", "routed_experts"])


def weights(of: BatchTrainer | PreTrainedModel) -> dict[str, torch.Tensor]:
    model = of.model if isinstance(of, BatchTrainer) else of
    return {name: tensor.clone() for name, tensor in published_state(model).items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


def test_update_changes_weights_and_accounts_for_every_sample() -> None:
    made = trainer()
    before = weights(made)
    samples, groups = random_batch()
    groups[0] = replace(groups[0], task="sums/1", labels={"source": "sums"})
    result = made.update(1, samples, groups)
    assert result.outcome is UpdateOutcome.APPLIED
    assert result.used_ids == [s.sample.sample_id for s in samples]
    assert made.step == 1
    assert not same(before, weights(made))
    assert result.metrics["steps_taken"] == 2
    assert result.metrics["tokens/trained"] == sum(s.num_trainable for t in samples for s in t.segments)
    assert result.metrics["lag/0/tokens"] == result.metrics["tokens/trained"]
    assert result.metrics["reward/correct"] == 0.5
    assert result.metrics["source/sums/groups_share"] == 1 / len(groups)
    assert all(np.isfinite(v) for v in result.metrics.values())


def batches_of(recipe: UpdateConfig, num: int) -> list[tuple[list[TrainingSample], list[GroupContext]]]:
    """Return the batches of the first updates of a recipe, of two groups."""
    batches = [random_batch(2, seed=k, step=k - 1) for k in range(1, num + 1)]
    if recipe.router_replay:
        rng = np.random.default_rng(0)
        batches = [([recorded(sample, rng) for sample in samples], groups) for samples, groups in batches]
    return batches


@pytest.mark.parametrize("name", [name for name in recipe_names() if name not in REPRESENTATIVES])
def test_a_recipe_makes_an_update(name: str) -> None:
    recipe = config_from_dict(MeshConfig, {"recipe": name}).learner
    result = trainer(recipe).update(1, *batches_of(recipe, 1)[0])
    assert all(np.isfinite(value) for value in result.metrics.values())


@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_same_inputs_and_seed_give_the_same_weights_bit_for_bit(name: str) -> None:
    recipe = config_from_dict(MeshConfig, {"recipe": name}).learner
    one, two = trainer(recipe), trainer(recipe)
    torch.manual_seed(1)
    results = []
    for made in (one, two):
        results.append([made.update(k, *batch) for k, batch in enumerate(batches_of(recipe, 2), 1)])
        torch.manual_seed(99)  # the global generator has no effect
    assert same(weights(one), weights(two))
    assert results[0] == results[1]


def test_another_seed_splits_minibatches_otherwise() -> None:
    one, two = trainer(seed=1), trainer(seed=2)
    for made in (one, two):
        made.update(1, *random_batch())
    assert not same(weights(one), weights(two))


@pytest.mark.parametrize("normalization", list(Normalization))
@pytest.mark.parametrize(
    "terms", [("ppo_clip",), ("policy_gradient",), ("high_entropy",), ("ppo_clip", "policy_gradient")]
)
def test_accumulated_micro_batches_equal_one_big_batch(terms: tuple[str, ...], normalization: Normalization) -> None:
    samples, groups = random_batch()
    whole = UpdateConfig(
        loss=tuple(LossTermChoice(term) for term in terms),
        normalization=normalization,
        normalization_tokens=32,
        update_rule=minibatches(1),
        packing=PackingConfig(row_tokens=64, micro_batch_tokens=9999),
    )
    split = msgspec.structs.replace(whole, packing=PackingConfig(row_tokens=64, micro_batch_tokens=64))
    gradients = [_gradients(config, samples, groups) for config in (whole, split)]
    assert max(float(g.abs().max()) for g in gradients[0].values()) > 1e-3
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=2e-7, rtol=1e-4)


def _gradients(config: UpdateConfig, samples: list[TrainingSample], groups: list) -> dict[str, torch.Tensor]:  # type: ignore[type-arg]
    """Return the gradients just before the optimizer step, from a step hook."""
    made = trainer(config)
    caught: dict[str, torch.Tensor] = {}

    def catch(*_: object) -> None:
        caught.update({n: p.grad.clone() for n, p in made.model.named_parameters() if p.grad is not None})

    made.optimizer.register_step_pre_hook(catch)
    made.update(1, samples, groups)
    return caught


def test_an_update_makes_good_tokens_likelier_and_bad_ones_less_likely() -> None:
    made = trainer(UpdateConfig(update_rule=minibatches(1), optimizer=OptimizerConfig(lr=1e-2, warmup_updates=0)))
    start, good, bad = prompt([20, 21, 22]), [30, 31], [40, 41]
    before = [made.score(np.array([20, 21, 22, *tail], np.int32))[3:].sum() for tail in (good, bad)]
    logprobs = [made.score(np.array([20, 21, 22, *tail], np.int32))[3:] for tail in (good, bad)]
    samples = [
        training_sample(i, [start, action(tail, lp.tolist())])
        for i, tail, lp in (("good", good, logprobs[0]), ("bad", bad, logprobs[1]))
    ]
    result = made.update(1, samples, [group("g0", member("good", {"r": 1.0}), member("bad", {"r": 0.0}))])
    after = [made.score(np.array([20, 21, 22, *tail], np.int32))[3:].sum() for tail in (good, bad)]
    assert after[0] > before[0]
    assert after[1] < before[1]
    assert result.metrics["kl"] == pytest.approx(0.0, abs=1e-6)
    assert result.metrics["ess"] == pytest.approx(1.0, abs=1e-5)


def test_a_non_finite_gradient_skips_the_update_and_touches_nothing() -> None:
    made = trainer(UpdateConfig(update_rule=minibatches(2)))
    samples, groups = random_batch()
    made.update(1, samples, groups)
    before, moments = weights(made), _moments(made)
    poisoned = [replace(s, sample=replace(s.sample, weight=float("inf"))) for s in samples]
    result = made.update(2, poisoned, groups)
    assert result.outcome is UpdateOutcome.SKIPPED
    assert {v.reason for v in result.verdicts} == {DropReason.NON_FINITE}
    assert result.used_ids == []
    assert made.step == 2
    assert same(before, weights(made))
    assert all(torch.equal(a, b) for a, b in zip(moments, _moments(made), strict=True))


def _moments(made: BatchTrainer) -> list[torch.Tensor]:
    return [s[key].clone() for s in made.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]


def test_only_the_samples_of_a_non_finite_minibatch_are_dropped() -> None:
    made = trainer(UpdateConfig(update_rule=minibatches(2)))
    samples, groups = random_batch()
    samples[3] = replace(samples[3], sample=replace(samples[3].sample, weight=float("inf")))
    result = made.update(1, samples, groups)
    dropped = [v.sample_id for v in result.verdicts if v.reason is DropReason.NON_FINITE]
    assert result.outcome is UpdateOutcome.APPLIED
    assert len(dropped) == len(samples) // 2
    assert samples[3].sample.sample_id in dropped
    assert all(torch.isfinite(t).all() for t in weights(made).values())


def test_untrainable_samples_are_dropped_with_their_reason() -> None:
    good = [prompt([20, 21]), action([30, 31], [-4.0, -4.0])]
    no_logprobs = replace(good[1], logprobs=None)
    bad_logprobs = replace(good[1], logprobs=np.array([np.nan, -1], np.float32))
    masked = replace(good[1], loss_mask=np.zeros(2, np.uint8))
    cases = {
        "ok": (good, True, None),
        "off": (good, False, DropReason.NOT_TRAINABLE),
        "masked": ([good[0], masked], True, DropReason.NO_TRAINED_TOKENS),
        "nolp": ([good[0], no_logprobs], True, DropReason.NO_LOGPROBS),
        "nan": ([good[0], bad_logprobs], True, DropReason.NO_LOGPROBS),
        "long": ([prompt([20] * 600), good[1]], True, DropReason.TOO_LONG),
        "first": ([action([30, 31], [-4.0, -4.0])], True, DropReason.NOTHING_BEFORE),
        "unknown": ([prompt([20, 9999]), good[1]], True, DropReason.UNKNOWN_TOKEN),
        "negative": ([prompt([20, -1]), good[1]], True, DropReason.UNKNOWN_TOKEN),
        "short": ([good[0], replace(good[1], logprobs=np.zeros(1, np.float32))], True, DropReason.MALFORMED),
        "mask": ([good[0], replace(good[1], loss_mask=np.full(2, 3, np.uint8))], True, DropReason.MALFORMED),
        "infra": (good, True, DropReason.UNSCORED),
        "other": (
            [good[0], replace(good[1], version=PolicyVersion(policy="other", step=0))],
            True,
            DropReason.OTHER_POLICY,
        ),
        "unstamped": ([good[0], replace(good[1], version=None)], True, DropReason.OTHER_POLICY),
        "peer": ([good[0], replace(good[1], source=Source.PEER)], True, DropReason.SOURCE_NOT_ADMITTED),
        "replay": ([good[0], good[1], replace(good[1], source=Source.REPLAY)], True, DropReason.SOURCE_NOT_ADMITTED),
        "unmasked": ([good[0], replace(masked, source=Source.PEER), good[1]], True, None),
    }
    samples = [training_sample(i, segments, trainable=on) for i, (segments, on, _) in cases.items()]
    members = [
        member(i, {"r": float(n % 2)}, outcome=Outcome.INFRA_FAILURE if i == "infra" else Outcome.OK)
        for n, i in enumerate(cases)
    ]
    result = trainer().update(1, samples, [group("g0", *members)])
    assert {v.sample_id: v.reason for v in result.verdicts} == {i: reason for i, (_, _, reason) in cases.items()}


def test_a_loss_drops_samples_without_the_output_that_it_needs() -> None:
    samples, groups = random_batch()
    bare = [replace(s, arrays={}) for s in samples[0].segments]
    short = [replace(s, arrays={"entropy": np.zeros(1, np.float32)}) for s in samples[1].segments]
    samples[:2] = [replace(samples[0], segments=tuple(bare)), replace(samples[1], segments=tuple(short))]
    result = trainer(UpdateConfig(loss=(LossTermChoice("high_entropy"),))).update(1, samples, groups)
    assert [v.reason for v in result.verdicts[:3]] == [DropReason.NO_OUTPUT, DropReason.MALFORMED, None]
    assert 0.2 <= result.metrics["high_entropy_share"] < 0.5
    assert trainer().update(1, samples, groups).verdicts[0].reason is None, "ppo_clip does not need it"


def test_a_loss_that_needs_an_output_which_the_run_does_not_record_is_rejected() -> None:
    config = UpdateConfig(loss=(LossTermChoice("high_entropy"),))
    with pytest.raises(ValueError, match=r"`rollout.outputs` must contain entropy, which the loss needs, got \[\]"):
        BatchTrainer(build_tiny_model(SMALL, seed=1), config, seed=1)


def test_an_update_without_usable_samples_is_skipped_but_counts() -> None:
    made = trainer()
    before = weights(made)
    result = made.update(1, [], [])
    assert result.outcome is UpdateOutcome.SKIPPED
    assert made.step == 1
    assert same(before, weights(made))


def test_updates_must_follow_each_other() -> None:
    made = trainer()
    with pytest.raises(ValueError, match="update 2 does not follow step 0"):
        made.update(2, [], [])


def test_table_reads_lag_temperature_and_truncation_from_each_segment() -> None:
    params = SamplingParams(temperature=0.5, top_p=0.9)
    segments = [prompt([20, 21]), action([30], [-1.0], step=1), prompt([22]), action([31, 32], [-2.0, -3.0], step=3)]
    segments[1] = replace(segments[1], finish=FinishReason.STOP)
    made = training_sample("s", segments, params=params)
    assert drop_reason(made, context_max=10, vocab_size=112) is None
    table = build_table([made], update=5)
    assert table.columns["lag"].tolist() == [3, 1, 1]
    assert table.columns["temperature"].tolist() == [0.5, 0.5, 0.5]
    assert table.columns["truncated"].tolist() == [1, 1, 1]
    assert table.columns["behavior"].tolist() == [-1, -2, -3]
    assert table.columns["segment"].tolist() == [1, 3, 3]
    assert table.columns["turn"].tolist() == [0, 1, 1]
    assert table.columns["position"].tolist() == [2, 4, 5]
    assert table.columns["source"].tolist() == [Source.POLICY] * 3
    assert table.sequences[0].target_mask.tolist() == [0, 0, 1, 0, 1, 1]


def test_greedy_samples_are_compared_with_the_plain_model() -> None:
    made = training_sample("s", [prompt([20]), action([30], [-1.0])], params=SamplingParams(temperature=0.0))
    table = build_table([made], update=1)
    assert table.columns["temperature"].tolist() == [1.0]
    assert table.columns["truncated"].tolist() == [0.0]


def test_the_entropy_is_that_of_the_distribution_sampled_from() -> None:
    hot, cold = (
        trainer().update(
            1,
            [
                training_sample(
                    "s", [prompt([20]), action([30, 31], [-4.0, -4.0])], params=SamplingParams(temperature=t)
                )
            ],
            [group("g0", member("s", {"r": 1.0}))],
        )
        for t in (1.0, 0.01)
    )
    assert hot.metrics["entropy"] > 4.0
    assert cold.metrics["entropy"] < 3.0


def test_exported_weights_are_the_weights(tmp_path: Path) -> None:
    made = trainer()
    made.update(1, *random_batch())
    made.export_weights(tmp_path / "a.safetensors")
    made.export_weights(tmp_path / "b.safetensors")
    assert same(weights(made), load_file(tmp_path / "a.safetensors"))
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


# Measurements on groups -----------------------------------------------------------------------------------------------


def test_the_measurements_of_a_group_are_means_over_its_used_tokens_by_hand() -> None:
    config = UpdateConfig(estimator=Extension("grpo", {"std": "none"}), update_rule=minibatches(1))
    made = trainer(config)
    tokens = {"a": [20, 21, 22], "b": [30], "c": [40, 41], "d": [50]}
    samples = []
    for name, ids in tokens.items():
        ratio = {"a": 0.0, "b": 0.5}.get(name, 0.25)  # log of pi / mu
        path = np.array([13, 14, *ids], np.int32)
        logprobs = made.score(path)[2:] - ratio
        samples.append(
            training_sample(
                name, [prompt([13, 14]), action(ids, logprobs.tolist())], of="gab" if name in "ab" else "gcd"
            )
        )
    samples[3] = replace(samples[3], sample=replace(samples[3].sample, trainable=False))
    groups = [
        group("gab", member("a", {"correct": 1.0}), member("b", {"correct": 0.0})),
        group("gcd", member("c", {"correct": 1.0}), member("d", {"correct": 0.2})),
    ]
    first, second = made.update(1, samples, groups).groups
    assert (first.group, first.num_tokens, second.group, second.num_tokens) == ("gab", 4, "gcd", 2)
    assert first.mean_abs_advantage == pytest.approx(0.5)
    assert first.policy_loss == pytest.approx((3 * -0.5 + 0.5 * np.exp(0.5)) / 4, rel=1e-4)
    assert second.mean_abs_advantage == pytest.approx(0.4)
    assert second.policy_loss == pytest.approx(-0.4 * np.exp(0.25), rel=1e-4)


def test_a_token_of_several_steps_counts_once_as_in_its_first() -> None:
    samples, groups = random_batch()
    once = trainer(UpdateConfig(update_rule=minibatches(1))).update(1, samples, groups)
    often = trainer(UpdateConfig(update_rule=minibatches(1, epochs=3))).update(1, samples, groups)
    assert often.metrics["tokens/trained"] == 3 * once.metrics["tokens/trained"]
    assert often.groups == once.groups
    assert len(once.groups) == 4


def measuring(measures: Callable[[UpdateBatch], Any], config: UpdateConfig | None = None) -> BatchTrainer:
    """Return a trainer whose estimator also reports these measures."""
    made = trainer(config)
    estimator = made.plugins.estimator
    made.plugins.estimator = lambda batch: dataclasses.replace(estimator(batch), measures=measures(batch))  # type: ignore[assignment]
    return made


def test_the_numbers_of_an_estimator_are_with_those_of_the_trainer() -> None:
    samples, groups = random_batch()
    made = measuring(lambda batch: {"g0": {"members": 4, "repeat": batch.repeat}, "g1": {"members": np.nan}})
    found = {g.group: dict(g.measures) for g in made.update(1, samples, groups).groups}
    assert {key: found["g0"].pop(key) for key in ("members", "repeat")} == {"members": 4.0, "repeat": 0.0}
    assert len(found) == 4
    assert all(tuple(numbers) == TRAINED_MEASURES for numbers in found.values())


def test_the_measures_of_the_first_estimate_of_an_update_count() -> None:
    rule = Extension("ess_minibatches", {"refresh": True})
    repeats: list[int] = []

    def repeat(batch: UpdateBatch) -> dict[str, dict[str, float]]:
        repeats.append(batch.repeat)
        return {group.group: {"repeat": batch.repeat} for group in batch.groups}

    measured = measuring(repeat, UpdateConfig(update_rule=rule)).update(1, *random_batch()).groups
    assert len(repeats) > 1
    assert {g.measures["repeat"] for g in measured} == {0.0}


@pytest.mark.parametrize(
    ("measures", "message"),
    [
        ({"g9": {"a": 1.0}}, "must name groups of the batch, got 'g9'"),
        ({"g0": {"two words": 1.0}}, "must have 1 to 64 characters of .*, got 'two words'"),
        ({"g0": {"": 1.0}}, "must have 1 to 64 characters"),
        ({"g0": {"num_tokens": 1.0}}, "must not have 'num_tokens'.*choose another name"),
        ({"g0": {f"m{n}": 1.0 for n in range(14)}}, "must have at most 13 entries, got 14"),
    ],
)
def test_a_measure_that_a_commit_cannot_have_is_an_error_of_the_estimator(measures: Any, message: str) -> None:
    with pytest.raises(LearnerCodeFailed, match=message):
        measuring(lambda _: measures).update(1, *random_batch())


def test_a_skipped_update_and_a_group_without_used_samples_have_no_measurements() -> None:
    samples, groups = random_batch()
    left = [replace(s, sample=replace(s.sample, trainable=s.group != "g1")) for s in samples]
    assert [g.group for g in trainer().update(1, left, groups).groups] == ["g0", "g2", "g3"]
    none = [replace(s, sample=replace(s.sample, trainable=False)) for s in samples]
    assert trainer().update(1, none, groups).groups == ()
