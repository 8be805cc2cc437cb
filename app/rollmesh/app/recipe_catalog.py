"""One recipe as the catalog describes it: what it says about itself, what its parts need, and the settings that it
changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from rollmesh.app.checks.config_checks import make_plugins
from rollmesh.app.checks.effective_config import effective_learner
from rollmesh.mesh.config import MeshConfig
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.trainer.needs import MethodNeeds, needs_of
from rollmesh.trainer.recipe import About, find_recipe, read_recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A recipe and what follows from it."""

    name: str
    about: About
    needs: MethodNeeds
    file: Path
    changed: dict[str, Any]
    """Key -> value, for the settings that differ from the defaults. An extension is one value, with all of its
    options."""

    def as_json(self) -> dict[str, Any]:
        """Return the entry of `rollmesh recipes --json`."""
        about, needs = msgspec.to_builtins(self.about), msgspec.to_builtins(self.needs)
        return {"name": self.name, **about, "needs": needs, "file": str(self.file)}


def load_method(name: str) -> Method:
    """Return a recipe: a built-in by its name, or a user's by its path, relative to the working directory. Loads torch.

    Files that a user's recipe names are relative to its folder, where the configurations that use it are. Raises
    ConfigError.
    """
    file = find_recipe(name)
    about, _ = read_recipe(file)
    config = config_from_dict(MeshConfig, {"recipe": str(file.absolute())})
    plugins = make_plugins(config, file.parent)
    needs = needs_of(plugins, config.learner, config.reward.weights)
    return Method(
        name=name,
        about=about,
        needs=replace(needs, given_solutions=about.given_solutions),
        file=file,
        changed=dict(_changes(_written_out(MeshConfig(), file.parent), _written_out(config, file.parent))),
    )


def _written_out(config: MeshConfig, base_dir: Path) -> dict[str, Any]:
    """Return the configuration with the options of the parts of an update, without the name of the recipe."""
    learner = effective_learner(config, base_dir)
    found: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(config, learner=learner))
    return {key: value for key, value in found.items() if key not in ("recipe", "recipe_applied")}


def _changes(default: dict[str, Any], value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted key and value for each value that differs from the default."""
    for key, mine in value.items():
        theirs = default.get(key)
        if mine == theirs:
            continue
        if isinstance(mine, dict) and isinstance(theirs, dict) and "options" not in mine:
            yield from _changes(theirs, mine, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", mine
