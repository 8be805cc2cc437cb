"""The task source port: where the tasks of all splits come from.

Sources are found by name, or loaded from user code as `file.py:Name`.
"""

from __future__ import annotations

from collections.abc import Iterable

from rollmesh.services.data.task import PoolTask
from rollmesh.shared.config.plugin import Plugin, required
from rollmesh.shared.config.registry import Registry
from rollmesh.shared.endpoints.answer import AsksBlocking


class TaskSource(Protocol):
    """Provides tasks.

    A class that implements it is constructed as `cls(base_dir=..., options=...)`, or as `cls(base_dir=...)` if it has no class attribute
    `Options`. `base_dir` is the folder of the configuration, or None. Relative files are relative to it. Optional: `use_endpoints` (see
    `SourceUsesEndpoints`).
    """

    def tasks(self) -> Iterable[PoolTask]:
        """Yield the tasks of all splits, each with its split, in the same order in every process. Task ids are unique per split."""
        ...


@runtime_checkable
class SourceUsesEndpoints(Protocol):
    """A source that asks endpoints, for example to write tasks. It gets their client before `tasks` is called."""

    def use_endpoints(self, endpoints: AsksBlocking) -> None:
        """Store the client, which works until `tasks` has ended."""


SOURCES = Registry(
    "source",
    {
        "jsonl": "rollmesh.services.data.jsonl_source:JsonlSource",
        "calc": "rollmesh.demo.families.calc:CalcSource",
        "code": "rollmesh.demo.families.code:CodeSource",
        "sql": "rollmesh.demo.families.sql:SqlSource",
    },
)
