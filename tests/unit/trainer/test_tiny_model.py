"""The tiny model, its tokenizer and chat template, loaded as another program loads them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollmesh.demo.chat import (
    EncodedDemonstration,
    demonstration_messages,
    encode_prompt,
    encode_tool_result,
    render_demonstration,
)
from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.demo.tokenizer import VOCAB_SIZE, build_tokenizer, encode_text
from rollmesh.trainer.model_files import load_model, load_tokenizer, load_weights, write_model_folder

CALLS = [("12+30", "42"), ("42-2", "40")]
TOOLS = [{"type": "function", "function": {"name": "calc", "description": "", "parameters": {}}}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model_folder(build_tiny_model(TinyModelConfig(), seed=3), build_tokenizer(), path)
    return path


def test_default_model_has_the_documented_size() -> None:
    assert sum(p.numel() for p in build_tiny_model(TinyModelConfig(), seed=0).parameters()) == 359_168


def test_model_seed_decides_the_weights_and_leaves_the_global_rng_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one, two, other = (build_tiny_model(TinyModelConfig(num_layers=1), seed=s).state_dict() for s in (1, 1, 2))
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(one[k], two[k]) for k in one)
    assert any(not torch.equal(one[k], other[k]) for k in one)


def test_plain_transformers_loads_the_folder_with_equal_weights(folder: Path) -> None:
    ids = torch.arange(20)[None]
    mine = build_tiny_model(TinyModelConfig(), seed=3)
    theirs: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(mine(ids).logits, theirs(ids).logits)
    assert theirs.lm_head.weight is theirs.model.embed_tokens.weight
    generated = theirs.generate(ids, max_new_tokens=3, do_sample=False)
    assert generated.shape[1] in (21, 22, 23)


def test_tied_output_layer_is_stored_once(folder: Path) -> None:
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_json_files_carry_both_spellings(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "float32"
    assert config["rope_parameters"]["rope_theta"] == config["rope_theta"] == 1e4
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_tokenizer_round_trips_every_character_and_tag(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "<|user|>" + "".join(map(chr, range(32, 127))) + "\n  two  spaces<|end|><tool_call></tool_call>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == 1 + 95 + 14 + 3
    assert max(ids) < VOCAB_SIZE
    assert tokenizer.decode(ids) == text
    assert tokenizer.pad_token_id == 0
    assert tokenizer.eos_token_id == 1


def test_untrusted_text_cannot_spell_a_tag() -> None:
    tokenizer = build_tokenizer()
    ids = encode_text(tokenizer, "<answer>1<|end|>")
    assert len(ids) == len("<answer>1<|end|>")
    assert min(ids) >= 13
    assert tokenizer.encode("<answer>", add_special_tokens=False) == [9]


@pytest.mark.parametrize("tools", [(), ("calc",)])
def test_chat_template_equals_the_training_format(folder: Path, tools: tuple[str, ...]) -> None:
    tokenizer = load_tokenizer(folder)
    demo = render_demonstration(tokenizer, "12+30-2", CALLS, "40", tools=tools)
    messages = demonstration_messages("12+30-2", CALLS, "40")
    kwargs: dict[str, Any] = {"tools": TOOLS if tools else None, "tokenize": True, "return_dict": False}
    assert tokenizer.apply_chat_template(messages, **kwargs) == demo.token_ids.tolist()
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, **kwargs)
    assert prompt == encode_prompt(tokenizer, "12+30-2", tools=tools)


def test_turn_by_turn_tokens_equal_the_rendered_demonstration() -> None:
    tokenizer = build_tokenizer()
    ids = encode_prompt(tokenizer, "12+30-2", tools=("calc",))
    for call, result in CALLS:
        ids += tokenizer.encode(f"<tool_call>{call}</tool_call><|end|>", add_special_tokens=False)
        ids += encode_tool_result(tokenizer, result)
    ids += tokenizer.encode("<answer>40</answer><|end|>", add_special_tokens=False)
    assert ids == render_demonstration(tokenizer, "12+30-2", CALLS, "40", tools=("calc",)).token_ids.tolist()


def test_demonstration_trains_on_what_the_assistant_wrote_only() -> None:
    tokenizer = build_tokenizer()
    demo = render_demonstration(tokenizer, "12+30-2", CALLS, "40", tools=("calc",))
    trained = tokenizer.decode(demo.token_ids[demo.loss_mask == 1])
    assert trained == (
        "<tool_call>12+30</tool_call><|end|><tool_call>42-2</tool_call><|end|><answer>40</answer><|end|>"
    )


def test_demonstration_rejects_a_mask_of_another_length() -> None:
    with pytest.raises(ValueError, match="`loss_mask` must have 3 entries"):
        EncodedDemonstration(np.zeros(3, np.int32), np.zeros(2, np.uint8))


def test_loading_names_the_folder_and_the_misfit(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=str(tmp_path)):
        load_model(tmp_path)
    write_model_folder(build_tiny_model(TinyModelConfig(), seed=0), None, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state.pop("model.norm.weight")
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="model.norm.weight"):
        load_model(tmp_path)
    with pytest.raises(ValueError, match="model.norm.weight"):
        load_weights(load_model(folder), tmp_path / "model.safetensors")


def test_config_rejects_impossible_shapes() -> None:
    with pytest.raises(ValueError, match="`num_heads` must be a multiple of num_kv_heads = 2, got 3"):
        TinyModelConfig(num_heads=3, num_kv_heads=2)
    with pytest.raises(ValueError, match="`hidden_size` must be"):
        TinyModelConfig(hidden_size=0)
