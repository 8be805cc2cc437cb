"""Read a JSONL file of a user into memory. Errors contain file, line number and field."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rollmesh.shared.errors import ConfigError
from rollmesh.shared.store.records import FileRecord, RecordError, kind_of

LINE_BYTES_MAX = 16 * 1024 * 1024
"""Maximum length of a line, in bytes. A longer line means that the file has another format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonlFile:
    """The records of a file in order, and the SHA-256 (hex) of its bytes."""

    records: tuple[FileRecord, ...]
    digest: str


def read_jsonl(path: Path, *, num_lines_max: int) -> JsonlFile:
    """Return all records of a UTF-8 file with one JSON object per line. Blank lines are skipped.

    Raise ConfigError if the file cannot be read, and RecordError for the first line that is not a JSON object or
    exceeds a limit.
    """
    try:
        return _read(path, num_lines_max)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; give the path of a JSONL file", path=path) from error


def _read(path: Path, num_lines_max: int) -> JsonlFile:
    digest = hashlib.sha256()
    records: list[FileRecord] = []
    for line, raw in _lines(path, num_lines_max):
        digest.update(raw)
        if raw.strip():
            records.append(FileRecord(path=path, line=line, fields=parse_line(path, line, raw)))
    return JsonlFile(records=tuple(records), digest=digest.hexdigest())


def _lines(path: Path, num_lines_max: int) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        line = 0
        while raw := file.readline(LINE_BYTES_MAX + 1):
            line += 1
            if len(raw) > LINE_BYTES_MAX:
                raise RecordError.at(path, line, f"is longer than {LINE_BYTES_MAX} bytes")
            if line > num_lines_max:
                raise RecordError.at(path, line, f"the file has more than {num_lines_max} lines")
            yield line, raw


def parse_line(path: Path, line: int, raw: bytes) -> dict[str, object]:
    """Return the object in a line. Raise RecordError if it is not a JSON object in UTF-8."""
    try:
        value = json.loads(raw.decode("utf-8-sig"))
        if b"\\ud" in raw or b"\\uD" in raw:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise RecordError.at(path, line, f"is not UTF-8: {error.reason}") from None
    except UnicodeEncodeError:
        raise RecordError.at(path, line, "has half of a surrogate pair, which is not a character") from None
    except json.JSONDecodeError as error:
        raise RecordError.at(path, line, f"is not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise RecordError.at(path, line, "is nested too deeply") from None
    except ValueError:
        raise RecordError.at(path, line, "has a number with too many digits") from None
    if not isinstance(value, dict):
        raise RecordError.at(path, line, f"must be a JSON object, got {kind_of(value)}")
    return value
