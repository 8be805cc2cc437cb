"""Answer keys: an `oracle_ref` of a task resolved to what the right answer is.

References are `scheme:rest`:
    calc:EXPRESSION             the value of an arithmetic expression, worked out here
    jsonl:NAME@DIGEST#LINE      a line of the JSONL file configured under NAME; DIGEST is the head of its SHA-256
    tests:REF                   the hidden tests REF of the sandbox nodes' oracle store

This service alone resolves them. The key goes to scorers in this process and into no message, log line or error.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from rollmesh.services.reward.item import AnswerKey
from rollmesh.shared.errors import UnknownOracle
from rollmesh.shared.jsonl import Record, read_jsonl

NUM_LINES_MAX = 2_000_000
_EXPRESSION = re.compile(r"-?\d{1,9}(?:[-+*]\d{1,9}){0,64}")
_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


class OracleStore(Protocol):
    """Resolves the references of one scheme."""

    def resolve(self, rest: str) -> AnswerKey:
        """The key behind `rest`, the part after `scheme:`. UnknownOracle if there is none."""


class AnswerFileConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A JSONL file with answers; the same file and fields as the data service's source of that name."""

    path: str
    """The file, one JSON object per line, UTF-8; relative to the configuration's folder."""
    answer: str = "answer"
    """Field with the reference answer, or with a list of accepted ones; may be empty if `tests` is set."""
    tests: str = ""
    """Field with the manifest of hidden tests, or with its reference in the sandbox nodes' oracle store; empty if there are none."""
    answer_pattern: str = ""
    """Regular expression that finds the answer in its field: the last match, group 1 if it has one."""
    num_lines_max: int = NUM_LINES_MAX
    """Longest accepted file; it is held in memory."""

    def __post_init__(self) -> None:
        try:
            re.compile(self.answer_pattern)
        except re.error as error:
            raise ValueError(
                f"answer_pattern is not a regular expression: {error}, got {self.answer_pattern!r}"
            ) from None
        if not self.answer and not self.tests:
            raise ValueError("answer must name a field, got ''")
        if not 1 <= self.num_lines_max <= NUM_LINES_MAX:
            raise ValueError(f"num_lines_max must be in [1, {NUM_LINES_MAX}], got {self.num_lines_max}")


class Oracles:
    """Resolves any reference through the store of its scheme."""

    def __init__(self, stores: Mapping[str, OracleStore]) -> None:
        self._stores = dict(stores)

    def resolve(self, oracle_ref: str) -> AnswerKey | None:
        """None for the empty reference: the task has no answer key. UnknownOracle."""
        if not oracle_ref:
            return None
        scheme, _, rest = oracle_ref.partition(":")
        if scheme not in self._stores:
            raise UnknownOracle(
                f"oracle `{oracle_ref}`: no answer keys of scheme `{scheme}` here; known: {', '.join(self._stores)}",
                oracle_ref=oracle_ref,
            )
        return self._stores[scheme].resolve(rest)


class CalcOracle:
    """Works out integer expressions of `+`, `-` and `*`."""

    def resolve(self, rest: str) -> AnswerKey:
        if not _EXPRESSION.fullmatch(rest):
            raise UnknownOracle("oracle `calc`: not an arithmetic expression of + - *", oracle_ref=f"calc:{rest[:100]}")
        # Without leading zeros, which Python refuses in literals.
        text = re.sub(r"\b0+(?=\d)", "", rest)
        return AnswerKey(answers=(str(_value(ast.parse(text, mode="eval").body)),))


class StoredTestsOracle:
    """Hidden tests that the sandbox nodes hold; whether they know the reference is seen when it is used."""

    def resolve(self, rest: str) -> AnswerKey:
        if not rest:
            raise UnknownOracle("oracle `tests:`: no reference", oracle_ref="tests:")
        return AnswerKey(tests=rest)


class JsonlOracle:
    """Answers from JSONL files, by name. Files are read when the service starts."""

    def __init__(self, files: Mapping[str, AnswerFileConfig], base_dir: str | Path | None = None) -> None:
        """Relative paths are looked up in `base_dir`, else in the current folder.

        ConfigError if a file cannot be read, RecordError naming file, line and field of a malformed one.
        """
        self._files = {name: _read(config, Path(base_dir or ".") / config.path) for name, config in files.items()}

    def resolve(self, rest: str) -> AnswerKey:
        name, _, place = rest.partition("@")
        digest, _, line = place.partition("#")
        if name not in self._files:
            raise self._unknown(rest, f"no answer file `{name}` is configured here")
        keys, found = self._files[name]
        if digest != found[: len(digest)] or not digest:
            raise self._unknown(
                rest, f"the file `{name}` differs from the one the task came from; give both services the same"
            )
        if not line.isascii() or not line.isdecimal() or int(line) not in keys:
            raise self._unknown(rest, f"the file `{name}` has no task on line {line!r}")
        return keys[int(line)]

    @staticmethod
    def _unknown(rest: str, cause: str) -> UnknownOracle:
        return UnknownOracle(f"oracle `jsonl:{rest}`: {cause}", oracle_ref=f"jsonl:{rest}")


def _read(config: AnswerFileConfig, path: Path) -> tuple[dict[int, AnswerKey], str]:
    file = read_jsonl(path, num_lines_max=config.num_lines_max)
    pattern = re.compile(config.answer_pattern) if config.answer_pattern else None
    return {record.line: _key(record, config, pattern) for record in file.records}, file.digest


def _key(record: Record, config: AnswerFileConfig, pattern: re.Pattern[str] | None) -> AnswerKey:
    answers = record.extract_all(config.answer, pattern) if config.answer else ()
    return AnswerKey(answers=answers, record=record.fields, tests=_tests(record, config.tests))


def _tests(record: Record, field: str) -> str | Mapping[str, object]:
    if not field:
        return ""
    value = record.value(field)
    if not isinstance(value, (str, dict)) or not value:
        raise record.error("must be a manifest of hidden tests, or its reference", field)
    return value


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right):
            return _OPERATIONS[type(op)](_value(left), _value(right))
    raise AssertionError(f"the pattern admits no {type(node).__name__}")
