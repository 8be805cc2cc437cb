"""Several ranks load a model of which only rank 0 has a whole copy, and get exactly what transformers loads."""

from __future__ import annotations

import json
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rollmesh.trainer.model_config import has_tied_head
from rollmesh.trainer.model_files import load_weights, write_weights
from rollmesh.trainer.sharding import empty_model
from tests.forked import ForkServer, run_all
from tests.models.architectures import build_model

NAMES = ("qwen3", "gemma2", "mixtral", "qwen2_vl")
"""A plain model, capped attention with tied embeddings, experts that transformers joins when it loads them, an image
model."""

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer() as started:
        yield started


def run_ranks(
    server: ForkServer, folder: Path, size: int, *arguments: Path | str
) -> list[subprocess.CompletedProcess[str]]:
    """Run the worker on `size` ranks, and return how each has ended."""
    commands = [[str(folder), str(rank), str(size), *map(str, arguments)] for rank in range(size)]
    return run_all(server, "tests.unit.trainer.loading_worker", folder, commands)


def test_every_rank_gets_its_part_of_exactly_what_the_library_loads(tmp_path: Path, server: ForkServer) -> None:
    for name in NAMES:
        build_model(name).save_pretrained(tmp_path / name)
    with (tmp_path / "mixtral" / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    assert any("experts.1.w1" in key for key in header), "experts are stored one by one, and trained as one tensor"
    ended = run_ranks(server, tmp_path, 3, *(tmp_path / name for name in NAMES))
    assert [process.returncode for process in ended] == [0] * 3, [process.stderr[-2000:] for process in ended]
    assert "makes the model whole" not in ended[1].stderr


def test_only_rank_0_needs_the_memory_of_a_whole_model(tmp_path: Path, server: ForkServer) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
    model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        Qwen3Config(vocab_size=1024, num_hidden_layers=6, head_dim=64, **sizes)
    )
    whole = sum(parameter.nbytes for parameter in model.parameters())
    for name in ("warm", "large"):
        (build_model("qwen3") if name == "warm" else model).save_pretrained(tmp_path / name)
    ended = run_ranks(server, tmp_path, 4, tmp_path / "warm", tmp_path / "large", "--opens-only")
    assert [process.returncode for process in ended] == [0] * 4, [process.stderr[-2000:] for process in ended]
    growth = [after - before for before, after in (map(int, process.stdout.split()) for process in ended)]
    assert growth[0] > 0.9 * whole
    assert max(growth[1:]) < 0.6 * whole, "a quarter of the weights, and the part of one tensor"


def test_the_other_ranks_end_if_rank_0_cannot_read_the_model(tmp_path: Path, server: ForkServer) -> None:
    build_model("qwen3").save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"damaged")
    first, second = run_ranks(server, tmp_path, 2, tmp_path / "model")
    assert "no model can be loaded from" in first.stderr
    assert "rank 0 of the trainer failed while this rank waited for it" in second.stderr
    assert 0 not in (first.returncode, second.returncode)


class ReadsValues(Qwen3ForCausalLM):  # type: ignore[no-untyped-call]
    """A model whose code reads values when it is made."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config)  # type: ignore[no-untyped-call]
        self.scale = float(self.lm_head.weight.abs().max())


def test_a_model_that_cannot_be_made_without_values_is_whole_on_every_rank(caplog: pytest.LogCaptureFixture) -> None:
    model = build_model("qwen3")
    found = empty_model(ReadsValues, model.config)
    assert "this rank makes the model whole, because it cannot be made without values: ReadsValues" in caplog.text
    assert not any(parameter.is_meta for parameter in found.parameters())


@pytest.mark.parametrize("name", ["diffllama", "gemma2"])
def test_a_model_without_values_has_the_names_and_ties_of_the_whole_one(name: str) -> None:
    model = build_model(name)
    found = empty_model(type(model), model.config)
    assert all(parameter.is_meta for parameter in found.parameters()), "also those that its code makes from constants"
    assert {n: p.shape for n, p in found.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    assert has_tied_head(found) is has_tied_head(model)


def test_weights_that_a_rank_cannot_read_are_an_error(tmp_path: Path) -> None:
    model = build_model("qwen3")
    with pytest.raises(ValueError, match=r"absent cannot be read: .*every rank must be able to read it"):
        load_weights(model, tmp_path / "absent")
    (tmp_path / "damaged").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="damaged cannot be read"):
        load_weights(model, tmp_path / "damaged")
    write_weights(build_model("llama"), tmp_path / "other")
    with pytest.raises(ValueError, match="other has other tensors than the model"):
        load_weights(model, tmp_path / "other")


def test_a_file_of_weights_has_the_bytes_that_the_library_writes(tmp_path: Path) -> None:
    model = build_model("qwen3_moe")
    state = {name: values.contiguous() for name, values in model.state_dict().items()}
    state["a scalar"], state["none"] = torch.tensor(2.5), torch.zeros(0, 3)
    for dtype in (torch.float32, torch.bfloat16):
        write_weights(model, tmp_path / "mine", state, dtype=dtype)
        expected = {name: values.to(dtype) for name, values in state.items()}
        save_file(expected, tmp_path / "theirs", metadata={"format": "pt"})
        assert (tmp_path / "mine").read_bytes() == (tmp_path / "theirs").read_bytes()
    state |= {"a": torch.arange(3), "b": torch.tensor([True, False]), "é": torch.ones(3, dtype=torch.float16)}
    write_weights(model, tmp_path / "mixed", state)
    found = load_file(tmp_path / "mixed")
    assert set(found) == set(state)
    assert all(torch.equal(found[name], values) and found[name].dtype is values.dtype for name, values in state.items())
