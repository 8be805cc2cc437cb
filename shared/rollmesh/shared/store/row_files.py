"""Rows of one or many files by position: Parquet, Arrow, JSONL and CSV files, and folders of the library `datasets`.

`open_rows` finds the files and opens them. Their rows are numbered from 0 over all files, in the order of the given
paths, of the files in a folder or of the matches of a glob. Nothing but an index is held in memory. The digest is the
SHA-256 over the ending and the SHA-256 of each file in this order, so it depends on no other part of their names.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock

import numpy as np

from rollmesh.shared.config.extras import libraries_needed
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.store.records import FileRecord
from rollmesh.shared.store.row_file import Columns, RowBatch, RowFile, Stamp
from rollmesh.shared.store.text_rows import CsvRows, JsonlRows

_log = logging.getLogger(__name__)

ENDINGS = (".parquet", ".arrow", ".jsonl", ".csv")
FILES_MAX = 10_000
ROWS_MAX = 2**32 - 1
_SPLIT_NAME = re.compile("(train|validation|test)(?![A-Za-z])")


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file of rows, and the name of its split, empty if neither folders nor the names of files say it."""

    path: Path
    split: str


@dataclass(frozen=True, slots=True)
class Scanned:
    """A batch of a scan."""

    start: int
    """Number of its first row over all files."""
    split: str
    batch: RowBatch


class RowFiles:
    """The rows of all files. Threads may share it."""

    def __init__(self, files: Sequence[tuple[FoundFile, RowFile]], digest: str) -> None:
        self._files = tuple(files)
        self.digest = digest
        """SHA-256 over the endings and the bytes of the files, in hex."""
        self._starts = np.cumsum([0, *(len(file) for _, file in files)], dtype=np.int64)
        self._lock = Lock()
        if len(self) > ROWS_MAX:
            raise ConfigError(f"{files[0][1].path} and the files after it have more than {ROWS_MAX} rows")

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits, in order. Empty if neither folders nor the names of files say it."""
        return tuple(dict.fromkeys(found.split for found, _ in self._files if found.split))

    def rows(self, rows: Sequence[int], *, fields: Sequence[str] | None = None) -> list[FileRecord]:
        """Return the records of rows in [0, len), in the order of `rows`. Of tables, read only the columns of `fields`,
        which are among those of `open_rows`; None means all of them. Raise RecordError, and FileChanged if a file has
        changed since it was opened."""
        columns = _columns(fields)
        if rows and not 0 <= min(rows) <= max(rows) < len(self):
            raise IndexError(f"rows must be in [0, {len(self)}), got {min(rows)} to {max(rows)}")
        by_file: dict[int, list[int]] = {}
        for row in rows:
            by_file.setdefault(int(np.searchsorted(self._starts, row, side="right")) - 1, []).append(row)
        found: dict[int, FileRecord] = {}
        with self._lock:
            for number, members in by_file.items():
                file, start = self._files[number][1], int(self._starts[number])
                file.check_unchanged()
                found.update(zip(members, file.read([row - start for row in members], columns), strict=True))
        return [found[row] for row in rows]

    def scan(self) -> Iterator[Scanned]:
        """Yield all rows in order. Raise FileChanged if a file has changed since it was opened."""
        known = self._slow()
        for (found, file), start in zip(self._files, self._starts.tolist(), strict=False):
            for batch in file.scan():
                yield Scanned(start, found.split, batch)
                start += len(batch)
            file.check_unchanged()
        if len(self._slow()) > len(known):
            self.warn()

    def warn(self) -> None:
        """Log how many files are slow to read."""
        if slow := self._slow():
            _log.warning("rows are slow to read: files=%d first=%s: %s", len(slow), slow[0].path, slow[0].remark)

    def _slow(self) -> list[RowFile]:
        return [file for _, file in self._files if file.remark]


def open_rows(
    paths: Sequence[str], *, base_dir: str | Path | None = None, fields: Sequence[str] | None = None
) -> RowFiles:
    """Open files, globs and folders. Relative paths are relative to `base_dir`, by default the current folder. Of
    tables, read only the columns of `fields`; None means all.

    Raise ConfigError if files are missing or unreadable, and RecordError for a record that cannot be found.
    """
    found = [file for path in paths for file in _find(Path(base_dir or "."), path)]
    if len(found) > FILES_MAX:
        raise ConfigError(f"{', '.join(paths)}: {len(found)} files are more than {FILES_MAX}; use larger files")
    if len({bool(file.split) for file in found}) > 1:
        raise ConfigError(
            f"{', '.join(paths)}: only some of the files are in folders of splits, or have a name that begins with "
            "train, validation or test; name files or folders"
        )
    if twice := [path for path, number in Counter(file.path.resolve() for file in found).items() if number > 1]:
        raise ConfigError(f"{', '.join(paths)}: {twice[0]} is named twice; name each file once", path=twice[0])
    opened = _opened([file.path for file in found], _columns(fields))
    files = RowFiles(list(zip(found, opened, strict=True)), _digest(opened))
    for file in opened:
        file.check_unchanged()  # the digest is that of the rows
    files.warn()
    return files


def _columns(fields: Sequence[str] | None) -> Columns:
    if fields is None:
        return None
    return frozenset(name for field in fields for name in (field, field.partition(".")[0]))


def _opened(paths: Sequence[Path], columns: Columns) -> list[RowFile]:
    if any(path.suffix in (".parquet", ".arrow") for path in paths):
        with libraries_needed("a Parquet or Arrow file"):
            from rollmesh.shared.store.arrow_rows import (
                CACHE_BYTES_MAX,
                ArrowRows,
                GroupCache,
                ParquetRows,
                allocated_bytes,
            )

        cache, allocated = GroupCache(CACHE_BYTES_MAX), allocated_bytes()
    files: list[RowFile] = []
    for path in paths:
        if path.suffix == ".parquet":
            files.append(ParquetRows(path, columns, cache))
        elif path.suffix == ".arrow":
            files.append(ArrowRows(path, columns, allocated))
        else:
            files.append(JsonlRows(path) if path.suffix == ".jsonl" else CsvRows(path))
    return files


def _find(base_dir: Path, given: str) -> list[FoundFile]:
    path = base_dir / given
    if path.is_dir():
        return _in_folder(path)
    if path.exists() or not glob.has_magic(given):
        return [_known(path)]
    matches = sorted(glob.glob(given, root_dir=base_dir, recursive=True))
    if not matches:
        raise ConfigError(f"no file matches {path}; give a file, a folder or a glob with at least one match", path=path)
    return [_known(base_dir / match) for match in matches]


def _in_folder(folder: Path) -> list[FoundFile]:
    """Return the files of a folder, whose names say the split if several splits are among them, or else those of its
    folders, each of which is a split."""
    files, listed = _files_of(folder), folder / "dataset_dict.json"
    if listed.exists():
        names = _listed(listed, "splits")
    elif (folder / "state.json").exists():
        names = []
    else:
        names = sorted(one.name for one in folder.iterdir() if one.is_dir() and not one.name.startswith("."))
    below = [FoundFile(file, name) for name in names for file in _files_of(folder / name)]
    if not files and not below:
        raise ConfigError(f"{folder} has no file that ends with {', '.join(ENDINGS)}", path=folder)
    if files and below:
        raise ConfigError(
            f"{folder} has files, such as {files[0].name}, and folders with files, such as {below[0].split}; move the "
            "files into folders of splits, or name files or folders",
            path=folder,
        )
    splits = {file: found[1] if (found := _SPLIT_NAME.match(file.name)) else "" for file in files}
    several = len(set(splits.values())) > 1
    return below or [FoundFile(file, split if several else "") for file, split in splits.items()]


def _files_of(folder: Path) -> list[Path]:
    """Return the files of a folder: those that `state.json` lists (as `datasets` writes it), or all by name."""
    state = folder / "state.json"
    if state.exists():
        return [_known(folder / name).path for name in _listed(state, "_data_files")]
    if not folder.is_dir():
        return []
    return sorted(file for file in folder.iterdir() if file.suffix in ENDINGS and not file.name.startswith("."))


def _listed(file: Path, key: str) -> list[str]:
    """Return the names in a list of a JSON file, whose entries are names or objects with `filename`."""
    try:
        listed = [
            entry["filename"] if isinstance(entry, dict) else entry for entry in json.loads(file.read_bytes())[key]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot read {file}: {error!r}; it must have a list `{key}`", path=file) from error
    if wrong := [name for name in listed if not isinstance(name, str) or Path(name).name != name]:
        raise ConfigError(f"{file}: `{key}` must have names in its folder, got {wrong[0]!r}", path=file)
    return listed


def _known(path: Path) -> FoundFile:
    if path.suffix not in ENDINGS:
        raise ConfigError(f"{path} must end with {', '.join(ENDINGS)}, by which its format is known", path=path)
    return FoundFile(path, "")


def _digest(files: Sequence[RowFile]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.path.suffix.encode() + b"\0" + _file_digest(file.path.resolve(), file.stamp))
    return digest.hexdigest()


@lru_cache(FILES_MAX)
def _file_digest(path: Path, stamp: Stamp) -> bytes:
    """Return the SHA-256 of a file. A process reads an unchanged file once, because several parts of it open the same
    files."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; give the path of a file", path=path) from error
