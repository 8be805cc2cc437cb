"""A source of tasks in a JSONL file in memory. A task has the reference `jsonl:NAME@DIGEST#LINE`.

Collaborators: `files_source` (several files of any size and of other formats).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from rollmesh.services.data.source import TaskSource
from rollmesh.services.data.task import PoolTask
from rollmesh.services.data.task_fields import TaskFields, TaskMapping
from rollmesh.shared.config.settings import NonEmptyStr
from rollmesh.shared.store.jsonl import read_jsonl

NUM_LINES_MAX = 2_000_000


class JsonlOptions(TaskFields):
    """Settings of a JSONL source. A field name with dots means a field of a nested object."""

    path: NonEmptyStr
    """UTF-8 file with one JSON object per line, relative to the folder of the configuration."""
    num_lines_max: Annotated[int, Meta(ge=1, le=NUM_LINES_MAX)] = NUM_LINES_MAX
    """Maximum number of lines. The file is held in memory."""


class JsonlSource(TaskSource):
    """Provides tasks in the order of the file."""

    Options = JsonlOptions

    def __init__(self, *, options: JsonlOptions, base_dir: str | Path | None = None) -> None:
        """A relative path is relative to `base_dir`, by default the current folder."""
        self._options = options
        self._path = Path(base_dir or ".") / options.path

    def tasks(self) -> Iterator[PoolTask]:
        """Yield the tasks. Raise ConfigError if the file cannot be read, and RecordError with file, line and field of a
        malformed record."""
        options = self._options
        file = read_jsonl(self._path, num_lines_max=options.num_lines_max)
        mapping = TaskMapping(options)
        for record in file.records:
            yield mapping.task(
                record,
                task_id=f"{options.name}-{record.line}",
                reference=f"jsonl:{options.name}@{file.digest[:16]}#{record.line}",
            )
