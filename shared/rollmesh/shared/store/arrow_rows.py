"""Rows of Parquet files and of Arrow IPC files and streams by position, with pyarrow.

A row of a Parquet file is decoded with its row group, because pages have no index. Decoded row groups are kept in a
cache of limited size; a row group that is larger than the cache is decoded in parts, and only the wanted rows are kept.
An Arrow file is mapped into memory: a row is read where it is stored.
"""

from __future__ import annotations

from collections import Counter
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
from rollmesh.shared.store.sized_cache import SizedCache

CACHE_BYTES_MAX = 64 * 1024 * 1024
"""Bytes of decoded row groups that one set of files keeps."""
DECODED_BYTES_MAX = 512 * 1024 * 1024
"""Memory of the compressed Arrow files of one set."""
BATCH_BYTES = 4 * 1024 * 1024
BATCH_ROWS_MAX = 16_384
"""A batch of a Parquet file has at most this number of rows, and about `BATCH_BYTES` or one row."""
DECODED_ROWS_MAX = 256
"""Rows of a Parquet file that are decoded before their size is known."""
_RECORDS_AT_ONCE = 64
"""Rows that a scan converts to records together, because a conversion has a fixed cost."""
_CAUSE_CHARS_MAX = 200
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
_NOT_BLANK = r"[^\x{00}-\x{20}\x{85}\p{Z}]"
"""A character that is not white space in Python (RE2)."""


GroupCache = SizedCache[tuple[Path, int, tuple[str, ...]], list[Any]]
"""The decoded row groups that were used last, as batches, by file, number and columns."""


class ParquetRows(RowFile):
    """A Parquet file."""

    def __init__(self, path: Path, columns: Columns, cache: GroupCache) -> None:
        """Read the `columns` only; None means all. Raise ConfigError if it is not a Parquet file."""
        super().__init__(path)
        self._cache = cache
        with _explained(path), pq.ParquetFile(path) as file:
            self._metadata = file.metadata
            self._columns = _chosen(path, file.schema_arrow.names, columns)
        groups = [self._metadata.row_group(number) for number in range(self._metadata.num_row_groups)]
        self._starts = _starts([group.num_rows for group in groups])
        self._batch_rows = [_batch_rows(group) for group in groups]
        self._check_size(max((group.total_byte_size for group in groups), default=0))

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, rows: Sequence[int], columns: Columns = None) -> list[FileRecord]:
        wanted = np.asarray(rows, dtype=np.int64)
        groups = np.searchsorted(self._starts, wanted, side="right") - 1
        names = tuple(_chosen(self.path, self._columns, columns))
        found: dict[int, FileRecord] = {}
        for group in np.unique(groups):
            found |= self._read_group(int(group), np.unique(wanted[groups == group]), names)
        return [found[row] for row in rows]

    def scan(self) -> Iterator[RowBatch]:
        for group, start in enumerate(self._starts[:-1]):
            size = 0
            for batch in self._decoded(group, self._columns):
                yield ArrowBatch(self.path, int(start) + 1, batch)
                start += batch.num_rows
                size += batch.nbytes
            self._check_size(size)

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
            if size <= self._cache.size_max:
                kept.append(batch)
            else:
                kept.clear()
                if len(found) == len(rows):
                    break  # the group is not kept, so the rest of it is not needed
        if batches is None and kept:
            self._cache.put(key, kept, size)
        return found

    def _decoded(self, group: int, names: Sequence[str]) -> Iterator[Any]:
        """Yield the rows of a group in batches. A value that the file stores once may be in each row, so only decoded
        rows show their size."""
        parts: list[Any] = []
        size = 0
        with _explained(self.path), pq.ParquetFile(self.path, metadata=self._metadata, buffer_size=BATCH_BYTES) as file:
            for part in file.iter_batches(self._batch_rows[group], [group], list(names), use_threads=False):
                parts.append(part)
                size += part.nbytes
                if size >= BATCH_BYTES or len(parts) * len(part) >= BATCH_ROWS_MAX:
                    yield pa.concat_batches(parts)
                    parts, size = [], 0
            if parts:
                yield pa.concat_batches(parts)

    def _check_size(self, group_bytes: int) -> None:
        if group_bytes > self._cache.size_max and not self.remark:
            self.remark = (
                f"a row group of {group_bytes} bytes is decoded for each row; write it with row_group_size=10_000"
            )


class ArrowRows(RowFile):
    """A file of the Arrow IPC stream or file format, such as `datasets` writes. Compressed ones are not mapped but
    decoded into memory."""

    def __init__(self, path: Path, columns: Columns, allocated: int) -> None:
        """Read the `columns` only; None means all. `allocated` is the result of `allocated_bytes` before the first of a
        set of files. Raise ConfigError if it is not an Arrow file, or if the decoded files are too large."""
        super().__init__(path)
        with _explained(path):
            mapped = pa.memory_map(str(path))
            is_file = mapped.read(6) == b"ARROW1"
            mapped.seek(0)
            reader = pa.ipc.open_file(mapped) if is_file else pa.ipc.open_stream(mapped)
            names = _chosen(path, reader.schema.names, columns)
            batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
            self._batches = []
            for batch in batches:
                self._batches.append(batch.select(names))
                if allocated_bytes() - allocated > DECODED_BYTES_MAX:
                    raise ConfigError(
                        f"{path} is compressed, so it is held in memory, and the files need more than "
                        f"{DECODED_BYTES_MAX} bytes; write it without compression, or as Parquet",
                        path=path,
                    )
            if not is_file and not _is_complete(mapped):
                raise ConfigError(
                    f"{path} does not end with the end mark of an Arrow stream, so it is truncated, or its writer was "
                    "not closed; copy or write it again",
                    path=path,
                )
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
                self.path,
                int(self._starts[number]),
                batch.select(_chosen(self.path, batch.schema.names, columns)),
                members,
            )
        return [found[row] for row in rows]

    def scan(self) -> Iterator[RowBatch]:
        for start, batch in zip(self._starts, self._batches, strict=False):
            for offset in range(0, batch.num_rows, BATCH_ROWS_MAX):
                yield ArrowBatch(self.path, int(start) + offset + 1, batch.slice(offset, BATCH_ROWS_MAX))


def allocated_bytes() -> int:
    """Return the memory that pyarrow has allocated. Mapped files are not in it."""
    return int(pa.total_allocated_bytes())


class ArrowBatch(RowBatch):
    """Rows of a Parquet or Arrow file."""

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

    @property
    def num_bytes(self) -> int:
        return int(self._batch.nbytes)

    def texts(self, field: str) -> Texts | None:
        names = self._batch.schema.names
        name, *below = [field] if field in names else field.split(".")
        if name not in names:
            return None
        column = self._batch.column(name)
        for nested in below:
            if not pa.types.is_struct(column.type) or column.type.get_field_index(nested) < 0:
                return None
            column = pc.struct_field(column, nested)
        try:
            return _texts(column)
        except pa.ArrowNotImplementedError:  # a rare type
            return None


class _ArrowTexts:
    """Implements `Texts` for an array of strings."""

    def __init__(self, array: Any, *, strings: bool) -> None:
        self._array, self.strings = array, strings

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


class _CategoryTexts:
    """Implements `Texts` for an array of indices of different values. A long value is not copied for each row."""

    def __init__(self, indices: NDArray[np.int64], valid: Bools, values: Texts) -> None:
        self._indices, self._valid, self._values = indices, valid, values
        self.strings = values.strings

    @property
    def present(self) -> Bools:
        return self._valid & self._values.present[self._indices]

    @property
    def usable(self) -> Bools:
        return self._valid & self._values.usable[self._indices]

    @property
    def num_bytes(self) -> NDArray[np.int64]:
        return np.where(self._valid, self._values.num_bytes[self._indices], 0)

    def utf8(self) -> Iterator[memoryview]:
        values = list(self._values.utf8())
        for index, valid in zip(self._indices.tolist(), self._valid.tolist(), strict=True):
            yield values[index] if valid else memoryview(b"")

    def encoded(self) -> tuple[NDArray[np.int64], list[str]]:
        indices, values = self._values.encoded()
        return np.where(self._valid, indices[self._indices], 0), values


def _texts(column: Any) -> Texts | None:
    if pa.types.is_dictionary(column.type) and len(column.dictionary):
        used, indices = np.unique(np.asarray(pc.fill_null(column.indices, 0)), return_inverse=True)
        values = _texts(column.dictionary.take(pa.array(used)))
        return None if values is None else _CategoryTexts(indices, np.asarray(column.is_valid()), values)
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_string_view(kind):
        column = column.cast(pa.string())
    if not pa.types.is_string(column.type) and not pa.types.is_large_string(column.type):
        return None
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:  # not UTF-8; the record names the row
        return None
    return _ArrowTexts(column, strings=column.type == kind or pa.types.is_string_view(kind))


def _records(
    path: Path, start: int, batch: Any, rows: NDArray[np.int64], *, line: int | None = None
) -> dict[int, FileRecord]:
    """Return the records of `rows`, of which `start` is the first one of the batch. `line` is the number of that row,
    by default `start` + 1. Raise RecordError."""
    line = start + 1 if line is None else line
    lines = [line + int(row) - start for row in rows]
    try:
        part = batch.slice(int(rows[0]) - start, int(rows[-1] - rows[0]) + 1)
        part = _in_microseconds(part if len(part) == len(rows) else part.take(pa.array(rows - rows[0])))
        values = part.to_pylist()
    except (pa.ArrowException, ValueError, OverflowError) as error:  # some types have no `take`
        if len(rows) == 1:
            if isinstance(error, UnicodeDecodeError):
                raise RecordError.at(path, lines[0], f"is not UTF-8: {error.reason}") from None
            raise RecordError.at(path, lines[0], f"cannot be decoded: {_cause(error)}") from None
        return {
            key: record for row in rows for key, record in _records(path, start, batch, row[None], line=line).items()
        }
    return {
        int(row): FileRecord(path=path, line=number, fields=fields, of_table=True)
        for row, number, fields in zip(rows, lines, values, strict=True)
    }


def _is_complete(stream: Any) -> bool:
    """Return whether a stream that was read ends with its end mark. The reader also accepts the end of the file."""
    if stream.tell() != stream.size():
        return False
    stream.seek(stream.size() - len(_END_OF_STREAM))
    return bool(stream.read() == _END_OF_STREAM)


def _in_microseconds(batch: Any) -> Any:
    """Return the rows with times that Python can represent."""
    kinds = [_microseconds(kind) for kind in batch.schema.types]
    if kinds == batch.schema.types:
        return batch
    return batch.cast(pa.schema(zip(batch.schema.names, kinds, strict=True)), safe=False)


def _microseconds(kind: Any) -> Any:
    if not pa.types.is_temporal(kind) or getattr(kind, "unit", "") != "ns":
        return kind
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz)
    return pa.time64("us") if pa.types.is_time64(kind) else pa.duration("us")


def _chosen(path: Path, names: Sequence[str], columns: Columns) -> list[str]:
    chosen = [name for name in names if columns is None or name in columns]
    if twice := [name for name, number in Counter(chosen).items() if number > 1]:
        raise ConfigError(f"{path} has several columns with the name {twice[0]!r}; rename all but one", path=path)
    return chosen


def _starts(sizes: Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)


def _batch_rows(group: Any) -> int:
    row_bytes = int(group.total_byte_size) / max(1, int(group.num_rows))
    return max(1, min(DECODED_ROWS_MAX, int(BATCH_BYTES / max(1.0, row_bytes))))


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn an error of pyarrow or of the file into a ConfigError that names the file."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(
            f"cannot read {path}: {_cause(error)}; give a file of the format that its name says", path=path
        ) from error


def _cause(error: Exception) -> str:
    return str(error).partition("\n")[0][:_CAUSE_CHARS_MAX]
