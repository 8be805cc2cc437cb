"""The small model of the self-test: what is cut of a large one, what stays, and that a lack of memory is not a
verdict."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, PreTrainedModel

from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.trainer import spread_model
from rollmesh.trainer.config import PackingConfig, UpdateConfig
from rollmesh.trainer.forward import ForwardMode
from rollmesh.trainer.model_config import auto_class, logits_rule
from rollmesh.trainer.router import check_router
from rollmesh.trainer.self_test import check_shared, choose_forward
from rollmesh.trainer.spread_model import SpreadCopy
from rollmesh.trainer.update import BatchTrainer
from tests.models.architectures import build_model

SMALL = TinyModelConfig(hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48)
PARAMETERS_MAX = 20_000_000


def large(model_type: str, **fields: Any) -> Any:
    """Return the small model of a configuration with the sizes of a released model."""
    config = CONFIG_MAPPING[model_type](**fields)
    made = spread_model.spread_model(config, auto_class(config).from_config)
    assert made.num_parameters() < PARAMETERS_MAX
    return made


def test_a_large_model_is_cut_in_every_size_but_that_of_a_head() -> None:
    config = large("llama").config
    assert (config.num_hidden_layers, config.vocab_size) == (2, 1024)
    assert (config.num_attention_heads, config.num_key_value_heads, config.hidden_size) == (4, 4, 512)
    assert (config.head_dim, config.intermediate_size) == (128, 256)


def test_a_cut_model_shares_heads_of_keys_if_the_large_one_does() -> None:
    config = large("qwen2", num_attention_heads=28, num_key_value_heads=4, hidden_size=3584).config
    assert (config.num_attention_heads, config.num_key_value_heads, config.hidden_size) == (4, 2, 512)


def test_a_router_chooses_as_many_experts_of_fewer_in_layers_of_both_kinds() -> None:
    model = large("deepseek_v3")
    config = model.config
    assert (config.n_routed_experts, config.n_group, config.topk_group, config.num_experts_per_tok) == (32, 8, 4, 8)
    kinds = {type(layer.mlp).__name__ for layer in model.model.layers}
    assert kinds == {"DeepseekV3MLP", "DeepseekV3MoE"}, "the first three layers of the large one are dense"


def test_caps_and_divisors_stay() -> None:
    gemma = large("gemma2")
    assert (gemma.config.attn_logit_softcapping, gemma.config.query_pre_attn_scalar) == (50.0, 256)
    assert logits_rule(gemma).cap == 30.0
    assert large("minicpm3").config.logits_scaling == pytest.approx(10, rel=0.05)


def test_a_number_per_layer_that_is_different_in_each_does_not_keep_all_layers() -> None:
    assert large("llama4_text").config.num_hidden_layers == 4  # three layers with rotary embedding, then one without


def test_a_cut_with_which_the_model_cannot_run_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spread_model, "_WHOLE_PARAMETERS", 0)
    monkeypatch.setattr(spread_model, "_INNER", 24)
    cuts = (lambda text: {"num_attention_heads": 3}, *spread_model._CUTS)
    monkeypatch.setattr(spread_model, "_CUTS", cuts)
    small = SpreadCopy(build_model("mixtral")).model.config
    assert (small.num_attention_heads, small.intermediate_size, small.num_local_experts) == (4, 24, 4)


def test_token_ids_beyond_the_cut_vocabulary_are_within_it() -> None:
    model = large("modernbert-decoder")  # its padding must be a number
    assert model.config.pad_token_id == model.config.vocab_size - 1


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The types of the small models that were made."""
    types: list[str] = []
    make = spread_model.spread_model

    def counted(config: Any, *args: Any) -> Any:
        types.append(config.model_type)
        return make(config, *args)

    monkeypatch.setattr(spread_model, "spread_model", counted)
    return types


def test_all_tests_of_a_model_use_one_small_model(made: list[str]) -> None:
    model = build_model("mixtral")
    spread = SpreadCopy(model)
    choice = choose_forward(model, spread)
    check_shared(model, choice, spread)
    check_router(model, spread)
    assert made == ["mixtral"]


def test_a_trainer_makes_one_small_model(made: list[str]) -> None:
    packing = PackingConfig(row_tokens=64, micro_batch_tokens=64, shared_row_tokens=64)
    BatchTrainer(build_tiny_model(SMALL, seed=1), UpdateConfig(packing=packing), seed=0)
    assert len(made) == 1


ALLOCATOR = (
    "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError),
        (MemoryError("9 bytes"), MemoryError),
        (RuntimeError(ALLOCATOR), MemoryError),
    ],
)
@pytest.mark.parametrize("where", ["plain", "packed", "spread", "packed forward of the spread model"])
def test_a_lack_of_memory_is_an_error_with_a_remedy_and_no_choice(
    where: str, error: Exception, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_tiny_model(SMALL, seed=1)

    def fail(*_: object, **__: object) -> None:
        raise error

    def fail_packed(_: object, __: object, kwargs: dict[str, Any]) -> None:
        if kwargs["position_ids"].shape[0] > 1:
            raise error

    make = spread_model.spread_model

    def make_failing(*args: Any) -> Any:
        small = make(*args)
        small.base_model.layers[0].register_forward_pre_hook(fail_packed, with_kwargs=True)
        return small

    if where == "spread":
        monkeypatch.setattr(spread_model, "spread_model", fail)
    elif where == "packed forward of the spread model":
        monkeypatch.setattr(spread_model, "spread_model", make_failing)
    else:
        layers: Any = model.base_model.layers
        layers[0].register_forward_pre_hook(fail if where == "plain" else fail_packed, with_kwargs=True)
    with pytest.raises(
        kind, match=r"memory ran out while the forward of the model was tested.*free memory on the device"
    ) as caught:
        choose_forward(model)
    assert str(caught.value).count("memory ran out") == 1


def test_other_errors_of_a_model_are_the_reason_against_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> PreTrainedModel:
        raise RuntimeError("size mismatch")

    monkeypatch.setattr(spread_model, "spread_model", fail)
    choice = choose_forward(build_tiny_model(SMALL, seed=1))
    assert choice.mode is ForwardMode.UNPACKED
    assert "RuntimeError: size mismatch" in choice.reason
