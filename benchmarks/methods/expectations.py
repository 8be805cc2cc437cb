"""What is expected of a method: its baseline, and the differences that its paper leads one to expect, in
`expected/NAME.yaml`.

`baseline_settings` are merged into the configuration of the baseline, key by key as those of a user over a recipe. A
recipe without a file is compared with `grpo`, and nothing is expected. The file of a recipe that a user names by its
path is beside it: `NAME.expected.yaml`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from rollmesh.shared.config.loader import config_from_dict, read_tree
from rollmesh.shared.config.settings import NonNegativeInt, PositiveFloat, Settings
from rollmesh.trainer.recipe import FOLDER as RECIPES
from rollmesh.trainer.recipe import find_recipe

FOLDER = Path(__file__).parent / "expected"
MethodTask = Literal[
    "calc",
    "noisy",
    "two_rewards",
    "turns",
    "sparse",
    "given",
    "late",
    "long",
    "confident",
    "agree",
    "skewed",
    "drifting",
    "gym",
    "guess",
]
"""Tasks of `tasks.py`."""
BASELINE_SECTIONS = ("run", "rollout", "reward", "learner")
"""Sections of a recipe that `baseline_settings` may have. The tasks are those of the method in any case."""
Measure = Literal["success", "pass_at_k", "length", "turns", "repeated", "entropy", "kl", "ess"]
"""What is compared; `records` defines the measures."""


class Expectation(Settings):
    """A difference between a method and its baseline that the paper leads one to expect."""

    task: MethodTask
    """Task on which it is expected."""
    measure: Measure = "success"
    """Measure that differs."""
    direction: Literal["up", "down"] = "up"
    """Whether the measure of the method is above or below that of the baseline."""
    lag_min: NonNegativeInt = 0
    """Smallest lag, in updates, at which it is expected."""
    lr_max: PositiveFloat | None = None
    """Largest learning rate at which it is expected. None: at every rate."""


class Expected(Settings):
    """The baseline of a method, and the expected differences."""

    baseline: str = "grpo"
    """Name of the recipe with which the method is compared."""
    baseline_settings: dict[str, Any] = {}
    """Settings over those of the baseline, as in a recipe, so that it differs from the method only in what the method
    is about: for example the same averages, prompts and optimizer steps per update. The report shows them."""
    expected: tuple[Expectation, ...] = ()
    """Expected differences from the baseline."""

    def check_fields(self) -> None:
        wrong = [key for key in self.baseline_settings if key not in BASELINE_SECTIONS]
        if wrong:
            raise ValueError(
                f"`baseline_settings` may have the sections {', '.join(BASELINE_SECTIONS)}, got {', '.join(wrong)}"
            )
        cases = [(one.task, one.measure, one.lag_min) for one in self.expected]
        if len(set(cases)) != len(cases):
            raise ValueError(f"`expected` must name each task, measure and lag_min once, got {cases}")


def expected_of(method: str) -> Expected:
    """Return what is expected of a recipe, by its name or path. Raises ConfigError for a malformed file."""
    recipe = find_recipe(method)
    file = FOLDER / recipe.name if recipe.parent == RECIPES else recipe.with_suffix(".expected.yaml")
    return config_from_dict(Expected, read_tree(file)[0]) if file.is_file() else Expected()
