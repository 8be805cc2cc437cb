"""Merge the low-rank adapters of a checkpoint into their base: one model folder in plain transformers format.

Collaborators: `lora` (adapters), `model_files` (whole weights of a model with adapters).
"""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from rollmesh.shared.errors import ConfigError
from rollmesh.shared.weights.manifest import ADAPTER_CONFIG
from rollmesh.trainer.config import LoraSettings
from rollmesh.trainer.lora import BASE_NAME, Adapters
from rollmesh.trainer.model_files import load_model, load_tokenizer, write_model_folder


class _StoredSettings(msgspec.Struct, frozen=True):
    """Fields of adapter_config.json, as peft names them."""

    r: int
    lora_alpha: float
    target_modules: tuple[str, ...]


def base_of(checkpoint: Path) -> Path:
    """Return the folder of the base of a checkpoint of adapters. Raises ConfigError for another folder, or if the base
    is unknown."""
    if not (checkpoint / BASE_NAME).is_file() or not (checkpoint / ADAPTER_CONFIG).is_file():
        whole = "is not one" if checkpoint.is_dir() else "does not exist"
        if (checkpoint / "config.json").is_file():
            whole = "has whole weights, and is a model folder already"
        raise ConfigError(
            f"{checkpoint} must be a checkpoint of low-rank adapters that a learner wrote, and it {whole}"
        )
    base = msgspec.json.decode((checkpoint / BASE_NAME).read_bytes())["model"]
    if not base or not (Path(base) / "config.json").is_file():
        raise ConfigError(
            f"{checkpoint} has adapters of the model {base or 'of another process'}, which is not a model folder on "
            "this host; name its folder with --base"
        )
    return Path(base)


def merge_checkpoint(checkpoint: Path, folder: Path, base: Path | None = None) -> None:
    """Write the model with the adapters of a checkpoint merged, W + (alpha / rank) B A in float32, to a new folder,
    which appears whole.

    `base` is the folder of the base, by default that of the checkpoint. Raises ConfigError if the base has other
    weights than those of the checkpoint, if an adapter does not fit, or if `folder` exists.
    """
    base = base or base_of(checkpoint)
    if folder.exists():
        raise ConfigError(f"{folder} exists; name a new folder")
    try:
        stored = msgspec.json.decode((checkpoint / ADAPTER_CONFIG).read_bytes(), type=_StoredSettings)
        model = load_model(base)
        settings = LoraSettings(rank=stored.r, alpha=stored.lora_alpha, targets=stored.target_modules)
        Adapters(model, settings, seed=0).load(checkpoint)
        tokenizer = load_tokenizer(base) if (base / "tokenizer_config.json").is_file() else None
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise ConfigError(f"{checkpoint} cannot be merged into {base}: {error}") from error
    temporary = folder.with_name(f".tmp-{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    write_model_folder(model, tokenizer, temporary)
    temporary.rename(folder)
