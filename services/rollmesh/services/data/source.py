"""The task source port: where the tasks of all splits come from.

Sources are found by name, or loaded from user code as `file.py:Name`.
"""

from __future__ import annotations

from collections.abc import Iterable

from rollmesh.services.data.task import PoolTask
from rollmesh.shared.config.plugin import Plugin, required
from rollmesh.shared.config.registry import Registry
from rollmesh.shared.endpoints.answer import AsksBlocking


class TaskSource(Plugin):
    """Base of task sources.

    Constructed as `cls(base_dir=..., options=...)`, or as `cls(base_dir=...)` if the class has no `Options`. `base_dir`
    is the folder of the configuration, or None. Relative files are relative to it.
    """

    from_clients: bool = False
    """Whether clients submit the tasks of the train split, so that the source needs none."""

    @required
    def tasks(self) -> Iterable[PoolTask]:
        """Yield the tasks of all splits, each with its split, in the same order in every process. Task ids are unique
        per split."""
        raise NotImplementedError

    def use_endpoints(self, endpoints: AsksBlocking) -> None:
        """Store the client of endpoints, for example to let a model write tasks. It works until `tasks` has ended."""


SUBMITTED = "submitted"
"""Name of the source whose tasks come from clients."""

SOURCES = Registry(
    "source",
    {
        "jsonl": "rollmesh.services.data.jsonl_source:JsonlSource",
        SUBMITTED: "rollmesh.services.data.submitted_source:SubmittedSource",
        "synthesized": "rollmesh.services.data.synthesized_source:SynthesizedSource",
        "masked": "rollmesh.services.data.masked_source:MaskedSource",
        "trajectories": "rollmesh.services.data.trajectory_source:TrajectorySource",
        "raw_text": "rollmesh.services.data.raw_text_source:RawTextSource",
        "calc": "rollmesh.demo.families.calc:CalcSource",
        "code": "rollmesh.demo.families.code:CodeSource",
        "sql": "rollmesh.demo.families.sql:SqlSource",
        "maze": "rollmesh.demo.families.maze:MazeSource",
    },
    TaskSource,
)
