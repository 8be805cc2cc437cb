"""The task source port: where the tasks of all splits come from.

Sources are found by name, or loaded from user code as `file.py:Name`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from rollmesh.services.data.pool import MemoryPool
from rollmesh.services.data.task import PoolTask, Split, TaskPool
from rollmesh.shared.config.plugin import Plugin, required
from rollmesh.shared.config.registry import Extension, Registry
from rollmesh.shared.config.user_code import explain, user_traceback
from rollmesh.shared.endpoints.answer import AsksBlocking
from rollmesh.shared.errors import ConfigError, MeshError


class TaskSource(Plugin):
    """Base of task sources.

    Constructed as `cls(base_dir=..., options=...)`, or as `cls(base_dir=...)` if the class has no `Options`. `base_dir`
    is the folder of the configuration, or None. Relative files are relative to it.
    """

    @required
    def tasks(self) -> Iterable[PoolTask]:
        """Yield the tasks of all splits, each with its split, in the same order in every process. Task ids are unique
        per split."""
        raise NotImplementedError

    def pools(self) -> Mapping[Split, TaskPool]:
        """Return the pool of each split. The default holds all `tasks` in memory. A source that can read a task by its
        position overrides it."""
        tasks: dict[Split, list[PoolTask]] = {split: [] for split in Split}
        for task in self.tasks():
            tasks[Split(task.split)].append(task)
        return {split: MemoryPool(found) for split, found in tasks.items()}

    def use_endpoints(self, endpoints: AsksBlocking) -> None:
        """Store the client of endpoints, for example to let a model write tasks. It works until `pools` has
        returned."""


SUBMITTED = "submitted"
"""Name of the source whose tasks come from clients."""

SOURCES = Registry(
    "source",
    {
        "jsonl": "rollmesh.services.data.jsonl_source:JsonlSource",
        "files": "rollmesh.services.data.files_source:FilesSource",
        SUBMITTED: "rollmesh.services.data.submitted_source:SubmittedSource",
        "synthesized": "rollmesh.services.data.synthesized_source:SynthesizedSource",
        "templated": "rollmesh.services.data.templated_source:TemplatedSource",
        "masked": "rollmesh.services.data.masked_source:MaskedSource",
        "trajectories": "rollmesh.services.data.trajectory_source:TrajectorySource",
        "mixture": "rollmesh.services.data.mixture_source:MixtureSource",
        "raw_text": "rollmesh.services.data.raw_text_source:RawTextSource",
        "calc": "rollmesh.demo.families.calc:CalcSource",
        "code": "rollmesh.demo.families.code:CodeSource",
        "sql": "rollmesh.demo.families.sql:SqlSource",
        "maze": "rollmesh.demo.families.maze:MazeSource",
    },
    TaskSource,
)


def open_pools(
    chosen: Extension, base_dir: str | Path | None, endpoints: AsksBlocking | None, *, key: str
) -> dict[Split, TaskPool]:
    """Make a source and return the pools of all splits. Relative files are relative to `base_dir`.

    Raise ConfigError or RecordError if the source is unusable. `key` is that of the choice.
    """
    source: TaskSource = SOURCES.make(chosen, base_dir, base_dir=base_dir)
    try:
        if endpoints is not None:
            source.use_endpoints(endpoints)
        pools = dict(source.pools())
        return {split: pools[split] for split in Split}
    except MeshError:
        raise
    except Exception as err:  # user code may raise anything; the name that led to it must be reported
        raise ConfigError(
            f"`{key}`: source `{chosen.name}` failed: {explain(err)}\n{user_traceback(err)}", key=key
        ) from err
