"""How a tiny model is made. Free of torch, so that `check` finds mistakes before anything heavy is loaded."""

from __future__ import annotations

from typing import Any

import msgspec

from rollmesh.services.data.config import GeneratedSource


class MadeModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tiny model made in the run folder and warm-started on demonstrations of a generated source.

    It learns from the train range and stops by the validation range; the test range stays unseen.
    """

    shape: dict[str, Any] = {}
    """Changes to the model's shape, see `rollmesh.demo.tiny_model.TinyModelConfig`."""
    warm_start: dict[str, Any] = {}
    """Changes to the supervised training, see `rollmesh.demo.sft.WarmStartConfig`."""
    tasks: GeneratedSource | None = None
    """What is demonstrated, the levels by which success is measured, and the hash ranges; unset takes `data.source`. Where both are of
    one kind, the shares must be the same."""
    seed: int = 0
    """Key of the weights and of the demonstrations; 0 takes the run's seed."""

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"seed must be >= 0, got {self.seed}")
