"""The SQL source: the prompt shows the tables and the question, the ideal agent answers with an exemplary query."""

from __future__ import annotations

import random
from typing import ClassVar

from rollmesh.services.data.generated import Demonstration, Family, GeneratedConfig
from rollmesh.shared.families.sql import LEVEL_MAX, make_key, sql_task


class SqlFamily:
    """Questions about small tables, see `rollmesh.shared.families.sql`."""

    name = "sql"
    level_max = LEVEL_MAX

    def make(self, rng: random.Random, level: int) -> str:
        return make_key(rng, level)

    def prompt(self, key: str) -> str:
        return sql_task(key).prompt

    def demonstration(self, key: str) -> Demonstration:
        return Demonstration((), sql_task(key).query)


class SqlConfig(GeneratedConfig, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="sql", tag_field="kind"):
    """Settings of the SQL source; levels are kinds: where, order, count, group, join."""

    family: ClassVar[Family] = SqlFamily()
    level_max: int = LEVEL_MAX
    """Hardest level."""
