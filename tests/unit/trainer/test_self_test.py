"""Which forward a model is trained with, and which models are rejected before the first update."""

from __future__ import annotations

import logging
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertLMHeadModel,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.trainer.config import UpdateConfig
from rollmesh.trainer.forward import ForwardMode, score
from rollmesh.trainer.self_test import choose_forward
from rollmesh.trainer.update import BatchTrainer

from .builders import action, group, member, minibatches, prompt, training_sample

SMALL = TinyModelConfig(hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48)


def tiny() -> PreTrainedModel:
    return build_tiny_model(SMALL, seed=1)


def test_the_demo_model_is_packed_and_left_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny()
    model.config.sliding_window = 4096
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    with caplog.at_level(logging.INFO):
        choice = choose_forward(model)
    assert choice.mode is ForwardMode.PACKED
    assert not choice.reason
    assert "packed sequences, verified" in caplog.text
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(1))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert model.config.sliding_window == 4096


def test_a_scaled_output_layer_is_found_under_any_name() -> None:
    model = tiny()
    model.register_forward_hook(lambda _, __, out: out.__class__(logits=out.logits * 0.5))
    choice = choose_forward(model)
    assert choice.mode is ForwardMode.UNPACKED
    assert "packed log-probs differ from plain ones" in choice.reason


def test_a_packed_forward_whose_gradients_differ_is_found() -> None:
    model = tiny()

    def cut(_: nn.Module, __: object, kwargs: dict[str, object], out: torch.Tensor) -> object:
        return (out[0].detach(), *out[1:]) if kwargs.get("position_ids") is not None and packed(kwargs) else out

    def packed(kwargs: dict[str, object]) -> bool:
        positions = kwargs["position_ids"]
        return isinstance(positions, torch.Tensor) and positions.shape[0] > 1

    layers: Any = model.base_model.layers
    layers[0].self_attn.register_forward_hook(cut, with_kwargs=True)
    assert "packed gradients differ" in choose_forward(model).reason


def test_the_choice_does_not_depend_on_where_gradients_are_off() -> None:
    with torch.no_grad():
        assert choose_forward(tiny()).mode is ForwardMode.PACKED


def deep_gemma() -> PreTrainedModel:
    """Return a new model with a padding embedding of zero and many norms, in which the gradient at a zero overflows."""
    make: Any = Gemma3ForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = Gemma3TextConfig(
            vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=9, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
            initializer_range=0.2,
        )  # fmt: skip
        model: Any = make(config)
    made: PreTrainedModel = model.eval()
    return made


def test_the_padding_token_is_not_in_the_test() -> None:
    choice = choose_forward(deep_gemma())
    assert choice.mode is ForwardMode.PACKED, choice.reason


def test_a_plain_gradient_that_is_not_finite_is_named() -> None:
    model = deep_gemma()
    embeddings: Any = model.get_input_embeddings()
    with torch.no_grad():
        embeddings.weight[:24] = 0.0
    choice = choose_forward(model)
    assert choice.mode is ForwardMode.UNPACKED
    assert re.match(r"the gradient of model\.\S+ is not finite in the plain forward", choice.reason), choice.reason


def test_weights_that_are_not_numbers_are_not_called_a_model_that_sees_later_tokens() -> None:
    model = tiny()
    layers: Any = model.base_model.layers
    with torch.no_grad():
        layers[0].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"45 of 45 log-probs of random tokens are not finite .*; check its weights"):
        choose_forward(model)


def test_a_model_that_cannot_be_made_again_is_not_packed() -> None:
    class Extended(Qwen3ForCausalLM):
        def __init__(self, config: Qwen3Config, further: int) -> None:
            super().__init__(config)  # type: ignore[no-untyped-call]

    config: Any = tiny().config
    model: PreTrainedModel = Extended(config, 1)
    choice = choose_forward(model)
    assert choice.mode is ForwardMode.UNPACKED
    assert "small model of its configuration with spread weights" in choice.reason


def test_the_mode_is_in_the_metrics_of_every_update() -> None:
    made = BatchTrainer(tiny(), UpdateConfig(), seed=0)
    samples = [training_sample(i, [prompt([20, 21]), action([30, 31], [-4.0, -4.0])]) for i in ("a", "b")]
    groups = [group("g0", member("a", {"r": 1.0}), member("b", {"r": 0.0}))]
    assert made.update(1, samples, groups).metrics["packed"] == 1.0


def test_what_is_no_causal_language_model_is_rejected() -> None:
    make: Any = BertLMHeadModel
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    encoder = make(BertConfig(**sizes, initializer_range=0.2))
    with pytest.raises(ValueError, match=r"BertLMHeadModel cannot be trained: .* tokens after it"):
        BatchTrainer(encoder, UpdateConfig(), seed=0)


def test_parameters_below_float32_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"parameters of torch.bfloat16, expected torch.float32"):
        BatchTrainer(tiny().bfloat16(), UpdateConfig(), seed=0)


def test_adapters_are_rejected_at_the_start() -> None:
    class PeftModel(nn.Module):
        def __init__(self, model: PreTrainedModel) -> None:
            super().__init__()
            self.base_model = model

    with pytest.raises(TypeError, match=r"got PeftModel; adapters \(PEFT\) are not supported, merge"):
        BatchTrainer(PeftModel(tiny()), UpdateConfig(), seed=0)  # type: ignore[arg-type]


def test_updates_run_without_dropout() -> None:
    """GPT-2 drops 10 % by default; the engine that sampled does not."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        make: Any = GPT2LMHeadModel
        model = make(GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64))
    model.train()
    assert model.config.resid_pdrop == 0.1
    made = BatchTrainer(model, UpdateConfig(update_rule=minibatches(1)), seed=0)
    samples = []
    for i in range(8):
        ids = np.random.default_rng(i).integers(3, 96, 24).astype(np.int32)
        logprobs = score(model, ids)[8:].tolist()
        samples.append(training_sample(f"s{i}", [prompt(ids[:8].tolist()), action(ids[8:].tolist(), logprobs)]))
    members = [member(f"s{i}", {"r": float(i % 2)}) for i in range(8)]
    metrics = made.update(1, samples, [group("g0", *members)]).metrics
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-8)
    assert metrics["clipped_share"] == 0.0
    assert metrics["ess"] == pytest.approx(1.0, abs=1e-6)
