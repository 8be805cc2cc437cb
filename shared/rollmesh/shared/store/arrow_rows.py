"""Rows of Parquet files and of Arrow IPC files and streams by position, with pyarrow.

A row of a Parquet file is decoded with its row group, because pages have no index. Decoded row groups are kept in a
cache of limited size; a row group that is larger than the cache is decoded in parts, and only the wanted rows are kept.
An Arrow file is mapped into memory: a row is read where it is stored.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rollmesh.shared.errors import ConfigError
from rollmesh.shared.store.records import FileRecord, RecordError
from rollmesh.shared.store.row_file import Bools, Columns, RowBatch, RowFile, Texts

CACHE_BYTES_MAX = 64 * 1024 * 1024
"""Bytes of decoded row groups that one set of files keeps."""
BATCH_BYTES = 4 * 1024 * 1024
BATCH_ROWS_MAX = 16_384
"""A batch of a Parquet file has at most this number of rows, and about `BATCH_BYTES` or one row."""
_RECORDS_AT_ONCE = 64
"""Rows that a scan converts to records together, because a conversion has a fixed cost."""
_CAUSE_CHARS_MAX = 200
_NOT_BLANK = r"[^\x{00}-\x{20}\x{85}\p{Z}]"
"""A character that is not white space in Python (RE2)."""


_GroupKey = tuple[Path, int, tuple[str, ...]]


class GroupCache:
    """The decoded row groups that were used last, as batches, by file, number and columns."""

    def __init__(self, bytes_max: int = CACHE_BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self._groups: OrderedDict[_GroupKey, list[Any]] = OrderedDict()
        self._size = 0

    def get(self, key: _GroupKey) -> list[Any] | None:
        if key in self._groups:
            self._groups.move_to_end(key)
        return self._groups.get(key)

    def put(self, key: _GroupKey, batches: list[Any]) -> None:
        """Keep a row group of at most `bytes_max`, and remove others until it fits."""
        self._size += _size(batches)
        while self._size > self.bytes_max:
            self._size -= _size(self._groups.popitem(last=False)[1])
        self._groups[key] = batches


class ParquetRows(RowFile):
    """A Parquet file."""

    def __init__(self, path: Path, columns: Columns, cache: GroupCache) -> None:
        """Read the `columns` only; None means all. Raise ConfigError if it is not a Parquet file."""
        super().__init__(path)
        self._cache = cache
        with _explained(path), pq.ParquetFile(path) as file:
            self._metadata = file.metadata
            self._columns = _chosen(file.schema_arrow.names, columns)
        groups = [self._metadata.row_group(number) for number in range(self._metadata.num_row_groups)]
        self._starts = _starts([group.num_rows for group in groups])
        self._batch_rows = [_batch_rows(group) for group in groups]
        if (largest := max((group.total_byte_size for group in groups), default=0)) > cache.bytes_max:
            self.remark = f"a row group of {largest} bytes is decoded for each row; write it with row_group_size=10_000"

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, rows: Sequence[int], columns: Columns = None) -> list[FileRecord]:
        wanted = np.asarray(rows, dtype=np.int64)
        groups = np.searchsorted(self._starts, wanted, side="right") - 1
        names = tuple(_chosen(self._columns, columns))
        found: dict[int, FileRecord] = {}
        for group in np.unique(groups):
            found |= self._read_group(int(group), np.unique(wanted[groups == group]), names)
        return [found[row] for row in rows]

    def scan(self) -> Iterator[RowBatch]:
        for group, start in enumerate(self._starts[:-1]):
            for batch in self._decoded(group, self._columns):
                yield _ArrowBatch(self.path, int(start) + 1, batch)
                start += batch.num_rows

    def _read_group(self, group: int, rows: NDArray[np.int64], names: tuple[str, ...]) -> dict[int, FileRecord]:
        """Return the records of different rows of a group in ascending order."""
        found: dict[int, FileRecord] = {}
        key = (self.path, group, names)
        batches, kept, size = self._cache.get(key), [], 0
        start = int(self._starts[group])
        for batch in self._decoded(group, names) if batches is None else batches:
            first, last = np.searchsorted(rows, (start, start + batch.num_rows))
            if last > first:
                found |= _records(self.path, start, batch, rows[first:last])
            start += batch.num_rows
            size += batch.nbytes
            if size <= self._cache.bytes_max:
                kept.append(batch)
            else:
                kept.clear()
                if len(found) == len(rows):
                    break  # the group is not kept, so the rest of it is not needed
        if batches is None and kept:
            self._cache.put(key, kept)
        return found

    def _decoded(self, group: int, names: Sequence[str]) -> Iterator[Any]:
        with _explained(self.path), pq.ParquetFile(self.path, metadata=self._metadata, buffer_size=BATCH_BYTES) as file:
            yield from file.iter_batches(self._batch_rows[group], [group], list(names), use_threads=False)


class ArrowRows(RowFile):
    """A file of the Arrow IPC stream or file format, such as `datasets` writes. Compressed ones are not mapped but
    decoded into memory."""

    def __init__(self, path: Path, columns: Columns) -> None:
        """Read the `columns` only; None means all. Raise ConfigError if it is not an Arrow file."""
        super().__init__(path)
        with _explained(path):
            mapped = pa.memory_map(str(path))
            is_file = mapped.read(6) == b"ARROW1"
            mapped.seek(0)
            reader = pa.ipc.open_file(mapped) if is_file else pa.ipc.open_stream(mapped)
            names = _chosen(reader.schema.names, columns)
            batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
            self._batches = [batch.select(names) for batch in batches]
        self._starts = _starts([batch.num_rows for batch in self._batches])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, rows: Sequence[int], columns: Columns = None) -> list[FileRecord]:
        wanted = np.asarray(rows, dtype=np.int64)
        batches = np.searchsorted(self._starts, wanted, side="right") - 1
        found: dict[int, FileRecord] = {}
        for number in np.unique(batches):
            members = np.unique(wanted[batches == number])
            batch = self._batches[number]
            found |= _records(
                self.path, int(self._starts[number]), batch.select(_chosen(batch.schema.names, columns)), members
            )
        return [found[row] for row in rows]

    def scan(self) -> Iterator[RowBatch]:
        for start, batch in zip(self._starts, self._batches, strict=False):
            for offset in range(0, batch.num_rows, BATCH_ROWS_MAX):
                yield _ArrowBatch(self.path, int(start) + offset + 1, batch.slice(offset, BATCH_ROWS_MAX))


class _ArrowBatch(RowBatch):
    def __init__(self, path: Path, line: int, batch: Any) -> None:
        """`line` is the number of the first row, from 1."""
        self._path, self._line, self._batch = path, line, batch
        self._block: dict[int, FileRecord] = {}

    def __len__(self) -> int:
        return int(self._batch.num_rows)

    def record(self, index: int) -> FileRecord:
        if index not in self._block:
            at = np.arange(index, min(index + _RECORDS_AT_ONCE, len(self)))
            try:
                self._block = _records(self._path, 0, self._batch, at, line=self._line)
            except RecordError:
                self._block = _records(self._path, 0, self._batch, at[:1], line=self._line)
        return self._block[index]

    def has(self, field: str) -> bool:
        return field in self._batch.schema.names

    def texts(self, field: str) -> Texts | None:
        name, *below = field.split(".")
        if name not in self._batch.schema.names:
            return None
        column = self._batch.column(name)
        for nested in below:
            if not pa.types.is_struct(column.type) or column.type.get_field_index(nested) < 0:
                return None
            column = pc.struct_field(column, nested)
        return _texts(column)


class _ArrowTexts:
    """Implements `Texts` for an array of strings."""

    def __init__(self, array: Any) -> None:
        self._array = array

    @property
    def present(self) -> Bools:
        return np.asarray(self._array.is_valid())

    @property
    def usable(self) -> Bools:
        return np.asarray(pc.fill_null(pc.match_substring_regex(self._array, _NOT_BLANK), False))

    @property
    def num_bytes(self) -> NDArray[np.int64]:
        return np.asarray(pc.fill_null(pc.binary_length(self._array), 0), dtype=np.int64)

    def utf8(self) -> Iterator[memoryview]:
        _, offsets, data = self._array.buffers()
        first, size = self._array.offset, len(self._array)
        dtype = np.int64 if pa.types.is_large_string(self._array.type) else np.int32
        ends = np.frombuffer(offsets, dtype=dtype)[first : first + size + 1].tolist()
        view = memoryview(data) if data is not None else memoryview(b"")
        for start, stop in pairwise(ends):
            yield view[start:stop]

    def encoded(self) -> tuple[NDArray[np.int64], list[str]]:
        encoded = pc.dictionary_encode(self._array)
        indices = np.asarray(pc.fill_null(encoded.indices, 0), dtype=np.int64)
        return indices, encoded.dictionary.to_pylist()


def _texts(column: Any) -> Texts | None:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_string_view(kind):
        column = column.cast(pa.string())
    if not pa.types.is_string(column.type) and not pa.types.is_large_string(column.type):
        return None
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:  # not UTF-8; the record names the row
        return None
    return _ArrowTexts(column)


def _records(
    path: Path, start: int, batch: Any, rows: NDArray[np.int64], *, line: int | None = None
) -> dict[int, FileRecord]:
    """Return the records of `rows`, of which `start` is the first one of the batch. `line` is the number of that row,
    by default `start` + 1. Raise RecordError."""
    line = start + 1 if line is None else line
    lines = [line + int(row) - start for row in rows]
    try:
        values = batch.take(pa.array(rows - start)).to_pylist()
    except UnicodeDecodeError as error:
        if len(rows) == 1:
            raise RecordError.at(path, lines[0], f"is not UTF-8: {error.reason}") from None
        return {
            key: record for row in rows for key, record in _records(path, start, batch, row[None], line=line).items()
        }
    return {
        int(row): FileRecord(path=path, line=number, fields=fields)
        for row, number, fields in zip(rows, lines, values, strict=True)
    }


def _chosen(names: Sequence[str], columns: Columns) -> list[str]:
    return [name for name in names if columns is None or name in columns]


def _starts(sizes: Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)


def _batch_rows(group: Any) -> int:
    row_bytes = int(group.total_byte_size) / max(1, int(group.num_rows))
    return max(1, min(BATCH_ROWS_MAX, int(BATCH_BYTES / max(1.0, row_bytes))))


def _size(batches: Sequence[Any]) -> int:
    return sum(int(batch.nbytes) for batch in batches)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn an error of pyarrow or of the file into a ConfigError that names the file."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        what = str(error).partition("\n")[0][:_CAUSE_CHARS_MAX]
        raise ConfigError(
            f"cannot read {path}: {what}; give a file of the format that its name says", path=path
        ) from error
