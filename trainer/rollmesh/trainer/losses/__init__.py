"""Policy losses by registry name: the config's type (its `name` in files) decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from rollmesh.trainer.losses.base import (
    LossInputs,
    Normalization,
    PolicyLoss,
    TokenStats,
    check_outputs,
    engine_outputs,
    token_weights,
)
from rollmesh.trainer.losses.decoupled_ppo import DecoupledPpo, DecoupledPpoConfig
from rollmesh.trainer.losses.ppo_clip import PpoClip, PpoClipConfig
from rollmesh.trainer.losses.tis import Tis, TisConfig

LossConfig = PpoClipConfig | DecoupledPpoConfig | TisConfig
"""What a config file says under `loss`; `name` picks the member."""

LOSSES: dict[type[msgspec.Struct], Callable[[Any], PolicyLoss]] = {
    PpoClipConfig: PpoClip,
    DecoupledPpoConfig: DecoupledPpo,
    TisConfig: Tis,
}
"""Config type -> constructor. A user's own loss registers its config type here."""


def make_loss(config: msgspec.Struct) -> PolicyLoss:
    """The loss a config stands for. Raises ValueError listing the known config types."""
    if type(config) not in LOSSES:
        known = ", ".join(t.__name__ for t in LOSSES)
        raise ValueError(f"no loss for a {type(config).__name__}; known are {known}")
    return LOSSES[type(config)](config)


__all__ = [
    "LOSSES",
    "DecoupledPpoConfig",
    "LossConfig",
    "LossInputs",
    "Normalization",
    "PolicyLoss",
    "PpoClipConfig",
    "TisConfig",
    "TokenStats",
    "check_outputs",
    "engine_outputs",
    "make_loss",
    "token_weights",
]
