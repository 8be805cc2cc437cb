"""Recipes: named compositions of advantage, loss, corrections, optimiser and schedule. Composition only, no code paths."""

from __future__ import annotations

from rollmesh.trainer.recipes.grpo import DR_GRPO, GDPO, GRPO, GRPO_DECOUPLED, GRPO_TIS
from rollmesh.trainer.update import UpdateConfig

RECIPES: dict[str, UpdateConfig] = {
    "grpo": GRPO,
    "dr_grpo": DR_GRPO,
    "gdpo": GDPO,
    "grpo_decoupled": GRPO_DECOUPLED,
    "grpo_tis": GRPO_TIS,
}
"""Name -> what the trainer does."""

__all__ = ["DR_GRPO", "GDPO", "GRPO", "GRPO_DECOUPLED", "GRPO_TIS", "RECIPES"]
