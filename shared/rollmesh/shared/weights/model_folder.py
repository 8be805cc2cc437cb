"""Where the model of a run is, and how long its sequences may be. Reads files only: no network, no model library.

`check`, `train`, `up`, `rollout` and the engine use these functions, so that all of them give the same answer and the
same error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollmesh.shared.errors import ConfigError
from rollmesh.shared.weights.manifest import ADAPTER_CONFIG

_WEIGHT_FILES = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".onnx")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def find_model(model: str, base_dir: Path, key: str = "model") -> Path:
    """The folder that `model` names: a path relative to `base_dir`, or an id of the Hugging Face Hub that is in the
    local cache.

    Raises ConfigError with the remedy. `key` is the setting that names the model.
    """
    if not model:
        raise ConfigError(f"`{key}` is empty; name a folder with a model in transformers format", key=key)
    folder = (base_dir / model).resolve()
    if (folder / "config.json").is_file():
        return folder
    if (folder / ADAPTER_CONFIG).is_file():
        raise ConfigError(
            f"`{key}`: {folder} holds a low-rank adapter and no weights of a model; merge it into its base (`rollmesh "
            f"merge {folder} --out MODEL`), and name that folder",
            key=key,
        )
    if folder.is_file() or folder.suffix in _WEIGHT_FILES:
        raise ConfigError(
            f"`{key}` must be a folder with a model in transformers format (config.json, safetensors, tokenizer), got "
            f"the file {folder}; name the folder, or convert the file",
            key=key,
        )
    if folder.exists() or not _HUB_ID.fullmatch(model):
        raise ConfigError(
            f"`{key}`: {folder} does not contain a config.json; name a folder with a model in transformers format",
            key=key,
        )
    snapshot = _cached_snapshot(model)
    if snapshot is None:
        raise ConfigError(
            f"`{key}`: there is no folder {folder}, and {model} is not in the cache {_hub_cache()}; rollmesh does not "
            f"download models: run `hf download {model}`, or copy the model into a folder and name that folder",
            key=key,
        )
    return snapshot


def _cached_snapshot(model: str) -> Path | None:
    """Newest snapshot of the main branch in the layout of huggingface_hub's cache."""
    repository = _hub_cache() / f"models--{model.replace('/', '--')}"
    try:
        commit = (repository / "refs" / "main").read_text().strip()
    except OSError:
        return None
    snapshot = repository / "snapshots" / commit
    return snapshot if commit and (snapshot / "config.json").is_file() else None


def _hub_cache() -> Path:
    """Return the folder of the cache in the same way as huggingface_hub."""
    if cache := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache).expanduser()
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    return Path(home).expanduser() / "hub"


def check_positions(config: Mapping[str, Any], context_max: int, *, model: str, key: str) -> None:
    """Raise ConfigError if sequences of `context_max` tokens are beyond the positions that the fields of a model's
    configuration give. `model` is how the message calls the model, `key` is the setting that gives `context_max`."""
    limit = positions_max(config)
    if limit is not None and context_max > limit:
        raise ConfigError(
            f"`{key}`: {context_max} is beyond the {limit} positions of {model} (max_position_embeddings); set it and "
            f"rollout.limits.context_tokens_max to at most {limit}",
            key=key,
        )


def positions_max(config: Mapping[str, Any]) -> int | None:
    """Return the maximum number of tokens of a sequence by the fields of a configuration; None if they do not state it.

    With `longrope` these are the original positions: beyond them all frequencies change, and the log-probs of earlier
    tokens would depend on the length of the sequence.
    """
    config = config.get("text_config") or config
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    if rope.get("rope_type", rope.get("type")) == "longrope" and original:
        return int(original)
    found = config.get("max_position_embeddings") or config.get("n_positions")
    return int(found) if found else None
