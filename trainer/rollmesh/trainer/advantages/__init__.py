"""Advantages by registry name: what each sample of an update is worth compared with its group."""

from __future__ import annotations

from collections.abc import Callable

from rollmesh.trainer.advantages.base import Advantage, AdvantageConfig, SegmentAdvantages
from rollmesh.trainer.advantages.gdpo import Gdpo
from rollmesh.trainer.advantages.grpo import Grpo

ADVANTAGES: dict[str, Callable[[AdvantageConfig], Advantage]] = {"grpo": Grpo, "gdpo": Gdpo}
"""Name -> constructor. A new one is a file in this folder and a line here, or `ADVANTAGES[name] = ...` in a user's module."""


def make_advantage(config: AdvantageConfig) -> Advantage:
    """The advantage a config names. Raises ValueError listing the known names."""
    if config.name not in ADVANTAGES:
        raise ValueError(f"advantage {config.name!r} is not known; known are {', '.join(sorted(ADVANTAGES))}")
    return ADVANTAGES[config.name](config)


__all__ = ["ADVANTAGES", "Advantage", "AdvantageConfig", "SegmentAdvantages", "make_advantage"]
