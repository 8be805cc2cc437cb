"""The learning port: what estimators, features, loss terms and update rules can do, each against values by hand or by
autograd."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig

from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.shared.config.objects import load_object
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.ledger_head import EMPTY
from rollmesh.shared.errors import ConfigError
from rollmesh.trainer.checkpoint import save_checkpoint
from rollmesh.trainer.checkpoint_files import CheckpointError, CheckpointPosition
from rollmesh.trainer.config import (
    FeatureChoice,
    LossTermChoice,
    OptimizerConfig,
    PackingConfig,
    ReferenceConfig,
    UpdateConfig,
)
from rollmesh.trainer.feature_pass import computed_features
from rollmesh.trainer.features import FeatureInputs, FeatureRequest
from rollmesh.trainer.losses.base import LossInputs, LossTerm
from rollmesh.trainer.model_files import published_state
from rollmesh.trainer.plugins import Plugins
from rollmesh.trainer.samples import DropReason, build_table
from rollmesh.trainer.trained_log import TrainedLog
from rollmesh.trainer.update import BatchTrainer, UpdateOutcome
from rollmesh.trainer.update_rules import UPDATE_RULES
from rollmesh.trainer.vocabulary_features import (
    Entropy,
    KeptLogprob,
    KeptMass,
    KeptOptions,
    MeanLogprob,
    NucleusEntropy,
    NucleusOptions,
)

from .builders import batch_of, minibatches, random_batch
from .port_parts import Squared, group_log_sum

PARTS = Path(__file__).with_name("port_parts.py")
SMALL = TinyModelConfig(hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48)
ONE = {"update_rule": minibatches(1), "optimizer": OptimizerConfig(lr=1e-3, warmup_updates=0)}


def part(name: str, **options: Any) -> Extension:
    return Extension(f"{PARTS}:{name}", options)


def term(name: str, weight: float = 1.0) -> LossTermChoice:
    return LossTermChoice(f"{PARTS}:{name}", weight=weight)


def trainer(seed: int = 7, **settings: Any) -> BatchTrainer:
    config = UpdateConfig(**{"estimator": part("Plain"), **ONE, **settings})
    return BatchTrainer(build_tiny_model(SMALL, seed=1), config, seed=seed, outputs=["entropy"])


def weights(made: BatchTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in published_state(made.model).items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


def inputs_of(*rows: list[float], token: int = 0) -> FeatureInputs:
    """Return the inputs for distributions given by their probabilities, with `token` chosen everywhere."""
    logits = torch.tensor(rows, dtype=torch.float64).log() + 3.0
    chosen = torch.full((len(rows),), token)
    logprobs = logits.log_softmax(-1).gather(-1, chosen[:, None]).squeeze(-1)
    return FeatureInputs(logits=logits, token_ids=chosen, logprobs=logprobs, hidden=None, columns={})


# Features -------------------------------------------------------------------------------------------------------------


def test_entropies_and_means_of_a_distribution_by_hand() -> None:
    made = inputs_of([0.5, 0.25, 0.125, 0.125])
    assert float(Entropy()(made)) == pytest.approx(1.75 * np.log(2))
    assert float(MeanLogprob()(made)) == pytest.approx(-(1 + 2 + 3 + 3) / 4 * np.log(2))
    # 0.75 of the mass is in the first two tokens: 2/3 and 1/3
    nucleus = NucleusEntropy(options=NucleusOptions(top_p=0.7))(made)
    assert float(nucleus) == pytest.approx(-(2 / 3) * np.log(2 / 3) - (1 / 3) * np.log(1 / 3))
    whole = NucleusEntropy(options=NucleusOptions(top_p=1.0))(made)
    assert float(whole) == pytest.approx(1.75 * np.log(2))


def test_kept_logprob_removes_unlikely_tokens_and_renormalizes() -> None:
    made = inputs_of([0.5, 0.25, 0.125, 0.125], token=1)
    assert float(KeptLogprob(options=KeptOptions(threshold=0.2))(made)) == pytest.approx(np.log(1 / 3))
    assert float(KeptLogprob(options=KeptOptions(threshold=0.3))(made)) == -np.inf
    assert float(KeptLogprob(options=KeptOptions(threshold=0.6))(made)) == -np.inf, "no token is left"
    assert float(KeptMass(options=KeptOptions(threshold=0.2))(made)) == pytest.approx(0.75)
    assert float(KeptMass(options=KeptOptions(threshold=0.6))(made)) == 0
    relative = KeptOptions(threshold=0.4, kind="relative")  # 0.4 * 0.5 = 0.2
    assert float(KeptLogprob(options=relative)(made)) == pytest.approx(np.log(1 / 3))


def test_the_nucleus_entropy_has_no_gradient_from_the_tail() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log().requires_grad_()
    made = FeatureInputs(logits=logits, token_ids=torch.tensor([0]), logprobs=torch.zeros(1), hidden=None, columns={})
    NucleusEntropy(options=NucleusOptions(top_p=0.7))(made).sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert logits.grad[0, 2:].tolist() == [0.0, 0.0]
    assert logits.grad[0, :2].abs().min() > 0


def test_features_are_computed_token_by_token_whatever_the_packing() -> None:
    made = trainer()
    samples, _ = random_batch()
    table = build_table(samples, update=1)
    requests = {"entropy_now": FeatureRequest(Entropy()), "both": FeatureRequest(Squared())}
    wide, narrow = (
        computed_features(made.model, table, requests, replace(made.forward_plan, packing=packing))
        for packing in (PackingConfig(row_tokens=64, micro_batch_tokens=size) for size in (64, 4096))
    )
    for name in requests:
        np.testing.assert_allclose(wide[name], narrow[name], atol=1e-5)
    assert wide["both"].shape == (int(table.lengths.sum()), 2)
    ids = table.sequences[0].token_ids
    logprobs = made.score(ids)[table.columns["position"][: table.lengths[0]]]
    np.testing.assert_allclose(wide["both"][: table.lengths[0], 0], logprobs**2, rtol=1e-4)


def test_an_estimator_reads_features_under_the_start_and_the_reference() -> None:
    made = trainer(estimator=part("Seeing"))
    module = _loaded("Seeing")
    module.batches.clear()
    samples, groups = random_batch()
    made.update(1, samples, groups)
    made.update(2, *random_batch(seed=2, step=1))
    first, second = module.batches
    np.testing.assert_allclose(first["proximal"], first["reference"], atol=1e-6)
    assert np.abs(second["proximal"] - second["reference"]).max() > 1e-4, "the reference stays at the initial weights"
    assert (first["start_entropy"] > 4).all()
    squares = first.first(first["gradient_square"])
    assert len(set(squares.tolist())) == len(samples)
    assert (squares > 0).all()


def _loaded(name: str) -> Any:
    return load_object(f"{PARTS}:{name}")


def test_gradient_squares_equal_those_of_autograd() -> None:
    module = _loaded("Seeing")
    module.batches.clear()
    made = trainer(estimator=part("Seeing"))
    expected = []
    samples, groups = random_batch()
    for sample in samples[:3]:
        ids = torch.as_tensor(np.concatenate([s.token_ids for s in sample.segments]), dtype=torch.long)
        mask = np.concatenate([np.zeros(s.num_tokens) if s.loss_mask is None else s.loss_mask for s in sample.segments])
        logprobs = made.model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)
        total = (logprobs * torch.as_tensor(mask[1:])).sum()
        gradients = torch.autograd.grad(total, list(made.model.parameters()), allow_unused=True)
        expected.append(sum(float(g.square().sum()) for g in gradients if g is not None))
    made.update(1, samples, groups)
    found = module.batches[0].first(module.batches[0]["gradient_square"])[:3]
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.parametrize("kind", ["initial", "path", "average"])
def test_references(kind: str, tmp_path: Path) -> None:
    other = build_tiny_model(SMALL, seed=5)
    other.save_pretrained(tmp_path)
    config = ReferenceConfig(kind=kind, path=str(tmp_path) if kind == "path" else "", decay=0.75)  # type: ignore[arg-type]
    made = trainer(estimator=part("Seeing"), reference=config)
    before = weights(made)
    made.update(1, *random_batch())
    assert made.reference is not None
    found = published_state(made.reference.model)
    expected = {
        "initial": before,
        "path": published_state(other),
        "average": {name: 0.75 * old + 0.25 * published_state(made.model)[name] for name, old in before.items()},
    }[kind]
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor)


def test_a_reference_that_cannot_be_used_is_an_error_of_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`learner.reference`: the reference model \(path\) cannot be loaded"):
        trainer(estimator=part("Seeing"), reference=ReferenceConfig(kind="path", path=str(tmp_path / "absent")))
    small = build_tiny_model(SMALL, seed=5)
    small.resize_token_embeddings(64)
    small.save_pretrained(tmp_path / "small")
    with pytest.raises(ConfigError, match="vocabulary of the reference has 64 tokens, that of the policy"):
        trainer(estimator=part("Seeing"), reference=ReferenceConfig(kind="path", path=str(tmp_path / "small")))
    shape = GPTNeoXConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48
    )
    AutoModelForCausalLM.from_config(shape).save_pretrained(tmp_path / "neox")  # type: ignore[no-untyped-call]
    with pytest.raises(ConfigError, match="architecture of the reference is gpt_neox, that of the policy "):
        trainer(estimator=part("Seeing"), reference=ReferenceConfig(kind="path", path=str(tmp_path / "neox")))


def test_a_feature_of_the_configuration_is_a_column() -> None:
    choice = FeatureChoice(f"{PARTS}:Squared", under="start")
    made = trainer(features={"mine": choice})
    samples, groups = random_batch()
    seen: list[LossInputs] = []
    spied = made.plugins.loss.terms["ppo_clip"]
    made.plugins.loss._terms[0].loss = _Spy(spied, seen)
    made.update(1, samples, groups)
    assert seen[0]["mine"].shape == (len(seen[0].logprobs), 2)


class _Spy(LossTerm):
    needs = ()

    def __init__(self, inner: Any, seen: list[LossInputs]) -> None:
        self.inner, self.seen = inner, seen

    def __call__(self, inputs: LossInputs) -> Any:
        self.seen.append(inputs)
        return self.inner(inputs)


# Estimators -----------------------------------------------------------------------------------------------------------


def test_an_estimator_drops_weighs_masks_and_reports() -> None:
    made = trainer(estimator=part("Shaped"))
    samples, groups = random_batch()
    result = made.update(1, samples, groups)
    assert [v.reason for v in result.verdicts[:2]] == ["PIVOT", None]
    second_turns = sum(int(s.segments[3].num_trainable) for s in samples[1:])
    assert result.metrics["tokens/trained"] == second_turns
    assert result.metrics["estimator/seen"] == 1
    assert result.metrics["estimator/last_lr"] == -1
    assert made.update(2, *random_batch(seed=2, step=1)).metrics["estimator/last_lr"] == 1e-3


def test_a_malformed_estimate_drops_the_samples_and_not_the_run(caplog: pytest.LogCaptureFixture) -> None:
    samples, groups = random_batch()
    result = trainer(estimator=part("Broken")).update(1, samples, groups)
    assert [v.reason for v in result.verdicts[:3]] == [DropReason.NOT_FINITE_ADVANTAGE] * 2 + [None]
    assert result.metrics["estimator/malformed"] == 2
    made = trainer(estimator=part("Short"))
    before = weights(made)
    result = made.update(1, samples, groups)
    assert result.outcome is UpdateOutcome.SKIPPED
    assert {v.reason for v in result.verdicts} == {DropReason.WRONG_SHAPE}
    assert re.search(r"wrong shape, .*: update=1 `advantages` \[\d+\], expected \[\d+\];", caplog.text)
    assert same(before, weights(made))


def test_a_part_cannot_need_what_is_computed_after_it() -> None:
    with pytest.raises(ValueError, match=r"the estimator Late needs `current`, which is computed under `step`, after"):
        trainer(estimator=part("Late"))


def test_one_name_for_two_features_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"estimator Seeing requests the feature `start_entropy`, which names another"):
        trainer(estimator=part("Seeing"), features={"start_entropy": FeatureChoice("mean_logprob")})


# Loss terms -----------------------------------------------------------------------------------------------------------


def _gradients(made: BatchTrainer, samples: Any, groups: Any) -> dict[str, torch.Tensor]:
    caught: dict[str, torch.Tensor] = {}

    def catch(*_: object) -> None:
        caught.update({n: p.grad.clone() for n, p in made.model.named_parameters() if p.grad is not None})

    made.optimizer.register_step_pre_hook(catch)
    made.update(1, samples, groups)
    return caught


@pytest.mark.parametrize("micro", [64, 4096])
def test_a_coupled_loss_has_the_exact_gradient_whatever_the_split(micro: int) -> None:
    samples, groups = random_batch()
    settings: dict[str, Any] = {
        "loss": (term("GroupLogSum"),),
        "packing": PackingConfig(row_tokens=64, micro_batch_tokens=micro),
        "optimizer": OptimizerConfig(clip_norm=1e9),
    }
    found = _gradients(trainer(**settings), samples, groups)
    plain = trainer()
    table = build_table(samples, update=1)
    logprobs = []
    for sequence in table.sequences:
        ids = torch.as_tensor(sequence.token_ids, dtype=torch.long)
        every = plain.model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)
        logprobs.append(every[torch.as_tensor(sequence.target_mask[1:] == 1)])
    columns = {name: torch.as_tensor(table.columns[name]) for name in ("sample", "group")}
    value = group_log_sum(torch.cat(logprobs), columns)
    value.backward()  # type: ignore[no-untyped-call]
    assert float(value.detach()) != 0
    for name, parameter in plain.model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-6, rtol=1e-3)


def test_a_coupled_loss_reports_its_value_and_statistics() -> None:
    samples, groups = random_batch()
    made = trainer(loss=(term("GroupLogSum"),))
    result = made.update(1, samples, groups)
    # 4 groups of 4 samples with mean log-probs near -4.7: 4 * (log 4 - 4.7)
    assert result.metrics["loss"] == pytest.approx(4 * (np.log(4) - 4.7), abs=0.5)
    assert result.metrics["seen_share"] == 1.0


def test_a_feature_with_gradient_changes_the_weights() -> None:
    batch = random_batch()
    made = trainer(loss=(term("EntropyBonus"),), optimizer=OptimizerConfig(lr=1e-2, warmup_updates=0))
    before = made.update(1, *batch).metrics["entropy"]
    for k in range(2, 6):
        after = made.update(k, *batch).metrics["entropy"]
    assert after > before


def test_a_module_is_trained_and_never_published() -> None:
    made = trainer(loss=(term("Head"),), optimizer=OptimizerConfig(lr=1e-2, warmup_updates=0))
    before = weights(made)
    batch = random_batch()
    errors = [made.update(k, *batch).metrics["loss"] for k in range(1, 9)]
    assert errors[-1] < 0.7 * errors[0]
    assert same(before, weights(made)), "the head reads detached states"
    assert set(published_state(made.model)) == set(before)


# Update rules ---------------------------------------------------------------------------------------------------------


def test_a_rule_orders_steps_by_turn_and_refreshes_the_proximal_policy() -> None:
    rule = _loaded("Backwards")
    rule.proximal.clear()
    made = trainer(update_rule=part("Backwards"))
    samples, groups = random_batch()
    result = made.update(1, samples, groups)
    assert result.metrics["steps_taken"] == 2
    assert result.used_ids == [s.sample.sample_id for s in samples]
    first, second = rule.proximal
    assert np.abs(first - second).max() > 1e-4


def test_the_factor_of_a_rule_scales_the_learning_rate() -> None:
    samples, groups = random_batch()
    made = trainer(update_rule=part("Backwards", lr_factor=0.0))
    before = weights(made)
    made.update(1, samples, groups)
    assert same(before, weights(made))


def test_factors_of_the_advantages_scale_the_loss_and_the_rate_is_reported() -> None:
    samples, groups = random_batch()
    made = trainer(update_rule=part("Backwards", advantage_factor=0.0, lr_factor=0.5))
    before = weights(made)
    result = made.update(1, samples, groups)
    assert same(before, weights(made))
    assert result.metrics["lr_factor"] == 0.5


def test_epochs_repeat_the_batch_within_one_update() -> None:
    samples, groups = random_batch()
    made = trainer(update_rule=minibatches(2, epochs=3))
    result = made.update(1, samples, groups)
    assert result.metrics["steps_taken"] == 6
    assert len(result.used_ids) == len(samples) == len(set(result.used_ids))


def test_minibatches_of_whole_groups_never_cut_one() -> None:
    samples, groups = random_batch(num_groups=5, group_size=3)
    samples = [s for i, s in enumerate(samples) if i % 7]  # groups of different sizes
    batch = batch_of(samples, groups)
    of_sample = batch.first(batch["group"])
    cuts = set()
    for seed in range(20):
        rule = UPDATE_RULES.make(minibatches(2, epochs=2, whole_groups=True))
        steps = [step.samples for step in rule.steps(batch, np.random.default_rng(seed))]
        assert len(steps) == 4
        for one, other in (steps[:2], steps[2:]):
            assert sorted([*one, *other]) == list(range(len(samples)))
            assert not set(of_sample[one]) & set(of_sample[other])
        cuts.add(tuple(steps[0]))
    assert len(cuts) > 5, "the groups of a step are random"
    more = UPDATE_RULES.make(minibatches(9, whole_groups=True)).steps(batch, np.random.default_rng(0))
    assert len(list(more)) == 5, "at most one step per group"


@pytest.mark.parametrize(
    "rule",
    [
        minibatches(2),
        Extension("ess_minibatches", {"num_minibatches": 2}),
        Extension("turn_by_turn"),
        part("Backwards"),
    ],
    ids=lambda rule: rule.short_name,
)
def test_a_rule_that_cuts_groups_is_rejected_for_a_term_that_compares_them(rule: Extension) -> None:
    message = rf"the loss term drpo compares.*the update rule {rule.short_name} may cut them; set.*whole_groups: true"
    with pytest.raises(ValueError, match=message):
        trainer(loss=(LossTermChoice("drpo"),), update_rule=rule)


@pytest.mark.parametrize("rule", [minibatches(1), minibatches(2, whole_groups=True)])
def test_a_term_that_compares_groups_trains_with_a_rule_that_keeps_them(rule: Extension) -> None:
    made = trainer(loss=(LossTermChoice("drpo", {"length_max": 64}),), update_rule=rule)
    assert made.update(1, *random_batch()).outcome is UpdateOutcome.APPLIED


# Memory ---------------------------------------------------------------------------------------------------------------


def test_a_checkpoint_holds_memory_modules_and_the_average(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "estimator": part("Shaped"),
        "loss": (LossTermChoice("ppo_clip"), term("Head", 0.1)),
        "features": {"old": FeatureChoice("mean_logprob", under="reference")},
        "reference": ReferenceConfig(kind="average", decay=0.5),
    }
    made = trainer(**settings)
    made.update(1, *random_batch(seed=1))
    log = TrainedLog()
    log.append(1, [], incarnation=0, outcome="APPLIED")
    place = CheckpointPosition(
        update=1, policy="main", incarnation=0, digest=log.digest, seed=7, head=EMPTY, config_digest=""
    )
    saved = save_checkpoint(tmp_path, made, None, log, place)
    again = trainer(**settings)
    saved.restore(again)
    results = [each.update(2, *random_batch(seed=2, step=1)) for each in (made, again)]
    assert results[0] == results[1]
    assert results[1].metrics["estimator/seen"] == 2
    assert same(weights(made), weights(again))
    assert same(dict(made.modules.state_dict()), dict(again.modules.state_dict()))
    assert made.reference is not None
    assert again.reference is not None
    assert same(published_state(made.reference.model), published_state(again.reference.model))


def test_a_checkpoint_of_another_recipe_is_rejected_with_the_parts_that_differ(tmp_path: Path) -> None:
    shaped: dict[str, Any] = {"estimator": part("Shaped"), "loss": (LossTermChoice("ppo_clip"), term("Head", 0.1))}
    made = trainer(**shaped)
    made.update(1, *random_batch(seed=1))
    log = TrainedLog()
    log.append(1, [], incarnation=0, outcome="APPLIED")
    place = CheckpointPosition(
        update=1, policy="main", incarnation=0, digest=log.digest, seed=7, head=EMPTY, config_digest=""
    )
    saved = save_checkpoint(tmp_path, made, None, log, place)
    average: dict[str, Any] = {
        "features": {"old": FeatureChoice("mean_logprob", under="reference")},
        "reference": ReferenceConfig(kind="average"),
    }
    for settings, needed in (
        ({}, "no part"),
        ({"loss": (LossTermChoice("siren"),)}, "loss term siren"),
        (shaped | average, "estimator Shaped, the module of Head, the moving average"),
    ):
        other = trainer(**settings)
        message = (
            r"does not fit the configured model, optimizer or recipe: it has the memory of estimator Shaped, the module of Head, and the "
            f"configured recipe needs that of {needed}; resume with the recipe with which it was written"
        )
        with pytest.raises(CheckpointError, match=message):
            saved.restore(other)
        assert other.step == 0


def _empty_head() -> Any:
    from rollmesh.shared.domain.ledger_head import EMPTY

    return EMPTY


def test_needs_tell_outputs_of_the_engine_from_features() -> None:
    plugins = Plugins(UpdateConfig(estimator=part("Seeing"), loss=(LossTermChoice("high_entropy"),)))
    assert plugins.outputs == ("entropy",)
    assert set(plugins.requests) == {"proximal", "reference", "start_entropy"}
    assert plugins.needs_gradients
