"""The arithmetic source: a task's key and prompt are the expression, its ideal agent works from left to right."""

from __future__ import annotations

import random
from typing import ClassVar

from rollmesh.services.data.calc import demonstration, make_expression
from rollmesh.services.data.generated import Demonstration, Family, GeneratedConfig


class CalcFamily:
    """Expressions of a level's number of operators."""

    name = "calc"
    level_max = 32

    def make(self, rng: random.Random, level: int) -> str:
        return make_expression(rng, level)

    def prompt(self, key: str) -> str:
        return key

    def demonstration(self, key: str) -> Demonstration:
        shown = demonstration(key)
        return Demonstration(tuple((call.expression, call.result) for call in shown.calls), shown.answer)


class CalcConfig(GeneratedConfig, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="calc", tag_field="kind"):
    """Settings of the arithmetic source; a level is a number of operators."""

    family: ClassVar[Family] = CalcFamily()
    tools: tuple[str, ...] = ("calculator",)
    """Tools each task names."""
