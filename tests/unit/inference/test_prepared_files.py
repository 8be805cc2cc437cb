import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from rollmesh.services.inference.engine import WeightsMismatch
from rollmesh.services.inference.engines.vllm.prepared_files import PreparedFiles, files_in, keep_files
from rollmesh.services.inference.engines.vllm.weights_fit import ExpectedTensors
from rollmesh.shared.domain.versions import PolicyVersion


def version(step: int) -> PolicyVersion:
    return PolicyVersion(policy="main", step=step, weights_digest=f"d{step}")


def add(prepared: PreparedFiles, step: int, source: Path) -> Path:
    folder = prepared.new_folder()
    keep_files({"b": source, "a": source}, folder)
    prepared.put(version(step), folder)
    return folder


def test_files_stay_when_their_source_is_deleted_until_they_are_dropped(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"weights")
    prepared = PreparedFiles(str(tmp_path / "kept"), 2)
    folders = [add(prepared, step, source) for step in range(3)]
    assert os.stat(source).st_nlink == 5  # linked, not copied
    source.unlink()
    assert [folder.exists() for folder in folders] == [False, True, True]
    assert (version(0) in prepared, version(1) in prepared) == (False, True)
    with pytest.raises(KeyError):
        prepared.take(version(0))
    assert [Path(path).read_bytes() for path in files_in(prepared.take(version(1)))] == [b"weights"] * 2
    prepared.discard(version(2))
    prepared.discard(version(7))
    assert not folders[2].exists()
    prepared.close()
    assert not (tmp_path / "kept").exists()


def test_files_of_an_earlier_process_are_deleted(tmp_path: Path) -> None:
    (tmp_path / "kept/3").mkdir(parents=True)
    PreparedFiles(str(tmp_path / "kept"), 2)
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize("tied", [True, False])
def test_a_state_dict_fits_under_the_names_of_the_model_only(tmp_path: Path, tied: bool) -> None:
    config = Qwen3Config(
        vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=4,
        intermediate_size=8, tie_word_embeddings=tied,
    )  # fmt: skip
    model_class: Any = Qwen3ForCausalLM
    with torch.device("meta"):
        expected = ExpectedTensors(model_class(config))
    state = {name: tensor.clone() for name, tensor in model_class(config).state_dict().items()}
    head, norm = "lm_head.weight", "model.norm.weight"

    def check(**changes: torch.Tensor | None) -> None:
        changed = {**state, **{name.replace("__", "."): tensor for name, tensor in changes.items()}}
        save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, tmp_path / "file")
        expected.check({"file": tmp_path / "file"})

    check()
    for name, change, message in [
        (norm, None, f"{norm} is missing"),
        (norm, torch.zeros(3), f"{norm} has shape"),
        (norm, torch.full((8,), torch.inf), f"{norm} has a value"),
        (norm, torch.zeros(8, dtype=torch.float64), f"{norm} has dtype"),
        ("other", torch.zeros(1), "other does not belong"),
        (head, torch.zeros(16, 8) if tied else None, f"{head} (differs|is missing)"),
    ]:
        with pytest.raises(WeightsMismatch, match=message):
            check(**{name.replace(".", "__"): change})
    if tied:
        check(lm_head__weight=None)
    (tmp_path / "damaged").write_bytes(b"\xff" * 100)
    with pytest.raises(WeightsMismatch, match="file damaged at .* is not readable"):
        expected.check({"damaged": tmp_path / "damaged"})
    with pytest.raises(WeightsMismatch, match="is in two files"):
        expected.check({"a": tmp_path / "file", "b": tmp_path / "file"})
