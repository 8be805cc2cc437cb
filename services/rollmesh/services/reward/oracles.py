"""Oracles: resolve the `oracle_ref` of a task to its answer key.

A reference is `scheme:rest`. Every scheme has one oracle:
    jsonl:NAME@DIGEST#LINE      a line of the JSONL file configured under NAME; DIGEST is the head of its SHA-256
    submitted:RUN/RECORD/TASK   the key that a client submitted with its task; the coordinator returns it
    tests:REF                   the hidden tests REF in the oracle store of the sandbox nodes
    masked:SEED-DIGEST-OPTIONS  multiple choice of the source `masked`, whose reference determines the letter
    calc:, code:, sql:          the task families of the demo
    other schemes               oracles of `reward.oracles`

Only this service resolves references. It gives the key to scorers in this process, and writes it to no message, log
line or error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from rollmesh.services.reward.item import AnswerKey
from rollmesh.shared.config.plugin import Plugin, required
from rollmesh.shared.config.registry import Registry
from rollmesh.shared.config.settings import Settings
from rollmesh.shared.domain.option_order import NUM_OPTIONS_MAX, letter_of_answer
from rollmesh.shared.errors import UnknownOracle
from rollmesh.shared.store.jsonl import JsonlRecord, read_jsonl

NUM_LINES_MAX = 2_000_000


class Oracle(Plugin):
    """Base of oracles: resolves the references of one scheme. Constructed as `cls(options=...)`, or as `cls()` if the
    class has no `Options`."""

    @required
    def resolve(self, rest: str) -> AnswerKey:
        """Return the key of `rest`, the part after `scheme:`. Raise UnknownOracle if it does not exist."""
        raise NotImplementedError

    async def fetch(self, rests: Sequence[str]) -> None:
        """Fetch what `resolve` needs for these references, each once, before it is called. Raise UnknownOracle, or an
        error of the call that can be repeated."""


ORACLES = Registry(
    "oracle",
    {
        "submitted": "rollmesh.services.reward.submitted_oracle:SubmittedOracle",
        "tests": "rollmesh.services.reward.oracles:StoredTestsOracle",
        "masked": "rollmesh.services.reward.oracles:MaskedOracle",
        "calc": "rollmesh.demo.families.calc:CalcOracle",
        "code": "rollmesh.demo.families.code:CodeOracle",
        "sql": "rollmesh.demo.families.sql:SqlOracle",
    },
    Oracle,
)
"""Built-in oracles by scheme."""


class AnswerFileConfig(Settings):
    """A JSONL file with answers: the file and fields of the task source of that name."""

    path: str
    """UTF-8 file with one JSON object per line, relative to the folder of the configuration."""
    answer: str = "answer"
    """Field with the reference answer or a list of accepted answers. It may be empty if `tests` is set."""
    tests: str = ""
    """Field with the manifest of hidden tests, or with its reference in the oracle store of the sandbox nodes. Empty
    means no tests."""
    answer_pattern: str = ""
    """Regular expression of the answer in its field. The last match counts, and its group 1 if the expression has
    one."""
    num_lines_max: Annotated[int, Meta(ge=1, le=NUM_LINES_MAX)] = NUM_LINES_MAX
    """Maximum number of lines. The file is held in memory."""

    def check_fields(self) -> None:
        try:
            re.compile(self.answer_pattern)
        except re.error as error:
            raise ValueError(
                f"`answer_pattern` must be a regular expression, got {self.answer_pattern!r}: {error}"
            ) from None
        if not self.answer and not self.tests:
            raise ValueError("`answer` must name a field, got ''")


class Oracles:
    """Resolves any reference with the oracle of its scheme."""

    def __init__(self, oracles: Mapping[str, Oracle]) -> None:
        """`oracles` are by scheme. The built-in ones are added on first use."""
        self._oracles = dict(oracles)

    def resolve(self, oracle_ref: str) -> AnswerKey | None:
        """Return None for the empty reference of a task without answer key. Raise UnknownOracle."""
        if not oracle_ref:
            return None
        scheme, _, rest = oracle_ref.partition(":")
        if scheme not in self._oracles:
            if scheme not in ORACLES.names:
                known = ", ".join(dict.fromkeys((*self._oracles, *ORACLES.names)))
                raise UnknownOracle(
                    f"oracle `{oracle_ref}`: the scheme `{scheme}` is unknown; known: {known}; name its oracle in "
                    "reward.oracles",
                    oracle_ref=oracle_ref,
                )
            self._oracles[scheme] = ORACLES.make(scheme)
        return self._oracles[scheme].resolve(rest)

    async def fetch(self, oracle_refs: Iterable[str]) -> None:
        """Let each oracle fetch what it needs for its references. Raise as `Oracle.fetch`."""
        by_scheme: dict[str, list[str]] = {}
        for ref in dict.fromkeys(oracle_refs):
            scheme, _, rest = ref.partition(":")
            by_scheme.setdefault(scheme, []).append(rest)
        for scheme, rests in by_scheme.items():
            if scheme in self._oracles:
                await self._oracles[scheme].fetch(rests)


class StoredTestsOracle(Oracle):
    """Hidden tests in the oracle store of the sandbox nodes. An unknown reference is an error of the sandbox call."""

    def resolve(self, rest: str) -> AnswerKey:
        if not rest:
            raise UnknownOracle("oracle `tests:`: the reference is empty", oracle_ref="tests:")
        return AnswerKey(tests=rest)


class MaskedOracle(Oracle):
    """Letters of the answers of masked multiple choice."""

    def resolve(self, rest: str) -> AnswerKey:
        num_options = rest.rpartition("-")[2]
        if not num_options.isascii() or not num_options.isdecimal() or not 2 <= int(num_options) <= NUM_OPTIONS_MAX:
            raise UnknownOracle(
                f"oracle `masked:{rest[:100]}`: must end with the number of options, 2 to {NUM_OPTIONS_MAX}",
                oracle_ref=f"masked:{rest[:100]}",
            )
        return AnswerKey(answers=(letter_of_answer(rest, int(num_options)),))


class JsonlOracle(Oracle):
    """Answers from JSONL files by name. The files are read at the start of the service."""

    def __init__(self, files: Mapping[str, AnswerFileConfig], base_dir: str | Path | None = None) -> None:
        """Relative paths are relative to `base_dir`, by default the current folder.

        Raise ConfigError if a file cannot be read, and RecordError with file, line and field of a malformed record.
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


def _key(record: JsonlRecord, config: AnswerFileConfig, pattern: re.Pattern[str] | None) -> AnswerKey:
    answers = record.extract_all(config.answer, pattern) if config.answer else ()
    return AnswerKey(answers=answers, record=record.fields, tests=_tests(record, config.tests))


def _tests(record: JsonlRecord, field: str) -> str | Mapping[str, object]:
    if not field:
        return ""
    value = record.value(field)
    if not isinstance(value, (str, dict)) or not value:
        raise record.error("must be a manifest of hidden tests, or its reference", field)
    return value
