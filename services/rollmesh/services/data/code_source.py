"""The code source: a task's key and prompt are the specification, its ideal agent answers with an exemplary solution."""

from __future__ import annotations

import random
from typing import ClassVar

from rollmesh.services.data.generated import Demonstration, Family, GeneratedConfig
from rollmesh.shared.families.code import LEVEL_MAX, code_task, make_specification


class CodeFamily:
    """Functions to write, see `rollmesh.shared.families.code`."""

    name = "code"
    level_max = LEVEL_MAX

    def make(self, rng: random.Random, level: int) -> str:
        return make_specification(rng, level)

    def prompt(self, key: str) -> str:
        return key

    def demonstration(self, key: str) -> Demonstration:
        return Demonstration((), code_task(key).solution)


class CodeConfig(GeneratedConfig, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="code", tag_field="kind"):
    """Settings of the code source; levels are kinds: chain, branch, loop, text, examples."""

    family: ClassVar[Family] = CodeFamily()
    level_max: int = LEVEL_MAX
    """Hardest level."""
