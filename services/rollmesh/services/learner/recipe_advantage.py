"""The advantage of a recipe with a user's changes. Loads no torch: the reward service asks for it, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from rollmesh.shared.config import config_from_dict
from rollmesh.shared.errors import ConfigError
from rollmesh.trainer.advantages import ADVANTAGES, AdvantageConfig
from rollmesh.trainer.advantages.of_recipes import RECIPE_ADVANTAGES


def recipe_advantage(name: str, changes: Mapping[str, Any]) -> AdvantageConfig:
    """The advantage of the recipe `name` with the changes of `recipe_options`, and without weights of rewards.

    Raises `ConfigError` naming the recipe or the key.
    """
    if name not in RECIPE_ADVANTAGES:
        raise ConfigError(f"recipe: there is no `{name}`; known: {', '.join(RECIPE_ADVANTAGES)}", key="recipe")
    changed = changes.get("advantage", {})
    if isinstance(changed, Mapping) and "weights" in changed:
        raise ConfigError(
            "`recipe_options.advantage.weights`: weights of rewards are set once, for the trainer and the finalizer; set "
            "`reward.weights`",
            key="recipe_options.advantage.weights",
        )
    merged = merged_options({"advantage": msgspec.to_builtins(RECIPE_ADVANTAGES[name])}, {"advantage": changed})
    try:
        advantage = config_from_dict(_AdvantageOptions, merged).advantage
    except ConfigError as err:
        raise options_error(err) from err
    if advantage.name not in ADVANTAGES:
        raise ConfigError(
            f"recipe_options: `advantage.name` must be one of {', '.join(ADVANTAGES)}, got {advantage.name!r}",
            key="recipe_options",
        )
    return advantage


def merged_options(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`changes` laid over `base`, nested by key. A part whose `name` changes starts from that one's defaults."""
    if "name" in changes and changes["name"] != base.get("name"):
        return dict(changes)
    result = dict(base)
    for key, value in changes.items():
        below = base.get(key)
        result[key] = merged_options(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result


def options_error(err: ConfigError) -> ConfigError:
    """The mistake in the options of a recipe, with the key under which the user wrote them."""
    return ConfigError(f"recipe_options: {err.message}", violations=err.violations, key="recipe_options")


class _AdvantageOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The part of the recipe's options that is read here."""

    advantage: AdvantageConfig
