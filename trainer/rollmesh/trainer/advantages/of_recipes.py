"""The advantage of each recipe. It is apart from the recipes because the reward service reads it, on hosts without torch."""

from __future__ import annotations

from rollmesh.trainer.advantages.base import AdvantageConfig

RECIPE_ADVANTAGES: dict[str, AdvantageConfig] = {
    "grpo": AdvantageConfig(name="grpo"),
    "dr_grpo": AdvantageConfig(name="grpo", scale_by_std=False),
    "gdpo": AdvantageConfig(name="gdpo"),
    "grpo_decoupled": AdvantageConfig(name="grpo"),
    "grpo_tis": AdvantageConfig(name="grpo"),
}
"""Name of the recipe -> its advantage."""
