"""A record of a file of a user, and the error that names its file, its line and its field.

A record is an object with named fields: a line of a JSONL file, or a row of a table. The data service (prompts) and the
reward service (answer keys) read the same files with the modules beside this one. They compare the digests of the files
to detect that they have different ones.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rollmesh.shared.errors import InvalidInput


class RecordError(InvalidInput):
    """A record that cannot be used. The message is `FILE:LINE: [field "NAME":] CAUSE`."""

    reason = "MALFORMED_RECORD"

    @classmethod
    def at(cls, path: Path, line: int, cause: str, *, field: str = "") -> RecordError:
        """Return the error of a record, or of a field of it if `field` is not empty."""
        where = f'field "{field}": ' if field else ""
        return cls(f"{path}:{line}: {where}{cause}", path=path, line=line, field=field)


_REQUIRED = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """Named values of a file. `line` counts from 1: the lines of a JSONL file, blank ones too, as in an editor, or the
    rows of a table. The header of a CSV file is row 1, as in a spreadsheet."""

    path: Path
    line: int
    fields: Mapping[str, object]
    has_names: bool = True
    """Whether an error may have the names of all fields. A CSV file without a header has values, such as answers, as
    names."""
    of_table: bool = False
    """Whether nested objects have null for absent fields, as those of a Parquet or Arrow file."""

    def value(self, field: str, default: object = _REQUIRED) -> object:
        """Return the value at `field`, in which dots separate names of nested objects unless the record has that name.
        If it is absent, return the `default`, or raise RecordError without one."""
        if field in self.fields:
            return self.fields[field]
        node: object = self.fields
        for name in field.split("."):
            if not isinstance(node, dict) or name not in node:
                if default is not _REQUIRED:
                    return default
                raise self.error(f"is missing; the line has {self._names or 'no fields'}", field)
            node = node[name]
        return node

    def text(self, field: str) -> str:
        """Return the non-empty string at `field`, or a number or boolean in its JSON form. Raise RecordError for other
        values."""
        value = self.value(field)
        if isinstance(value, (bool, int, float)):
            return json.dumps(value)
        if not isinstance(value, str):
            raise self.error(f"must be a string or a number, got {kind_of(value)}", field)
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

    def tests(self, field: str) -> str | dict[str, object]:
        """Return the manifest of hidden tests at `field`, an object or its JSON text, or the reference of one. Raise
        RecordError for other values."""
        value = self.value(field)
        if isinstance(value, str) and value.lstrip().startswith("{"):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                raise self.error("begins with { but is not JSON", field) from None
        elif isinstance(value, dict) and self.of_table:
            raise self.error("must be JSON text, because a struct of a table has null for each absent field", field)
        if not isinstance(value, (str, dict)) or not value:
            raise self.error("must be a manifest of hidden tests, or its reference", field)
        return value

    @property
    def _names(self) -> str:
        return ", ".join(self.fields) if self.has_names else f"{len(self.fields)} others; is line 1 the header?"

    def error(self, cause: str, field: str = "") -> RecordError:
        return RecordError.at(self.path, self.line, cause, field=field)


def last_match(pattern: re.Pattern[str], text: str) -> str | None:
    """Return the last match of `pattern` in `text`: group 1, or the whole match without a group. None without a
    match."""
    matches = deque(pattern.finditer(text), maxlen=1)
    if not matches:
        return None
    return (matches[0][1] or "") if pattern.groups else matches[0][0]


def kind_of(value: object) -> str:
    """Return the JSON type of a value with its article. Tables also have values of other types, such as dates."""
    kinds = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bytes: "bytes",
        bool: "a boolean",
        type(None): "null",
    }
    return kinds.get(type(value), "a number" if isinstance(value, (int, float)) else f"a {type(value).__name__}")
