"""A model is a folder, or an id of the Hugging Face Hub that is in the local cache; nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollmesh.shared.errors import ConfigError
from rollmesh.shared.weights.model_folder import check_positions, find_model, positions_max

ID = "Qwen/Qwen2.5-0.5B-Instruct"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path / "hf" / "hub"


def add_snapshot(cache: Path) -> Path:
    repository = cache / "models--Qwen--Qwen2.5-0.5B-Instruct"
    snapshot = repository / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc123")
    (snapshot / "config.json").write_text("{}")
    return snapshot


def test_folder_comes_before_the_hub(cache: Path, tmp_path: Path) -> None:
    add_snapshot(cache)
    folder = tmp_path / ID
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert find_model(ID, tmp_path) == folder


def test_hub_id_in_the_cache_is_its_snapshot(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = add_snapshot(cache)
    assert find_model(ID, tmp_path) == snapshot
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    with pytest.raises(ConfigError, match=f"not in the cache {tmp_path}/elsewhere"):
        find_model(ID, tmp_path)


def test_cached_snapshot_is_the_one_that_huggingface_hub_finds(cache: Path, tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    add_snapshot(cache)
    assert str(find_model(ID, tmp_path)) == hub.snapshot_download(ID, cache_dir=cache, local_files_only=True)


def test_hub_id_that_is_not_there_says_what_to_download(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"no folder {tmp_path}/{ID}.*run `hf download {ID}`, or copy"):
        find_model(ID, tmp_path)


@pytest.mark.parametrize("name", ["", "models/mine/last", "gone", "../up"])
def test_what_is_neither_a_model_nor_an_id_is_rejected(cache: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="name a folder with a model in transformers format"):
        find_model(name, tmp_path)


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({"max_position_embeddings": 128}, 128),
        ({"n_positions": 64}, 64),
        ({"text_config": {"max_position_embeddings": 32}}, 32),
        (
            {
                "max_position_embeddings": 131072,
                "original_max_position_embeddings": 4096,
                "rope_scaling": {"type": "longrope"},
            },
            4096,
        ),
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3"}}, 131072),
        ({}, None),
    ],
)
def test_positions_are_those_of_the_configuration(config: dict[str, Any], limit: int | None) -> None:
    assert positions_max(config) == limit


def test_context_beyond_the_positions_names_the_key_and_the_remedy() -> None:
    check_positions({"max_position_embeddings": 16}, 16, model="m", key="k")
    with pytest.raises(ConfigError, match=r"`k`: 17 is beyond the 16 positions of m .* to at most 16"):
        check_positions({"max_position_embeddings": 16}, 17, model="m", key="k")


def test_the_folder_of_an_adapter_is_an_error_that_names_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds a low-rank adapter and no weights of a model; merge it into its base"):
        find_model(str(tmp_path), tmp_path)
