"""The source of a mesh whose training tasks come from clients (RunService.SubmitTasks): it has no task itself.

The coordinator stores submitted tasks in the ledger of their run and draws them in the order of submission, so neither
this service nor a selector takes part. There is no split for evaluations. A mesh that evaluates has another source,
such as `jsonl`, and a run with `submitted_tasks`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rollmesh.services.data.source import TaskSource
from rollmesh.services.data.task import PoolTask


class SubmittedSource(TaskSource):
    """See the module."""

    def __init__(self, *, base_dir: str | Path | None = None) -> None:
        pass

    def tasks(self) -> Iterator[PoolTask]:
        return iter(())
