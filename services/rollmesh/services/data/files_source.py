"""A source of tasks in files of any size: Parquet, Arrow, JSONL, CSV, and folders of the library `datasets`.

The files are read once at the start, to check every row and to find the rows of each split (`task_scan`). A task is
decoded when it is drawn. Its id is `NAME-ROW` and its reference `files:NAME@DIGEST#ROW`, where ROW counts the rows of
all files from 1.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from rollmesh.services.data.labels import LabelCodes, LabelledPool, one_value
from rollmesh.services.data.source import TaskSource
from rollmesh.services.data.task import PoolTask, Split, StoredPool
from rollmesh.services.data.task_fields import TaskFields, TaskMapping
from rollmesh.services.data.task_scan import LABEL_VALUES_MAX, BadRow, SplitRows, scan_tasks
from rollmesh.shared.config.settings import OneOrMoreStr
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.store.row_files import RowFiles, open_rows

_NOT_MAPPING = ("path", "on_bad_row")
_ROW = re.compile("[1-9][0-9]{0,9}")


class FilesOptions(TaskFields):
    """Settings of a source of files. A field name with dots means a field of a nested object."""

    path: OneOrMoreStr
    """A file, a folder or a glob, or a list of them, relative to the folder of the configuration. The endings of files
    say their formats: `.parquet`, `.arrow`, `.jsonl` or `.csv`. Folders in a folder, or files in a folder whose names
    begin with different splits, are the splits train, validation and test, unless `split` names a field."""
    on_bad_row: BadRow = "fail"
    """What a row that cannot be a task does: `fail` ends the start with an error, `skip` skips the row."""

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path,) if isinstance(self.path, str) else self.path


class FilesSource(TaskSource):
    """Provides tasks in the order of the rows."""

    Options = FilesOptions

    def __init__(self, *, options: FilesOptions, base_dir: str | Path | None = None) -> None:
        """Relative paths are relative to `base_dir`, by default the current folder."""
        self._options, self._base_dir = options, base_dir

    def tasks(self) -> Iterator[PoolTask]:
        """Yield the tasks of each split. Raise as `pools`."""
        for pool in self.pools().values():
            yield from map(pool.task, range(len(pool)))

    def pools(self) -> Mapping[Split, FilePool]:
        """Return the pools. Raise ConfigError if files cannot be read, and RecordError with file, row and field of a
        malformed row."""
        files = open_rows(self._options.paths, base_dir=self._base_dir, fields=self._options.read)
        if not self._options.split and (wrong := [name for name in files.splits if name not in set(Split)]):
            raise ConfigError(
                f"`path`: folders with files must be {', '.join(Split)}, got {wrong[0]}; set `split` to the field with "
                "the split, or name the files to read them as one set"
            )
        mapping = TaskMapping(self._options)
        found = scan_tasks(files, mapping, self._options.on_bad_row)
        return {split: FilePool(files, mapping, split, rows) for split, rows in found.items()}


class FilePool(StoredPool, LabelledPool):
    """The tasks of a split, which are read from the files."""

    def __init__(self, files: RowFiles, mapping: TaskMapping, split: Split, members: SplitRows) -> None:
        self._files, self._mapping, self._split = files, mapping, split
        self._rows, self._labels = members.rows, members.labels
        self._name = mapping.fields.name
        self._digest = _digest(files, mapping.fields, split, members)

    @property
    def digest(self) -> str:
        return self._digest

    def __len__(self) -> int:
        return len(self._rows)

    def task(self, position: int) -> PoolTask:
        return self._read([position], private=True)[0]

    def read(self, positions: Sequence[int]) -> list[PoolTask]:
        return self._read(positions, private=False)

    def _read(self, positions: Sequence[int], *, private: bool) -> list[PoolTask]:
        if any(position < 0 for position in positions):
            raise IndexError(f"positions must be >= 0, got {min(positions)}")
        rows, fields = [int(self._rows[position]) for position in positions], self._mapping.fields
        return [
            self._mapping.task(
                record,
                task_id=f"{self._name}-{row + 1}",
                reference=f"files:{self._name}@{self._files.digest[:16]}#{row + 1}",
                split=self._split,
                private=private,
            )
            for row, record in zip(
                rows, self._files.rows(rows, fields=fields.read if private else fields.drawn), strict=True
            )
        ]

    def position(self, task_id: str) -> int | None:
        name, _, number = task_id.rpartition("-")
        if name != self._name or not _ROW.fullmatch(number):
            return None
        row = int(number) - 1
        if isinstance(self._rows, range):
            return self._rows.index(row) if row in self._rows else None
        position = int(np.searchsorted(self._rows, row))
        return position if position < len(self._rows) and self._rows[position] == row else None

    def label(self, position: int, name: str) -> str:
        return self._codes(name).value(position) if name in self._mapping.fields.labels else ""

    def labels(self, name: str) -> LabelCodes:
        return self._codes(name) if name in self._mapping.fields.labels else one_value("", len(self))

    def _codes(self, name: str) -> LabelCodes:
        if name not in self._labels:
            raise ConfigError(
                f"the label `{name}` of the source `{self._name}` has more than {LABEL_VALUES_MAX} values, so a "
                "selector cannot use it as a category; use another label"
            )
        return self._labels[name]


def _digest(files: RowFiles, fields: TaskFields, split: Split, members: SplitRows) -> str:
    """Return the SHA-256 of the digest of the files, the mapping, the split and its rows. Paths are not in it."""
    digest = hashlib.sha256(msgspec.json.encode([files.digest, _changed(fields), split], order="sorted"))
    if isinstance(members.rows, range):
        digest.update(f"{members.rows.start}-{members.rows.stop}".encode())
    else:
        digest.update(members.rows.astype("<u4", copy=False).tobytes())
    return digest.hexdigest()


def _changed(fields: TaskFields) -> dict[str, object]:
    """Return the settings of the mapping that differ from their defaults. A later release may add settings, and
    resumes the runs that do not use them."""
    changed: dict[str, object] = {}
    for setting in msgspec.structs.fields(fields):
        value, factory = getattr(fields, setting.name), setting.default_factory
        if setting.name not in _NOT_MAPPING and value != (factory() if callable(factory) else setting.default):
            changed[setting.name] = value
    return changed
