"""The port of files whose rows are read by their position: what every format provides.

A file is read twice: a scan in order at the start of a service, in flat memory, and single rows afterwards. A scan
yields batches. A batch gives a record of each row, and for columns whose type proves that the values are texts, all
values at once without a record.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rollmesh.shared.errors import ConfigError, FailedPrecondition
from rollmesh.shared.store.records import FileRecord

Bools = NDArray[np.bool_]
Columns = frozenset[str] | None
"""Names of the columns of a table that are read. None means all."""
Stamp = tuple[int, int, int]
"""Size, time of modification (ns) and inode of a file."""


class FileChanged(FailedPrecondition):
    """A file is not the one that was opened: its size, its time of modification or its inode differs."""

    reason = "FILE_CHANGED"


class Texts(Protocol):
    """A column of texts, numbers or booleans of one batch, each in the form of `FileRecord.text`."""

    @property
    def strings(self) -> bool:
        """Whether the file has strings, not numbers or booleans."""

    @property
    def present(self) -> Bools:
        """Which values are not null."""

    @property
    def usable(self) -> Bools:
        """Which values `FileRecord.text` returns without an error. It may be False for other rows too."""

    @property
    def num_bytes(self) -> NDArray[np.int64]:
        """Number of bytes of each value in UTF-8. 0 for null."""

    def utf8(self) -> Iterator[memoryview]:
        """Yield the UTF-8 bytes of each value. The bytes of null are empty."""

    def encoded(self) -> tuple[NDArray[np.int64], list[str]]:
        """Return an index for each row, and the values by index. The index of null is 0 or -1."""


class RowBatch(ABC):
    """Consecutive rows of one file."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def record(self, index: int) -> FileRecord:
        """Return the record of row `index` of the batch. Raise RecordError if it is malformed."""

    def texts(self, field: str) -> Texts | None:
        """Return the values of `field`. None if only the records show whether they are texts."""
        return None


class RowFile(ABC):
    """One file. It MUST NOT change while it is open."""

    remark = ""
    """Why a single row is slow to read, with the remedy. Empty if it is not. A scan may set it."""

    def __init__(self, path: Path) -> None:
        """Raise ConfigError if the file does not exist."""
        self.path = path
        self.stamp = _stamp(path)
        """The stamp when it was opened."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, rows: Sequence[int], columns: Columns = None) -> list[FileRecord]:
        """Return the records of rows in [0, len), in the order of `rows`. Raise RecordError. A table may read only
        `columns` of those that it was opened with; None means all."""

    @abstractmethod
    def scan(self) -> Iterator[RowBatch]:
        """Yield all rows in order."""

    def check_unchanged(self) -> None:
        """Raise FileChanged if the file is not the one that was opened."""
        try:
            found = _stamp(self.path)
        except ConfigError as error:
            raise FileChanged(f"{self.path} can no longer be read: {error.message}", path=self.path) from error
        if found != self.stamp:
            raise FileChanged(
                f"{self.path} has changed since it was opened, and the tasks of a run must stay the same; restore the "
                "file and restart the service, or start a new run",
                path=self.path,
            )


def _stamp(path: Path) -> Stamp:
    try:
        found = path.stat()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; give the path of a file", path=path) from error
    return found.st_size, found.st_mtime_ns, found.st_ino
