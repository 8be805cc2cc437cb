"""Gradient checkpointing changes neither weights nor names, and applies although the model is in evaluation mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, JambaConfig, JambaForCausalLM, PreTrainedModel

from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.trainer.config import ComputeConfig, LossTermChoice, ReferenceConfig, UpdateConfig
from rollmesh.trainer.model_files import published_state
from rollmesh.trainer.model_layers import decoder_layers
from rollmesh.trainer.update import BatchTrainer

from .builders import minibatches, random_batch

SMALL = TinyModelConfig(hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48, num_layers=3)


def trained(model: PreTrainedModel, *, on: bool) -> tuple[BatchTrainer, list[int]]:
    """Return the trainer after two updates, and how many forwards each of the first layer's attentions made."""
    config = UpdateConfig(
        loss=(LossTermChoice("ppo_clip"), LossTermChoice("kl", weight=0.1)),
        reference=ReferenceConfig(kind="average"),
        update_rule=minibatches(1),
        compute=ComputeConfig(gradient_checkpointing=on),
    )
    made = BatchTrainer(model, config, seed=7)
    calls: list[int] = []
    inner = next(iter(decoder_layers(model)[0].children()))
    inner.register_forward_hook(lambda *_: calls.append(1))
    for k in (1, 2):
        made.update(k, *random_batch(seed=k))
    return made, calls


def gpt2() -> PreTrainedModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=2))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("make", [lambda: build_tiny_model(SMALL, seed=1), gpt2])
def test_weights_and_names_are_those_without_it_and_layers_run_once_more(make: Any) -> None:
    (plain, once), (found, twice) = (trained(make(), on=on) for on in (False, True))
    expected, state = published_state(plain.model), published_state(found.model)
    assert state.keys() == expected.keys()
    assert [name for name, _ in found.model.named_parameters()] == [name for name, _ in plain.model.named_parameters()]
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    assert len(twice) > len(once) > 0
    assert not found.model.training
    assert plain.reference is not None
    assert found.reference is not None
    mine, theirs = found.reference.state(), plain.reference.state()
    assert mine is not None
    assert theirs is not None
    assert all(torch.equal(mine[name], values) for name, values in theirs.items())


def test_a_copy_of_the_model_computes_with_its_own_weights() -> None:
    made, _ = trained(build_tiny_model(SMALL, seed=1), on=True)
    assert made.reference is not None
    before = made.score(random_batch()[0][0].segments[0].token_ids)
    with torch.no_grad():
        for parameter in made.reference.model.parameters():
            parameter.zero_()
    assert (made.score(random_batch()[0][0].segments[0].token_ids) == before).all()
    ids = torch.tensor([[20, 21]])
    assert not made.reference.model(ids).logits.any()


def test_layers_of_different_classes_are_all_found() -> None:
    config = JambaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=2,
        use_mamba_kernels=False,
    )
    layers = decoder_layers(JambaForCausalLM(config))
    assert len(layers) == 4
    assert len({type(layer) for layer in layers}) == 2


def test_a_model_without_layers_is_an_error_that_names_the_key() -> None:
    model = build_tiny_model(SMALL, seed=1)
    layers: Any = model.base_model.layers
    for number in range(len(layers)):
        layers[number] = nn.Identity()
    with pytest.raises(ValueError, match=r"no layers of a kind.*learner\.compute\.gradient_checkpointing"):
        decoder_layers(model)
