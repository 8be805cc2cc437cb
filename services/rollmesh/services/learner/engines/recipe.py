"""A recipe by name, with a user's changes, as the trainer's `UpdateConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from rollmesh.services.learner.recipe_advantage import merged_options, options_error, recipe_advantage
from rollmesh.shared.config import config_from_dict
from rollmesh.shared.errors import ConfigError
from rollmesh.trainer.recipes import RECIPES
from rollmesh.trainer.update import UpdateConfig


def resolve_recipe(
    name: str, changes: Mapping[str, Any], reward_weights: Mapping[str, float] | None = None
) -> UpdateConfig:
    """The recipe `name` with `changes` laid over it, nested by key, and the run's weights of rewards in its advantage.

    A part whose `name` changes (another loss, another advantage) starts from that one's defaults. Raises `ConfigError` naming the
    recipe or the key.
    """
    advantage = replace(recipe_advantage(name, changes), weights=dict(reward_weights or {}))
    merged = merged_options(msgspec.to_builtins(RECIPES[name]), changes)
    try:
        recipe = config_from_dict(UpdateConfig, merged)
    except ConfigError as err:
        raise options_error(err) from err
    return replace(recipe, advantage=advantage)
