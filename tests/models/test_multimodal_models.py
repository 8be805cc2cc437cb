"""The text part of a model that also takes images is trained; the rest is kept, and written so that plain transformers
loads the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForImageTextToText, T5Config, T5ForConditionalGeneration, WhisperConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from rollmesh.services.learner.engines.torch_trainer import TorchTrainer
from rollmesh.trainer.config import LoraSettings, UpdateConfig
from rollmesh.trainer.lora import inject
from rollmesh.trainer.memory_plan import plan_folder
from rollmesh.trainer.model_config import text_part
from rollmesh.trainer.model_files import load_model, write_model_folder
from rollmesh.trainer.plugins import Plugins
from rollmesh.trainer.update import BatchTrainer
from tests.models.architectures import ARCHITECTURES, build_model
from tests.unit.trainer.builders import random_batch

NAMES = ("qwen3_5_multimodal", "qwen2_vl", "llava", "gemma3_multimodal")
PROCESSOR = b'{"image_processor_type": "AnImageProcessor"}'


def save(name: str, folder: Path) -> Path:
    """Save a model as transformers does, with the file of an image processor."""
    model: Any = build_model(name)
    assert type(model).__name__ == dict(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)[ARCHITECTURES[name][0]]
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_bytes(PROCESSOR)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_text_is_trained_and_everything_else_is_kept_for_transformers(name: str, tmp_path: Path) -> None:
    before: Any = build_model(name)
    model = load_model(save(name, tmp_path / "before"))
    assert type(model) is type(before)
    trained = text_part(model)
    trainer = BatchTrainer(model, UpdateConfig(), seed=0)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == trained
    trainer.update(1, *random_batch(seed=1, step=0))
    (tmp_path / "after").mkdir()
    write_model_folder(model, None, tmp_path / "after")

    make: Any = AutoModelForImageTextToText
    after, info = make.from_pretrained(tmp_path / "after", dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    parameters = dict(after.named_parameters())
    for parameter, values in before.named_parameters():
        assert torch.equal(values, parameters[parameter]) is (parameter not in trained), parameter
    assert {n for n in parameters if n not in trained}, "a tower"
    assert (tmp_path / "after" / "preprocessor_config.json").read_bytes() == PROCESSOR
    tokens = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert torch.equal(after.eval()(input_ids=tokens).logits, model(input_ids=tokens).logits)


def test_a_learner_resumes_and_publishes_the_whole_model(tmp_path: Path) -> None:
    from tests.integration.test_learner_ranks import advance, config

    folder = save("qwen2_vl", tmp_path / "model")
    straight = advance(TorchTrainer.open(config(tmp_path / "straight", folder, 1)), 2)
    advance(TorchTrainer.open(config(tmp_path / "halves", folder, 1)), 1)
    resumed = TorchTrainer.open(config(tmp_path / "halves", folder, 1))
    saved = advance(resumed, 2)
    assert (saved / "model.safetensors").read_bytes() == (straight / "model.safetensors").read_bytes()
    assert (saved / "preprocessor_config.json").read_bytes() == PROCESSOR
    exported = resumed.engine.export_weights(tmp_path)
    assert exported.files["model.safetensors"].read_bytes() == (saved / "model.safetensors").read_bytes()


def test_a_class_of_the_text_alone_is_loaded_where_the_folder_names_it(tmp_path: Path) -> None:
    folder = save("qwen3_5_multimodal", tmp_path)
    config = msgspec.json.decode((folder / "config.json").read_bytes())
    (folder / "config.json").write_bytes(msgspec.json.encode({**config, "architectures": ["Qwen3_5ForCausalLM"]}))
    assert type(load_model(folder)).__name__ == "Qwen3_5ForCausalLM"


@pytest.mark.parametrize("targets", [(), ("q_proj",)])
def test_adapters_are_added_to_the_text_alone(targets: tuple[str, ...]) -> None:
    pytest.importorskip("peft")
    model = build_model("llava")  # its tower has q_proj too
    inject(model, LoraSettings(rank=2, targets=targets))
    adapted = [n for n, p in model.named_parameters() if p.requires_grad]
    assert adapted
    assert all(".language_model." in n for n in adapted)


def test_the_memory_plan_trains_the_text_alone(tmp_path: Path) -> None:
    folder = save("gemma3_multimodal", tmp_path)
    model = load_model(folder)
    settings = UpdateConfig()
    plan = plan_folder(settings, folder, Plugins(settings))
    trained = sum(p.numel() for n, p in model.named_parameters() if n in text_part(model))
    assert (plan.gradients, plan.optimizer) == (4 * trained, 8 * trained)
    assert plan.weights > 4 * trained


def test_other_kinds_of_models_are_rejected_by_name(tmp_path: Path) -> None:
    WhisperConfig(architectures=["WhisperForConditionalGeneration"]).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"model_type `whisper` \(WhisperForConditionalGeneration\) is neither a causal"
    ):
        load_model(tmp_path)
    make: Any = T5ForConditionalGeneration
    sizes: dict[str, Any] = {"vocab_size": 96, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    with pytest.raises(
        ValueError, match="T5ForConditionalGeneration cannot be trained: its forward on tokens alone raises"
    ):
        BatchTrainer(make(T5Config(**sizes)), UpdateConfig(), seed=0)
