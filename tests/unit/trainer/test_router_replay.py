"""Router replay: the policy's forward sends tokens to the experts that an engine has recorded."""

from __future__ import annotations

from dataclasses import replace as changed
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from rollmesh.app.checks.model_checks import check_records
from rollmesh.app.config import TrainConfig
from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.services.inference.engines.torch.plain_runner import PlainRunner
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.domain.trajectory import TrainingSample
from rollmesh.shared.errors import ConfigError
from rollmesh.trainer.config import LossTermChoice, OptimizerConfig, PackingConfig, UpdateConfig
from rollmesh.trainer.feature_pass import computed_features, forward_features
from rollmesh.trainer.features import BUILT_IN
from rollmesh.trainer.forward import ForwardMode, ForwardPlan
from rollmesh.trainer.model_files import published_state
from rollmesh.trainer.model_layers import checkpoint_layers
from rollmesh.trainer.packing import pack
from rollmesh.trainer.router_replay import DIFFERING, RouterReplay
from rollmesh.trainer.routes import RouteShape, routes_of
from rollmesh.trainer.samples import DropReason, TokenTable, build_table, drop_reason
from rollmesh.trainer.self_test import prepare
from rollmesh.trainer.update import BatchTrainer

from .builders import action, minibatches, prompt, random_batch, training_sample
from .mixtures import EXPERTS, TOP_K, recorded, tiny_mixture

PACKING = PackingConfig(row_tokens=96, micro_batch_tokens=192)
SHARED = PackingConfig(row_tokens=96, micro_batch_tokens=192, shared_row_tokens=96)
ONE = RouteShape(experts=(4,), chosen=(2,), layers=(0,), num_layers=1)


def with_records(samples: list[TrainingSample], seed: int = 3) -> list[TrainingSample]:
    """Return the samples of a mixture of the tests with random records of all sampled tokens."""
    rng = np.random.default_rng(seed)
    return [recorded(sample, rng) for sample in samples]


def logprobs_alone(model: PreTrainedModel, table: TokenTable) -> Tensor:
    """Return the log-probs [M] of the table's tokens, one sequence at a time, by an independent replay: the gate of
    each layer returns the softmax over the recorded logits, and its own choice for the rows without a record."""
    found = []
    layers: Any = model.base_model.layers
    for sequence in table.sequences:
        assert sequence.routes is not None
        experts = torch.split(torch.from_numpy(sequence.routes.experts.astype(np.int64)), TOP_K, dim=-1)
        has = torch.from_numpy(sequence.routes.recorded)[:, None]
        gates = [layer.mlp.gate for layer in layers]
        for gate, ids in zip(gates, experts, strict=True):
            gate.forward = partial(routed, gate, ids, has)
        token_ids = torch.from_numpy(np.asarray(sequence.token_ids, np.int64))
        logits: Tensor = model(input_ids=token_ids[None], use_cache=False).logits[0]
        for gate in gates:
            del gate.forward
        at = torch.from_numpy(np.flatnonzero(sequence.target_mask))
        found.append(logits[at - 1].log_softmax(-1).gather(-1, token_ids[at, None])[:, 0])
    return torch.cat(found)


def routed(gate: Any, ids: Tensor, has: Tensor, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = states @ gate.weight.T
    ids = torch.where(has, ids, logits.topk(TOP_K, dim=-1).indices)
    return logits, logits.gather(-1, ids).softmax(-1), ids


def replayed(model: PreTrainedModel, table: TokenTable, plan: ForwardPlan) -> Tensor:
    """Return the log-probs [M] by the trainer, whose weighted sum has had its backward."""
    columns = {name: torch.as_tensor(values) for name, values in table.columns.items()}
    found = torch.zeros(int(table.lengths.sum()))
    batches = plan.micro_batches(table.sequences, model.device)
    assert len(batches) > 1
    for batch in batches:
        inputs, _ = forward_features(model, batch, columns, plan)
        found[batch.target_index] = inputs.logprobs.detach()
        weighted(inputs.logprobs, batch.target_index).backward()  # type: ignore[no-untyped-call]
    return found


def weighted(logprobs: Tensor, index: Tensor) -> Tensor:
    return (logprobs * (index + 1.0).sin()).sum()


# Values and gradients --------------------------------------------------------------------------------------------------  # noqa: W505


def test_the_weights_of_recorded_experts_are_those_of_the_trainers_scores() -> None:
    """By hand: the scores log 1 to log 4 have the probabilities 0.1 to 0.4. The router chooses the experts 3 and 2, and
    a record of 0 and 2 gets 0.1 / 0.4 and 0.3 / 0.4. The gradient of the first by its score is 0.25 * 0.75."""
    model = tiny_mixture(num_hidden_layers=1, norm_topk_prob=True)
    replay = RouterReplay(model)
    layers: Any = model.base_model.layers
    layer, gate = layers[0], layers[0].mlp.gate
    scores = torch.tensor([1.0, 2.0, 3.0, 4.0]).log().requires_grad_()
    with torch.no_grad():
        gate.weight.zero_()
    gate.weight = torch.nn.Parameter(torch.cat([scores.detach()[:, None], torch.zeros(4, 31)], dim=1))
    states = torch.zeros(2, 32)
    states[:, 0] = 1.0
    (batch,) = pack([sequence([0, 2])], PACKING)
    layer.forward = partial(layer.forward.func, replay, 0, lambda given: gate(given))  # the layer is its router alone
    with replay.replaying(batch):
        _, weights, ids = layer.forward(states)
    assert ids.tolist() == [[0, 2], [3, 2]], "the second token has no record"
    torch.testing.assert_close(weights, torch.tensor([[0.25, 0.75], [4 / 7, 3 / 7]]))
    weights[0, 0].backward()
    torch.testing.assert_close(gate.weight.grad[:, 0], torch.tensor([0.1875, 0.0, -0.1875, 0.0]))


def sequence(record: list[int]) -> Any:
    """Return a sequence of two tokens, of which the first has a record."""
    first = action([21], [-1.0])
    segment = replace(first, arrays={"routed_experts": np.array([record], np.uint8)})
    return build_table([training_sample("s", [prompt([20]), segment])], update=1, routes=ONE).sequences[0]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("mode", "packing"), [(ForwardMode.PACKED, PACKING), (ForwardMode.UNPACKED, PACKING), (ForwardMode.PACKED, SHARED)]
)
def test_values_and_gradients_are_those_of_an_independent_replay(
    mode: ForwardMode, packing: PackingConfig, checkpointing: bool
) -> None:
    model = tiny_mixture(norm_topk_prob=True)
    prepare(model)
    shares = packing.shared_row_tokens > 0
    samples = random_batch(2, 3, same_prompt=shares)[0]
    shape = RouteShape(experts=(EXPERTS,) * 2, chosen=(TOP_K,) * 2, layers=(0, 1), num_layers=2)
    table = build_table(with_records(samples), update=1, routes=shape)
    expected = logprobs_alone(model, table)
    weighted(expected, torch.arange(len(expected))).backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    replay = RouterReplay(model)
    assert replay.shape == shape
    if checkpointing:
        checkpoint_layers(model, replay.contexts)
    found = replayed(model, table, ForwardPlan(mode, packing, replay=replay))
    torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=1e-5)
    assert any(float(g.abs().max()) > 1e-3 for name, g in gradients.items() if "gate" in name)
    for name, parameter in model.named_parameters():
        if name in gradients:
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-5)
    model.zero_grad()
    without = replayed(model, table, ForwardPlan(mode, packing))
    assert float((without - found).abs().mean()) > 0.05, "the records are not the model's choice"


def test_a_prefix_is_shared_up_to_the_first_token_with_another_record() -> None:
    """The prompt has 36 tokens. The record of its last token is that of the first token of an answer."""
    samples = random_batch(1, 3, same_prompt=True)[0]
    shape = RouteShape(experts=(EXPERTS,) * 2, chosen=(TOP_K,) * 2, layers=(0, 1), num_layers=2)
    lengths = []
    for ids in ([[0, 1, 2, 3]] * 3, [[0, 1, 2, 3], [0, 1, 2, 3], [1, 0, 3, 2]]):
        made = [first_record(sample, record) for sample, record in zip(with_records(samples), ids, strict=True)]
        table = build_table(made, update=1, routes=shape)
        (batch,) = pack(table.sequences, PackingConfig(row_tokens=9, micro_batch_tokens=999, shared_row_tokens=999))
        lengths.append(sum(len(s.token_ids) for s in table.sequences) - batch.num_tokens)
    assert lengths == [2 * 36, 2 * 35]


def first_record(sample: TrainingSample, ids: list[int]) -> TrainingSample:
    """Return the sample with this record of the first token of its first answer."""
    context, answer, *rest = sample.segments
    array = answer.arrays["routed_experts"].copy()
    array[0] = ids
    replaced = replace(answer, arrays={**answer.arrays, "routed_experts": array})
    return replace(sample, segments=(context, replaced, *rest))


# Engine and trainer in different precisions ----------------------------------------------------------------------------  # noqa: W505


def test_replay_removes_most_of_the_mismatch_of_an_engine_in_bfloat16() -> None:
    """The engine computes in bfloat16, and the trainer in float32. The mean of |log pi - log mu| over answers falls to
    less than half with the records of the answers, and further with records of the prompts, which engines do not send.
    What is left is the rounding of the log-probs. The numbers are printed."""
    sizes: dict[str, Any] = {"num_experts": 64, "num_local_experts": 64, "n_routed_experts": 64, "num_hidden_layers": 4}
    model = tiny_mixture(**sizes, initializer_range=0.3, norm_topk_prob=True)
    prepare(model)
    runner = PlainRunner(type(model), model.config, slots=1, device="cpu", dtype=torch.bfloat16, cached=True)
    tokens = [ids.astype(np.int32) for ids in np.random.default_rng(0).integers(13, 109, (12, 40))]
    partly, wholly = [], []
    for ids, scored in zip(
        tokens, runner.score(runner.lay_out(published_state(model)), tokens, ("routed_experts",)), strict=True
    ):
        logprobs, experts = scored["logprobs"], scored["routed_experts"]
        segment = action(ids[10:].tolist(), logprobs[10:].tolist())
        segment = replace(segment, arrays={"routed_experts": experts[10:]})
        context = prompt(ids[:10].tolist())
        partly.append(training_sample("s", [context, segment]))
        wholly.append(training_sample("s", [replace(context, arrays={"routed_experts": experts[:10]}), segment]))
    replay = RouterReplay(model)
    plan = ForwardPlan(ForwardMode.PACKED, PACKING, replay=replay)

    def mismatch(samples: list[TrainingSample], plan: ForwardPlan) -> float:
        table = build_table(samples, update=1, routes=replay.shape)
        found = computed_features(model, table, {"policy": BUILT_IN["proximal"]}, plan)["policy"]
        return float(np.abs(found - table.columns["behavior"]).mean())

    without = mismatch(partly, changed(plan, replay=None))
    with_answers, with_all = mismatch(partly, plan), mismatch(wholly, plan)
    print(f"mean of |log pi - log mu|: {without:.4f} without, {with_answers:.4f} with, {with_all:.4f} with prompts")
    assert without > 0.1
    assert with_all < with_answers < without / 2
    assert with_all < without / 4


# Records ---------------------------------------------------------------------------------------------------------------  # noqa: W505


def answer(ids: list[int], rows: list[list[int]], dtype: Any = np.uint8) -> Any:
    return replace(action(ids, [-1.0] * len(ids)), arrays={"routed_experts": np.array(rows, dtype)})


def test_a_record_is_of_the_token_before() -> None:
    """A prompt of 2 tokens, an answer of 2, an observation of 2 and an answer of 1, at the positions 0 to 6."""
    segments = [prompt([20, 21]), answer([22, 23], [[0, 1], [2, 3]]), prompt([24, 25]), answer([26], [[3, 0]])]
    routes = routes_of(training_sample("s", segments), ONE)
    assert np.flatnonzero(routes.recorded).tolist() == [1, 2, 5]
    assert routes.experts[[1, 2, 5]].tolist() == [[0, 1], [2, 3], [3, 0]]
    alone = routes_of(training_sample("s", [answer([22, 23], [[0, 1], [2, 3]])]), ONE)
    assert (alone.recorded.tolist(), alone.experts[0].tolist()) == ([True, False], [2, 3])


def test_records_of_a_server_may_have_places_for_layers_without_a_router() -> None:
    shape = RouteShape(experts=(300, 300), chosen=(2, 2), layers=(1, 3), num_layers=4)
    whole = np.arange(8, dtype=np.int32)[None]
    found = shape.records(whole)
    assert found is not None
    assert found.tolist() == [[2, 3, 6, 7]]
    assert shape.bytes_per_token == 16


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"routed_experts": np.array([[0, 1], [2, 3]], np.uint8)}, None),
        ({}, DropReason.NO_OUTPUT),
        ({"routed_experts": np.array([[0, 1]], np.uint8)}, DropReason.MALFORMED),
        ({"routed_experts": np.array([[0, 1, 2]] * 2, np.uint8)}, DropReason.OTHER_ROUTERS),
        ({"routed_experts": np.array([[0, 4]] * 2, np.uint8)}, DropReason.OTHER_ROUTERS),
        ({"routed_experts": np.array([[0, -1]] * 2, np.int32)}, DropReason.OTHER_ROUTERS),
        ({"routed_experts": np.array([[0, 1]] * 2, np.float32)}, DropReason.OTHER_ROUTERS),
    ],
)
def test_samples_whose_records_do_not_fit_the_model_are_dropped(
    arrays: dict[str, NDArray[Any]], reason: DropReason | None
) -> None:
    sample = training_sample("s", [prompt([20]), replace(action([21, 22], [-1.0, -1.0]), arrays=arrays)])
    assert drop_reason(sample, context_max=None, vocab_size=128, routes=ONE) == reason
    assert drop_reason(sample, context_max=None, vocab_size=128) in (None, DropReason.MALFORMED)


# Updates ---------------------------------------------------------------------------------------------------------------  # noqa: W505


def settings(**values: Any) -> UpdateConfig:
    optimizer = OptimizerConfig(lr=1e-3, warmup_updates=0)
    return UpdateConfig(update_rule=minibatches(2), optimizer=optimizer, router_replay=True, **values)


def test_an_update_replays_in_the_forwards_of_the_policy_and_not_in_the_reference() -> None:
    config = settings(loss=(LossTermChoice("decoupled_ppo"), LossTermChoice("kl", weight=0.1)))
    made = BatchTrainer(tiny_mixture(), config, seed=7, outputs=["entropy", "routed_experts"])
    samples, groups = random_batch(2, 4)
    samples = with_records(samples)
    table = build_table(samples, update=1, routes=made.forward_plan.replay.shape)  # type: ignore[union-attr]
    own = {under: made._computed(table, under) for under in ("start", "reference")}
    proximal, reference = own["start"]["proximal"], own["reference"]["reference"]
    assert np.abs(proximal - reference).mean() > 0.05, "both have the initial weights"
    plain = computed_features(made.model, table, {"p": BUILT_IN["proximal"]}, changed(made.forward_plan, replay=None))[
        "p"
    ]
    np.testing.assert_allclose(reference, plain, atol=1e-5)
    result = made.update(1, samples, groups)
    assert not result.metrics["samples/leased"] - result.metrics["samples/used"]
    share = result.metrics[f"{DIFFERING}_share"]
    assert 0.3 < share < 0.7, "two of four experts at random are half of the router's"
    assert DIFFERING not in made.update(2, *random_batch(2, 4, step=1)).metrics, "samples without records are dropped"


def test_a_model_or_a_run_that_cannot_replay_is_rejected() -> None:
    small = TinyModelConfig(hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48)
    with pytest.raises(ConfigError, match=r"`learner.router_replay`: .* in Qwen3ForCausalLM: it has no routers; set"):
        BatchTrainer(build_tiny_model(small, seed=1), settings(), seed=7, outputs=["routed_experts"])
    with pytest.raises(ConfigError, match=r"in PhimoeForCausalLM: router 0 sends tokens to other experts than the"):
        BatchTrainer(tiny_mixture("phimoe"), settings(), seed=7, outputs=["routed_experts"])
    with pytest.raises(
        ValueError,
        match=r"`rollout.outputs` must contain routed_experts, which `learner.router_replay` needs, got \[entropy\]",
    ):
        BatchTrainer(tiny_mixture(), settings(), seed=7, outputs=["entropy"])


def test_a_run_whose_answers_may_have_too_large_records_is_rejected() -> None:
    """48 layers with 8 of 128 experts take 384 bytes per token, and an array has at most 2^20: 2730 tokens."""
    shape = RouteShape(experts=(128,) * 48, chosen=(8,) * 48, layers=tuple(range(48)), num_layers=48)
    limits = {"tokens_max": 4096, "context_tokens_max": 4096}
    fits, beyond = (
        config_from_dict(TrainConfig, {"rollout": {"limits": limits, "sampling": {"max_tokens": num}}})
        for num in (2730, 2731)
    )
    check_records(fits, shape)
    with pytest.raises(ConfigError, match=r"`rollout.sampling.max_tokens` must be <= 2730 .* got 2731: the 384 chosen"):
        check_records(beyond, shape)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("mixtral", {}),
        ("gpt_oss", {"sliding_window": 128}),
        ("glm4_moe", {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_routed_experts": 8, "num_local_experts": 8}),
    ],
)  # fmt: skip
def test_routers_with_other_rules_can_replay(model_type: str, changes: dict[str, Any]) -> None:
    """Softmax after the choice; sigmoid scores with a bias and groups, where a record may be outside of the trainer's
    group."""
    shape = RouterReplay(tiny_mixture(model_type, **changes)).shape
    groups = "n_group" in changes
    assert shape.experts == ((8,) if groups else (EXPERTS,) * 2)
    assert shape.layers == ((1,) if groups else (0, 1))


def test_a_router_that_gives_a_record_no_weight_is_rejected() -> None:
    """Groups of deepseek_v2 set the scores outside of the chosen group to 0."""
    changes = {
        "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0, "topk_method": "group_limited_greedy", "q_lora_rank": None,
        "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "head_dim": 8, "num_key_value_heads": 4,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="gives recorded experts that it has not chosen itself no weight"):
        RouterReplay(tiny_mixture("deepseek_v2", **changes))
