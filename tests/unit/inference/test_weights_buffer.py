"""All tensors of a version are checked before it can become active."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollmesh.services.inference.engine import WeightsMismatch
from rollmesh.services.inference.engines.common.weights_buffer import WeightsBuffer
from rollmesh.services.inference.engines.torch.model import Weights

from .builders import TinyModel, load_weights, read_spec, version

Q = "model.layers.1.self_attn.q_proj.weight"
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
State = dict[str, torch.Tensor]


def load(tiny: TinyModel, tmp_path: Path, change: Callable[[State], object]) -> None:
    state = load_file(tiny.file(0))
    change(state)
    save_file(state, tmp_path / "w.safetensors")
    load_weights(read_spec(tiny.folder), {"w": tmp_path / "w.safetensors"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop(Q), f"{Q} is missing"),
        (lambda s: s.update({Q: s[Q][:-1].clone()}), rf"{Q} has shape \[63, 64\], the model needs \[64, 64\]"),
        (lambda s: s[Q].view(-1)[7].fill_(float("nan")), f"{Q} has a value that is NaN"),
        (lambda s: s[Q].view(-1)[7].fill_(float("inf")), f"{Q} has a value that is NaN or infinite"),
        (lambda s: s.update({Q: s[Q].to(torch.int32)}), f"{Q} has dtype torch.int32"),
        (lambda s: s.update({"extra.weight": torch.zeros(2)}), "extra.weight does not belong"),
        (lambda s: s.update({HEAD: s[EMBED] + 1}), f"{HEAD} differs from {EMBED}"),
    ],
)
def test_unfit_weights_are_rejected_by_name(
    tiny: TinyModel, tmp_path: Path, change: Callable[[State], object], message: str
) -> None:
    with pytest.raises(WeightsMismatch, match=message):
        load(tiny, tmp_path, change)


def test_redundant_equal_head_and_lower_precision_are_accepted(tiny: TinyModel, tmp_path: Path) -> None:
    load(tiny, tmp_path, lambda s: s.update({HEAD: s[EMBED].clone()}))
    load(tiny, tmp_path, lambda s: s.update({name: tensor.bfloat16() for name, tensor in s.items()}))


def test_state_split_over_files_loads_and_a_tensor_in_two_is_refused(tiny: TinyModel, tmp_path: Path) -> None:
    state = load_file(tiny.file(0))
    first = {EMBED: state.pop(EMBED)}
    save_file(first, tmp_path / "a")
    save_file(state, tmp_path / "b")
    spec = read_spec(tiny.folder)
    weights = load_weights(spec, {"a": tmp_path / "a", "b": tmp_path / "b"})
    assert torch.equal(weights.embed, first[EMBED])
    with pytest.raises(WeightsMismatch, match="in two files"):
        load_weights(spec, {"a": tmp_path / "a", "b": tmp_path / "b", "c": tmp_path / "a"})


def test_file_that_is_not_safetensors_is_rejected_by_path(tiny: TinyModel, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(b"not tensors")
    with pytest.raises(WeightsMismatch, match="w.safetensors is not readable"):
        load_weights(read_spec(tiny.folder), {"w": path})


def test_buffer_drops_the_oldest_beyond_its_limit(tiny: TinyModel) -> None:
    buffer, weights = WeightsBuffer[Weights](2), tiny.weights(0)
    versions = [version(step) for step in range(3)]
    for each in versions:
        buffer.put(each, weights)
    assert [each in buffer for each in versions] == [False, True, True]
