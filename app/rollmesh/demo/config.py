"""Settings of a tiny model that is made for a run. The module does not import torch, so `check` finds mistakes
first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollmesh.services.data.generated import GeneratedSource
from rollmesh.services.data.mixture_source import single_sources
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
    """Generated source of the demonstrations, or a mixture of generated sources. It also has the levels by which
    success is measured, and the hash ranges. Default: `data.source`. If both have the same name, their shares must be
    equal."""
    seed: NonNegativeInt = 0
    """Seed of the weights and of the demonstrations. 0 means the seed of the run."""


def demonstrated_sources(config: MadeModelConfig, base_dir: str | Path | None = None) -> list[GeneratedSource]:
    """Return the sources of the demonstrations, several for a mixture. Raise ConfigError if one is not generated."""
    key = "made_model.tasks"
    chosen = [] if config.tasks is None else [one for _, one in single_sources(config.tasks, key)]
    sources = [SOURCES.make(one, base_dir, base_dir=base_dir) for one in chosen]
    if not sources or not all(isinstance(source, GeneratedSource) for source in sources):
        raise ConfigError(
            f"`{key}`: name a generated source, for example calc, or a mixture of them, because `data.source` does not "
            "generate all its tasks",
            key=key,
        )
    return sources
