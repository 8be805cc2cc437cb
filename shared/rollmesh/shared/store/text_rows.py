"""Rows of JSONL and CSV files by position, with an index of the byte offsets of their records.

A record of a JSONL file is a line. A record of a CSV file (RFC 4180) ends with a line break that has an even number of
quotes before it; the first record has the names of the fields, and an empty field is null. A quote or a carriage return
outside quotes would make the module `csv` find other records, so such a record is malformed. Blank lines are skipped.
"""

from __future__ import annotations

import csv
import io
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from rollmesh.shared.errors import ConfigError
from rollmesh.shared.store.jsonl import LINE_BYTES_MAX, parse_line
from rollmesh.shared.store.records import FileRecord, RecordError
from rollmesh.shared.store.row_file import Columns, RowBatch, RowFile

CHUNK_BYTES = 4 * 1024 * 1024
"""Bytes that are indexed or scanned at once. A longer record is read whole."""
_NEWLINE, _QUOTE, _SPACE = b"\n"[0], b'"'[0], b" "[0]


class TextRows(RowFile):
    """A file whose records end with line breaks."""

    quotes: ClassVar[bool]
    """Whether line breaks in quotes belong to a record."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._index = _Index(path, quotes=self.quotes)

    @abstractmethod
    def parse(self, line: int, raw: bytes) -> Mapping[str, object]:
        """Return the fields of a record. Raise RecordError."""

    def __len__(self) -> int:
        return len(self._index.starts)

    def read(self, rows: Sequence[int], columns: Columns = None) -> list[FileRecord]:
        with self.path.open("rb") as file:
            return [self.record(row, _read(file, *self._index.span(row, row + 1))) for row in rows]

    def scan(self) -> Iterator[RowBatch]:
        starts, start = self._index.starts, 0
        with self.path.open("rb") as file:
            while start < len(starts):
                begin = int(starts[start])
                stop = max(start + 1, int(np.searchsorted(starts, np.uint64(begin + CHUNK_BYTES))))
                yield _TextBatch(
                    self, self._index, range(start, stop), begin, _read(file, *self._index.span(start, stop))
                )
                start = stop

    def record(self, row: int, raw: bytes) -> FileRecord:
        """Return the record of a row from its bytes. Raise RecordError."""
        line = self._index.line(row)
        return FileRecord(path=self.path, line=line, fields=self.parse(line, raw), has_names=not self.quotes)


class JsonlRows(TextRows):
    """A UTF-8 file with one JSON object per line."""

    quotes = False

    def parse(self, line: int, raw: bytes) -> Mapping[str, object]:
        return parse_line(self.path, line, raw)


class CsvRows(TextRows):
    """A UTF-8 file with comma-separated values and a header."""

    quotes = True

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        csv.field_size_limit(LINE_BYTES_MAX)
        with path.open("rb") as file:
            header = _read(file, *(self._index.take_header() or (0, 0))).removeprefix(b"\xef\xbb\xbf")
        if not header.strip():
            raise ConfigError(
                f"{path} is empty; the first line of a CSV file must have the names of its fields", path=path
            )
        self._names = self._values(1, header)
        if not all(self._names) or len(set(self._names)) != len(self._names):
            raise RecordError.at(
                path,
                1,
                f"the header must have different names of fields, got {len(set(filter(None, self._names)))} names of "
                f"{len(self._names)} fields",
            )

    def parse(self, line: int, raw: bytes) -> Mapping[str, object]:
        values = self._values(line, raw)
        if len(values) != len(self._names):
            raise RecordError.at(self.path, line, f"has {len(values)} fields, the header has {len(self._names)}")
        return {name: value or None for name, value in zip(self._names, values, strict=True)}

    def _values(self, line: int, raw: bytes) -> list[str]:
        try:
            found = list(csv.reader(io.StringIO(raw.decode(), newline=""), strict=True))
        except UnicodeDecodeError as error:
            raise RecordError.at(self.path, line, f"is not UTF-8: {error.reason}") from None
        except csv.Error as error:
            raise RecordError.at(self.path, line, f"is not a record of CSV: {error}") from None
        first, *others = [values for values in found if values]
        others = [values for values in others if len(values) > 1 or values[0].strip()]  # not of blank lines
        if others:
            raise RecordError.at(
                self.path,
                line,
                f"has {1 + len(others)} records of CSV, because a quote or a carriage return is outside quotes; put "
                "quotes around the field, and double each quote in it",
            )
        return first


@dataclass(frozen=True, slots=True)
class _TextBatch(RowBatch):
    file: TextRows
    index: _Index
    rows: range
    begin: int
    """Offset of `raw` in the file."""
    raw: bytes

    def __len__(self) -> int:
        return len(self.rows)

    def record(self, index: int) -> FileRecord:
        row = self.rows[index]
        start, stop = self.index.span(row, row + 1)
        return self.file.record(row, self.raw[start - self.begin : stop - self.begin])


class _Index:
    """Where each record of a file begins. A record ends where the next one begins, so blank lines may follow it."""

    def __init__(self, path: Path, *, quotes: bool) -> None:
        """Raise ConfigError if the file cannot be read, and RecordError for a record that is too long."""
        self._first_line = 1
        found: list[NDArray[np.uint64]] = [np.empty(0, dtype=np.uint64)]
        blanks: list[NDArray[np.int64]] = [np.empty(0, dtype=np.int64)]
        num_records = 0
        try:
            for offset, data, starts, stops in _lines(path, quotes=quotes):
                blank = _blank(data, starts, stops)
                kept = np.cumsum(~blank)
                found.append((starts[~blank] + offset).astype(np.uint64))
                blanks.append(num_records + kept[blank])
                num_records += int(kept[-1])
            self._size = path.stat().st_size
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}; give the path of a file", path=path) from error
        self.starts = np.concatenate(found)
        self._blanks = np.concatenate(blanks)
        """Number of records before each blank line."""

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """Return the offsets of the first byte of row `start` and of the end of row `stop` - 1."""
        return int(self.starts[start]), int(self.starts[stop]) if stop < len(self.starts) else self._size

    def line(self, row: int) -> int:
        before = int(np.searchsorted(self._blanks, row, side="right")) if len(self._blanks) else 0
        return row + self._first_line + before

    def take_header(self) -> tuple[int, int] | None:
        """Remove the first record and return its span. None if no record exists."""
        if not len(self.starts):
            return None
        span = self.span(0, 1)
        self.starts, self._blanks, self._first_line = self.starts[1:], self._blanks - 1, 2
        return span


def _lines(path: Path, *, quotes: bool) -> Iterator[tuple[int, bytes, NDArray[np.int64], NDArray[np.int64]]]:
    """Yield whole records: the offset of `data`, `data`, and where in it each record begins and ends."""
    offset, data, num_lines = 0, b"", 0
    with path.open("rb") as file:
        while True:
            more = file.read(CHUNK_BYTES)
            data += more
            array = np.frombuffer(data, dtype=np.uint8)
            stops = np.flatnonzero(array == _NEWLINE) + 1
            if quotes:
                is_quote = np.flatnonzero(array == _QUOTE)
                stops = stops[np.searchsorted(is_quote, stops) % 2 == 0]
            if not more and data and (not len(stops) or stops[-1] < len(data)):
                stops = np.append(stops, len(data))
            starts = np.concatenate([[0], stops[:-1]]) if len(stops) else stops
            ended = int(stops[-1]) if len(stops) else 0
            lengths = np.append(stops - starts, len(data) - ended)
            if lengths.max() > LINE_BYTES_MAX:
                line = num_lines + int(lengths.argmax()) + 1
                hint = "; is a quote not closed?" if quotes else ""
                raise RecordError.at(path, line, f"is longer than {LINE_BYTES_MAX} bytes{hint}")
            if len(stops):
                yield offset, data, starts, stops
            num_lines += len(stops)
            offset, data = offset + ended, data[ended:]
            if not more:
                return


def _blank(data: bytes, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which lines have only white space."""
    blank = np.frombuffer(data, dtype=np.uint8)[starts] <= _SPACE
    for line in np.flatnonzero(blank):
        blank[line] = not data[starts[line] : stops[line]].strip()
    return blank


def _read(file: io.BufferedReader, start: int, stop: int) -> bytes:
    file.seek(start)
    return file.read(stop - start)
