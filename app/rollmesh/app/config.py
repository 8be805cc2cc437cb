"""The configuration that `rollmesh train` reads: a run, and optionally how to create its model first.

Free of torch, so that `check` finds mistakes before anything heavy is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from rollmesh.demo.config import MadeModelConfig
from rollmesh.mesh.config import MeshConfig
from rollmesh.shared.config.loader import load_config, read_config
from rollmesh.shared.errors import ConfigError

DEMO_CONFIG = Path(__file__).parent / "demo.yaml"
"""The configuration of the demo, in the package; `configs/demo.yaml` is a link to it."""


class TrainConfig(MeshConfig):
    """The configuration of a run, as the command reads it."""

    made_model: MadeModelConfig | None = None
    """How to create a model for the run; `model` must be empty then."""

    def check_fields(self) -> None:
        super().check_fields()
        if self.made_model is not None and self.model:
            raise ValueError(f"`model` must be empty if `made_model` is given, got {self.model!r}")

    def model_plan(self, base_dir: Path) -> MadeModelConfig | None:
        """Return `made_model` with its tasks filled in. A user's file in it is absolute."""
        plan = self.made_model
        if plan is None:
            return None
        return msgspec.structs.replace(plan, tasks=(plan.tasks or self.data.source).located(base_dir))


def read_train_config(path: Path, overrides: Sequence[str] = ()) -> tuple[TrainConfig | None, list[ConfigError]]:
    """Return the configuration and the mistakes in the file; see `rollmesh.shared.config.loader.read_config`."""
    return read_config(TrainConfig, path, overrides)


def load_train_config(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Return the configuration in a file. Raises ConfigError with key and line."""
    return load_config(TrainConfig, path, overrides)
