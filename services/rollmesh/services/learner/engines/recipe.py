"""A recipe by name, with a user's changes, as the trainer's `UpdateConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

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
    if name not in RECIPES:
        raise ConfigError(f"recipe: there is no `{name}`; known: {', '.join(RECIPES)}", key="recipe")
    advantage = changes.get("advantage")
    if isinstance(advantage, Mapping) and "weights" in advantage:
        raise ConfigError(
            "`recipe_options.advantage.weights`: weights of rewards are set once, for the trainer and the finalizer; set "
            "`reward.weights`",
            key="recipe_options.advantage.weights",
        )
    merged = _merged(msgspec.to_builtins(RECIPES[name]), changes)
    try:
        recipe = config_from_dict(UpdateConfig, merged)
    except ConfigError as err:
        raise ConfigError(f"recipe_options: {err.message}", violations=err.violations, key="recipe_options") from err
    return replace(recipe, advantage=replace(recipe.advantage, weights=dict(reward_weights or {})))


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    if "name" in changes and changes["name"] != base.get("name"):
        return dict(changes)
    result = dict(base)
    for key, value in changes.items():
        below = base.get(key)
        result[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result
