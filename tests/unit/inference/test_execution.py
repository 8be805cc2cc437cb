"""Each model runs with the fastest forward that equals transformers. A model without one is rejected before the engine
serves."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rollmesh.services.inference.engine import WeightsMismatch
from rollmesh.services.inference.engines.torch import execution
from rollmesh.services.inference.engines.torch.config import TorchEngineConfig
from rollmesh.services.inference.engines.torch.engine import TorchEngine
from rollmesh.services.inference.engines.torch.execution import open_runner
from rollmesh.services.inference.engines.torch.self_check import SLOTS, SelfCheck, reference_model
from rollmesh.shared.errors import ConfigError
from rollmesh.trainer import spread_model
from tests.models.architectures import build_model


def config_of(model: Any, folder: Path, **fields: Any) -> TorchEngineConfig:
    model.config.save_pretrained(folder)
    return TorchEngineConfig(model=str(folder), **{"context_max": 64, "slots_max": SLOTS, **fields})


@pytest.mark.parametrize(
    ("name", "forward"),
    [("qwen3", "built_in"), ("gemma3", "cached"), ("gpt2", "cached"), ("recurrent_gemma", "recompute")],
)
def test_runner_equals_the_plain_forward_of_the_whole_model(name: str, forward: str, tmp_path: Path) -> None:
    model: Any = build_model(name)
    runner, execution = open_runner(config_of(model, tmp_path))
    assert execution.forward == forward
    check = SelfCheck(copy.deepcopy(model), torch.device("cpu"))
    assert check.difference(runner, runner.lay_out(dict(model.state_dict()))) < 1e-4


def test_slower_forward_gives_its_reason(tmp_path: Path) -> None:
    _, execution = open_runner(config_of(build_model("recurrent_gemma"), tmp_path))
    assert "built_in: model_type 'recurrent_gemma' is not one of" in execution.reason
    assert "cached: log-probs differ by" in execution.reason


async def test_model_that_is_not_causal_is_a_configuration_error(tmp_path: Path) -> None:
    model: Any = build_model("bert")
    model.config.is_decoder = False
    engine = TorchEngine(config_of(model, tmp_path))
    with pytest.raises(ConfigError, match="model_type `bert` in .* cannot be served.*recompute: log-probs differ"):
        await engine.start()
    await engine.close()


async def test_folder_without_a_model_is_a_configuration_error(tmp_path: Path) -> None:
    engine = TorchEngine(TorchEngineConfig(model=str(tmp_path)))
    with pytest.raises(ConfigError, match=f"model {tmp_path}: config.json cannot be read"):
        await engine.start()
    await engine.close()


@pytest.mark.slow  # transformers imports all of its configurations for the message
def test_encoder_decoder_is_a_configuration_error(tmp_path: Path) -> None:
    from transformers import T5Config

    T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="transformers cannot run model_type `t5`"):
        open_runner(TorchEngineConfig(model=str(tmp_path)))


async def test_context_beyond_the_positions_is_a_configuration_error(tmp_path: Path) -> None:
    engine = TorchEngine(config_of(build_model("qwen3"), tmp_path, context_max=129))
    with pytest.raises(ConfigError, match="context_max`: 129 is beyond the 128 positions"):
        await engine.start()
    await engine.close()


def test_forced_forward_is_compared_as_well(tmp_path: Path) -> None:
    _, execution = open_runner(config_of(build_model("qwen3"), tmp_path, forward="recompute"))
    assert execution.forward == "recompute"
    model = build_model("recurrent_gemma")
    with pytest.raises(ConfigError, match="cached: log-probs differ"):
        open_runner(config_of(model, tmp_path / "recurrent", forward="cached"))


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_experts_may_be_sent_one_by_one_as_files_name_them(name: str, tmp_path: Path) -> None:
    model = build_model(name)
    runner, _ = open_runner(config_of(model, tmp_path))
    model.save_pretrained(tmp_path)
    of_files, of_modules = load_file(tmp_path / "model.safetensors"), dict(model.state_dict())
    assert len(of_files) > len(of_modules)
    row = np.arange(1, 20, dtype=np.int32)
    (found,), (expected,) = (runner.score(runner.lay_out(state), [row]) for state in (of_files, of_modules))
    np.testing.assert_array_equal(found["logprobs"], expected["logprobs"])


@pytest.mark.parametrize("name", ["gpt2", "qwen3_next"])
def test_large_model_is_checked_by_a_few_layers_of_every_type(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = build_model(name).config
    whole = copy.deepcopy(config)
    whole.num_hidden_layers = 12
    if getattr(config, "layer_types", None):
        whole.layer_types = ["linear_attention"] * 3 + ["full_attention"] + ["linear_attention"] * 8
    monkeypatch.setattr(spread_model, "_WHOLE_PARAMETERS", 1000)
    small = reference_model(whole).config
    assert small.num_hidden_layers == (4 if name == "qwen3_next" else 2)


def test_plain_model_rejects_unfit_weights_by_name(tmp_path: Path) -> None:
    model: Any = build_model("gpt2")
    runner, _ = open_runner(config_of(model, tmp_path))
    norm, state = "transformer.ln_f.weight", dict(model.state_dict())
    faults = [
        ({name: tensor for name, tensor in state.items() if name != norm}, f"missing.*{norm}"),
        ({**state, "other": torch.zeros(1)}, "unexpected.*other"),
        ({**state, norm: torch.zeros(3)}, f"mismatched.*{norm}"),
        ({**state, "lm_head.weight": torch.zeros_like(state["lm_head.weight"])}, "output layer differs"),
    ]
    for faulty, message in faults:
        with pytest.raises(WeightsMismatch, match=message):
            runner.lay_out(faulty)


@pytest.mark.parametrize("where", ["reference_model", "_runner"])
def test_a_lack_of_memory_is_an_error_with_a_remedy_and_no_choice(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(execution, where, fail)
    with pytest.raises(torch.OutOfMemoryError, match="memory ran out .*free memory on the device"):
        open_runner(config_of(build_model("gpt2"), tmp_path))
