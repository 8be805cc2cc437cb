"""Read a JSONL file of a user. Errors contain file, line number and field.

The data service (prompts) and the reward service (answer keys) read the same file with this module. They compare
`digest` to detect that they have different files.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rollmesh.shared.errors import ConfigError, InvalidInput

LINE_BYTES_MAX = 16 * 1024 * 1024
"""Maximum length of a line, in bytes. A longer line means that the file has another format."""


class RecordError(InvalidInput):
    """A line that cannot be used. The message is `FILE:LINE: [field "NAME":] CAUSE`."""

    reason = "MALFORMED_RECORD"

    @classmethod
    def at(cls, path: Path, line: int, cause: str, *, field: str = "") -> RecordError:
        """Return the error of a line, or of a field of it if `field` is not empty."""
        where = f'field "{field}": ' if field else ""
        return cls(f"{path}:{line}: {where}{cause}", path=path, line=line, field=field)


_REQUIRED = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonlRecord:
    """A JSON object in one line. `line` counts from 1 and includes blank lines, as in an editor."""

    path: Path
    line: int
    fields: Mapping[str, object]

    def value(self, field: str, default: object = _REQUIRED) -> object:
        """Return the value at `field`, in which dots separate names of nested objects. If it is absent, return the
        `default`, or raise RecordError without one."""
        node: object = self.fields
        for name in field.split("."):
            if not isinstance(node, dict) or name not in node:
                if default is not _REQUIRED:
                    return default
                raise self.error(f"is missing; the line has {', '.join(self.fields) or 'no fields'}", field)
            node = node[name]
        return node

    def text(self, field: str) -> str:
        """Return the non-empty string at `field`, or a number or boolean in its JSON form. Raise RecordError for other
        values."""
        value = self.value(field)
        if isinstance(value, (bool, int, float)):
            return json.dumps(value)
        if not isinstance(value, str):
            raise self.error(f"must be a string or a number, got {_kind(value)}", field)
        if not value.strip():
            raise self.error("is empty", field)
        return value

    def extract(self, field: str, pattern: re.Pattern[str] | None) -> str:
        """Return the text at `field`, or the last match of `pattern` in it: group 1, or the whole match without a
        group."""
        text = self.text(field)
        if pattern is None:
            return text.strip()
        found = last_match(pattern, text)
        if found is None:
            raise self.error(f"does not match {pattern.pattern!r}", field)
        return found

    def extract_all(self, field: str, pattern: re.Pattern[str] | None) -> tuple[str, ...]:
        """Return the result of `extract`, or the strings of a field that is a non-empty list of alternatives."""
        value = self.value(field)
        if not isinstance(value, list):
            return (self.extract(field, pattern),)
        if not value or not all(isinstance(entry, str) and entry.strip() for entry in value):
            raise self.error("must be a list of non-empty strings", field)
        return tuple(entry.strip() for entry in value)

    def error(self, cause: str, field: str = "") -> RecordError:
        return RecordError.at(self.path, self.line, cause, field=field)


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonlFile:
    """The records of a file in order, and the SHA-256 (hex) of its bytes."""

    records: tuple[JsonlRecord, ...]
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


def last_match(pattern: re.Pattern[str], text: str) -> str | None:
    """Return the last match of `pattern` in `text`: group 1, or the whole match without a group. None without a
    match."""
    matches = deque(pattern.finditer(text), maxlen=1)
    if not matches:
        return None
    return (matches[0][1] or "") if pattern.groups else matches[0][0]


def _read(path: Path, num_lines_max: int) -> JsonlFile:
    digest = hashlib.sha256()
    records: list[JsonlRecord] = []
    for line, raw in _lines(path, num_lines_max):
        digest.update(raw)
        if raw.strip():
            records.append(JsonlRecord(path=path, line=line, fields=_parse(path, line, raw)))
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


def _parse(path: Path, line: int, raw: bytes) -> dict[str, object]:
    try:
        value = json.loads(raw)
    except UnicodeDecodeError as error:
        raise RecordError.at(path, line, f"is not UTF-8: {error.reason}") from None
    except json.JSONDecodeError as error:
        raise RecordError.at(path, line, f"is not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise RecordError.at(path, line, "is nested too deeply") from None
    if not isinstance(value, dict):
        raise RecordError.at(path, line, f"must be a JSON object, got {_kind(value)}")
    return value


def _kind(value: object) -> str:
    return {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}.get(
        type(value), "a number"
    )
