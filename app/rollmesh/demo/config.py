"""Settings of a tiny model that is made for a run. The module does not import torch, so `check` finds mistakes
first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollmesh.services.data.generated import GeneratedSource
from rollmesh.services.data.source import SOURCES
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.config.settings import NonNegativeInt, Settings
from rollmesh.shared.errors import ConfigError


class MadeModelConfig(Settings):
    """A tiny model made in the run folder and warm-started on demonstrations of a generated source.

    It is trained on the train range and stops by the validation range. It never sees the test range.
    """

    shape: dict[str, Any] = {}
    """Changes to the shape of the model, see `rollmesh.demo.tiny_model.TinyModelConfig`."""
    warm_start: dict[str, Any] = {}
    """Changes to the supervised training, see `rollmesh.demo.sft.WarmStartConfig`."""
    tasks: Extension | None = None
    """Generated source of the demonstrations. It also has the levels by which success is measured, and the hash ranges.
    Default: `data.source`. If both have the same name, their shares must be equal."""
    seed: NonNegativeInt = 0
    """Seed of the weights and of the demonstrations. 0 means the seed of the run."""


def demonstrated_source(config: MadeModelConfig, base_dir: str | Path | None = None) -> GeneratedSource:
    """Return the source of the demonstrations. Raise ConfigError if it is not a generated one."""
    key = "made_model.tasks"
    source = None if config.tasks is None else SOURCES.make(config.tasks, base_dir, base_dir=base_dir)
    if not isinstance(source, GeneratedSource):
        raise ConfigError(
            f"`{key}`: name a generated source, for example calc, because `data.source` does not generate its tasks",
            key=key,
        )
    return source
