"""Recipes: a method by name.

A recipe is a YAML file: a partial run configuration and an `about` section. The settings of a run are the defaults,
then the recipe, then the user's file, then overrides; later ones win, key by key. The built-in recipes are the files in
`recipes/` beside this module. A user's recipe is named by its path, relative to the configuration file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from rollmesh.shared.config.loader import config_from_dict, read_tree
from rollmesh.shared.config.registry import unknown_name
from rollmesh.shared.config.settings import Settings
from rollmesh.shared.errors import ConfigError

FOLDER = Path(__file__).parent / "recipes"
"""Built-in recipes, one YAML file each."""
DEFAULT_RECIPE = "grpo"
"""Its settings are the defaults of the structs."""
SECTIONS = ("about", "run", "data", "rollout", "sandbox", "inference", "reward", "learner")
"""Sections that a recipe may have. Addresses, models, node counts and the like belong to the user's file."""


class About(Settings):
    """Description of a recipe, which `rollmesh recipes` prints."""

    summary: str = ""
    """One sentence."""
    kind: str = ""
    """Family of the method, e.g. `estimator` or `loss`."""
    paper: str = ""
    """Source, with an identifier that can be looked up."""
    formula: str = ""
    """The method in one formula."""
    assumes: str = ""
    """What the method assumes of tasks, rewards and groups, beyond what its parts need (`rollmesh.trainer.needs`)."""
    given_solutions: bool = False
    """Whether the method learns from given solutions. An agent records them, see docs/agents.md; `python -m benchmarks
    methods` supplies them."""
    deviations: str = ""
    """Where the recipe differs from its source, and why."""
    seeds: tuple[str, ...] = ()
    """Numbers of the methods in the catalog of papers of the project, e.g. S015. Informational: `paper` names the
    source."""
    status: Literal["works", "partial", ""] = ""
    """Whether the recipe does all of the method. Empty: it does not say."""
    missing: str = ""
    """The part of the method that a `partial` recipe does not do."""
    test: str = ""
    """The test that shows it: file::function."""
    removed = dict.fromkeys(
        ("baseline", "expected"), "`python -m benchmarks methods` reads it from NAME.expected.yaml beside the recipe"
    )

    def check_fields(self) -> None:
        if (self.status == "partial") != bool(self.missing):
            raise ValueError("missing must name the missing part exactly if the status is partial")
        if self.seeds and not self.status:
            raise ValueError("`status` must be works or partial if `seeds` names rows of the catalog, got none")


def recipe_names() -> list[str]:
    """Return the names of the built-in recipes, sorted."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def find_recipe(name: str, base_dir: str | Path | None = None) -> Path:
    """Return the file of a recipe: a built-in by its name, a user's by its path relative to `base_dir`. Raises
    ConfigError."""
    if name.endswith((".yaml", ".yml")):
        file = Path(base_dir or ".") / Path(name).expanduser()
        if not file.is_file():
            raise ConfigError(f"`recipe`: there is no file {file}", key="recipe")
        return file
    if name not in (known := recipe_names()):
        error = unknown_name("recipe", name, known, own="file.yaml")
        raise ConfigError(f"`recipe`: {error.message}", key="recipe")
    return FOLDER / f"{name}.yaml"


def read_recipe(file: Path) -> tuple[About, dict[str, Any]]:
    """Return the `about` section of a recipe and its settings. Raises ConfigError with the path of a key that is not
    allowed.

    The settings are checked when they are part of a run configuration.
    """
    tree, _ = read_tree(file)
    for key, section in tree.items():
        if key not in SECTIONS:
            raise ConfigError(f"{file}: `{key}`: a recipe may have the sections {', '.join(SECTIONS)}", key="recipe")
        if not isinstance(section, Mapping):
            raise ConfigError(f"{file}: `{key}`: expected a mapping of keys, got {section!r}", key="recipe")
    try:
        about = config_from_dict(About, dict(tree.pop("about", {})))
    except ConfigError as err:
        raise ConfigError(f"{file}: about: {err.message}", violations=err.violations, key="recipe") from err
    return about, tree
