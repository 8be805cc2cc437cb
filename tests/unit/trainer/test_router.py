"""The load-balancing loss of mixtures of experts against that of transformers, and its effect on the loads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.models.qwen3_moe import modeling_qwen3_moe

from rollmesh.trainer.config import ComputeConfig, LossTermChoice, OptimizerConfig, PackingConfig, UpdateConfig
from rollmesh.trainer.feature_pass import computed_features, current_features
from rollmesh.trainer.forward import ForwardMode, ForwardPlan
from rollmesh.trainer.losses import LossInputs
from rollmesh.trainer.model_layers import checkpoint_layers
from rollmesh.trainer.plugins import Plugins
from rollmesh.trainer.samples import TokenTable, build_table
from rollmesh.trainer.update import BatchTrainer

from .builders import minibatches, random_batch
from .mixtures import EXPERTS, TOP_K, tiny_mixture

PACKING = PackingConfig(row_tokens=96, micro_batch_tokens=192)
ROUTER = LossTermChoice("router", weight=0.1)


def transformers_loss(model: PreTrainedModel, table: TokenTable) -> Tensor:
    """Return the loss of transformers for a padded batch, masked to the positions that predict trained tokens."""
    longest = max(len(s.token_ids) for s in table.sequences)
    token_ids, given, wanted = (torch.zeros(len(table.sequences), longest, dtype=torch.long) for _ in range(3))
    for row, sequence in enumerate(table.sequences):
        length = len(sequence.token_ids)
        token_ids[row, :length] = torch.from_numpy(np.asarray(sequence.token_ids, np.int64))
        given[row, :length] = 1
        wanted[row, np.flatnonzero(sequence.target_mask) - 1] = 1
    outputs: Any = model(input_ids=token_ids, attention_mask=given, output_router_logits=True, use_cache=False)
    loss: Any = load_balancing_loss_func(outputs.router_logits, EXPERTS, TOP_K, wanted)
    made: Tensor = loss
    return made


def term_loss(model: PreTrainedModel, table: TokenTable, mode: ForwardMode) -> Tensor:
    """Return the loss of the term alone, summed over micro-batches, with its gradient in the parameters."""
    plugins, plan = Plugins(UpdateConfig(loss=(LossTermChoice("router"),))), ForwardPlan(mode, PACKING, chunk_tokens=16)
    known = table.columns | computed_features(model, table, plugins.under("step"), plan)
    columns = {name: torch.as_tensor(values) for name, values in known.items()}
    columns["token_weight"] = torch.full((int(table.lengths.sum()),), 0.1)
    columns |= plugins.loss.prepare(columns)
    total = torch.zeros(())
    batches = plan.micro_batches(table.sequences, model.device)
    assert len(batches) > 1
    for batch in batches:
        inputs, features, _ = current_features(
            model, batch, columns, table, plugins.under("current"), plan, hidden=False
        )
        loss, _ = plugins.loss(LossInputs(inputs.logprobs, {**inputs.columns, **features}))
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return total


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("mode", ForwardMode)
@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_value_and_gradient_are_those_of_transformers(model_type: str, mode: ForwardMode, checkpointing: bool) -> None:
    model = tiny_mixture(model_type)
    table = build_table(random_batch(3, 3)[0], update=1)
    expected = transformers_loss(model, table)
    expected.backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    if checkpointing:
        checkpoint_layers(model)
    found = term_loss(model, table, mode)
    assert float(found) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert float(found) > 1.02 * TOP_K, "the loads of the test model are not even"
    assert any(float(g.abs().max()) > 1e-3 for name, g in gradients.items() if "gate" in name)
    for name, parameter in model.named_parameters():
        if name in gradients:
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(grad, gradients[name], rtol=1e-3, atol=1e-6)


def trained(loss: tuple[LossTermChoice, ...], **settings: Any) -> tuple[BatchTrainer, list[dict[str, float]]]:
    config = UpdateConfig(
        loss=loss,
        update_rule=minibatches(1),
        optimizer=OptimizerConfig(lr=3e-3, warmup_updates=0),
        **({"packing": PACKING} | settings),
    )
    made = BatchTrainer(tiny_mixture(), config, seed=7)
    return made, [made.update(k, *random_batch(seed=k % 3)).metrics for k in range(1, 13)]


def test_the_term_evens_out_the_loads() -> None:
    _, without = trained((LossTermChoice("ppo_clip"), LossTermChoice("router", weight=0.0)))
    _, metrics = trained((LossTermChoice("ppo_clip"), ROUTER))
    first, last, last_without = (m["router/busiest_share"] * EXPERTS for m in (metrics[0], metrics[-1], without[-1]))
    assert first == without[0]["router/busiest_share"] * EXPERTS > 1.1
    assert last - 1 < 0.7 * (last_without - 1)


def test_the_split_into_micro_batches_does_not_change_the_update() -> None:
    one, _ = trained(
        (LossTermChoice("ppo_clip"), ROUTER), packing=PackingConfig(row_tokens=96, micro_batch_tokens=4096)
    )
    many, _ = trained((LossTermChoice("ppo_clip"), ROUTER), compute=ComputeConfig(logprob_chunk_tokens=8))
    for found, expected in zip(many.model.parameters(), one.model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [("qwen3", "Qwen3ForCausalLM has no routers"), ("glm4_moe", "Glm4MoeForCausalLM has no load-balancing loss")],
)
def test_a_model_without_the_loss_is_rejected_by_name(model_type: str, reason: str) -> None:
    changes = {} if model_type == "qwen3" else {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    with pytest.raises(ValueError, match=f"{reason}.*remove the loss term `router`"):
        BatchTrainer(
            tiny_mixture(model_type, **changes), UpdateConfig(loss=(LossTermChoice("ppo_clip"), ROUTER)), seed=7
        )


def test_another_loss_that_even_routers_hide_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the number of chosen experts, which the loss of routers with equal logits is too."""
    model = tiny_mixture()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.zero_()
    monkeypatch.setattr(modeling_qwen3_moe, "load_balancing_loss_func", lambda *_, **__: torch.tensor(float(TOP_K)))
    with pytest.raises(ValueError, match=r"computes another load-balancing loss .*: 2\.0 instead of"):
        BatchTrainer(model, UpdateConfig(loss=(LossTermChoice("ppo_clip"), ROUTER)), seed=7)
