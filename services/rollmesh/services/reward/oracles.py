"""Oracles: resolve the `oracle_ref` of a task to its answer key.

A reference is `scheme:rest`. Every scheme has one oracle:
    jsonl:NAME@DIGEST#LINE      a line of the JSONL file configured under NAME; DIGEST is the head of its SHA-256
    files:NAME@DIGEST#ROW       a row of the files configured under NAME, which are not held in memory
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
from threading import Lock
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from rollmesh.services.reward.item import AnswerKey
from rollmesh.shared.config.plugin import Plugin, required
from rollmesh.shared.config.registry import Registry
from rollmesh.shared.config.settings import OneOrMoreStr, Settings
from rollmesh.shared.domain.option_order import NUM_OPTIONS_MAX, letter_of_answer, option_named, plain_options
from rollmesh.shared.errors import UnknownOracle
from rollmesh.shared.store.jsonl import read_jsonl
from rollmesh.shared.store.records import FileRecord
from rollmesh.shared.store.row_files import open_rows
from rollmesh.shared.store.sized_cache import SizedCache

NUM_LINES_MAX = 2_000_000
KEYS_BYTES_MAX = 16 * 1024 * 1024
"""Answer keys of files that are kept, in characters of their text form."""
_NUMBER = re.compile("[0-9]{1,10}")
NO_KEYS: Mapping[str, AnswerKey] = {}


class Oracle(Plugin):
    """Base of oracles: resolves the references of one scheme. Constructed as `cls(options=...)`, or as `cls()` if the
    class has no `Options`."""

    blocks: bool = False
    """Whether `resolve` reads files, so that an event loop calls it in a thread."""

    @required
    def resolve(self, rest: str) -> AnswerKey:
        """Return the key of `rest`, the part after `scheme:`. Raise UnknownOracle if it does not exist."""
        raise NotImplementedError

    async def fetch(self, rests: Sequence[str]) -> Mapping[str, AnswerKey]:
        """Return the keys of these references that are fetched by a call; `resolve` returns the others. Raise
        UnknownOracle, or an error of the call that can be repeated."""
        return NO_KEYS


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
    """Files with answers: the files and fields of the task source of that name."""

    path: OneOrMoreStr
    """The `path` of the source, relative to the folder of the configuration."""
    source: Literal["jsonl", "files"] = "jsonl"
    """Source of the tasks, which is the scheme of their references."""
    answer: str = "answer"
    """Field with the reference answer or a list of accepted answers. It may be empty if `tests` is set."""
    tests: str = ""
    """Field with the manifest of hidden tests, an object or its JSON text (in Parquet and Arrow files, JSON text), or
    with its reference in the oracle store of the sandbox nodes. Empty means no tests."""
    answer_pattern: str = ""
    """Regular expression of the answer in its field. The last match counts, and its group 1 if the expression has
    one."""
    options: str = ""
    """Field with the list of options of a line, or null. An answer that names an option by its letter is then the text
    of the option. Empty means no options."""
    num_lines_max: Annotated[int, Meta(ge=1, le=NUM_LINES_MAX)] = NUM_LINES_MAX
    """Maximum number of lines of a `jsonl` source. The file is held in memory."""

    def check_fields(self) -> None:
        if self.source == "jsonl" and not isinstance(self.path, str):
            raise ValueError(f"`path` must be one file for the source jsonl, got {list(self.path)}")
        try:
            re.compile(self.answer_pattern)
        except re.error as error:
            raise ValueError(
                f"`answer_pattern` must be a regular expression, got {self.answer_pattern!r}: {error}"
            ) from None
        if not self.answer and not self.tests:
            raise ValueError("`answer` must name a field, got ''")

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path,) if isinstance(self.path, str) else self.path


class Oracles:
    """Resolves any reference with the oracle of its scheme."""

    def __init__(self, oracles: Mapping[str, Oracle]) -> None:
        """`oracles` are by scheme. The built-in ones are added on first use."""
        self._oracles = dict(oracles)

    def resolve(self, oracle_ref: str, fetched: Mapping[str, AnswerKey] = NO_KEYS) -> AnswerKey | None:
        """Return None for the empty reference of a task without answer key. Raise UnknownOracle."""
        if not oracle_ref:
            return None
        if oracle_ref in fetched:
            return fetched[oracle_ref]
        scheme, _, rest = oracle_ref.partition(":")
        return self._find(scheme, oracle_ref).resolve(rest)

    def resolve_records(self, oracle_refs: Sequence[str]) -> dict[str, AnswerKey]:
        """Return the keys of references that name records. Each row group of a file is decoded once. Raise
        UnknownOracle."""
        by_scheme: dict[str, list[str]] = {}
        for oracle_ref in dict.fromkeys(oracle_refs):
            by_scheme.setdefault(oracle_ref.partition(":")[0], []).append(oracle_ref)
        found: dict[str, AnswerKey] = {}
        for scheme, refs in by_scheme.items():
            oracle = self._find(scheme, refs[0])
            assert isinstance(oracle, RecordOracle), "the references name records"
            found |= zip(refs, oracle.resolve_all([ref.partition(":")[2] for ref in refs]), strict=True)
        return found

    def blocks(self, oracle_ref: str) -> bool:
        """Return whether `resolve` reads files for this reference."""
        scheme = oracle_ref.partition(":")[0]
        return bool(oracle_ref) and self._find(scheme, oracle_ref).blocks

    def _find(self, scheme: str, oracle_ref: str) -> Oracle:
        if scheme not in self._oracles:
            if scheme not in ORACLES.names:
                known = ", ".join(dict.fromkeys((*self._oracles, *ORACLES.names)))
                raise UnknownOracle(
                    f"oracle `{oracle_ref}`: the scheme `{scheme}` is unknown; known: {known}; name its oracle in "
                    "reward.oracles",
                    oracle_ref=oracle_ref,
                )
            self._oracles[scheme] = ORACLES.make(scheme)
        return self._oracles[scheme]

    async def fetch(self, oracle_refs: Iterable[str]) -> dict[str, AnswerKey]:
        """Return the keys that an oracle has to fetch, by reference. Raise as `Oracle.fetch`."""
        fetched: dict[str, AnswerKey] = {}
        by_scheme: dict[str, list[str]] = {}
        for ref in dict.fromkeys(oracle_refs):
            scheme, _, rest = ref.partition(":")
            by_scheme.setdefault(scheme, []).append(rest)
        for scheme, rests in by_scheme.items():
            if scheme in self._oracles:
                keys = await self._oracles[scheme].fetch(rests)
                fetched |= {f"{scheme}:{rest}": key for rest, key in keys.items()}
        return fetched


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


class RecordOracle(Oracle):
    """Base of oracles whose references name a record of configured files: `NAME@DIGEST#NUMBER`."""

    scheme: ClassVar[str]
    record: ClassVar[str]
    """What a number counts."""

    @required
    def digest(self, name: str) -> str | None:
        """Return the digest of the files of a name. None if none are configured."""
        raise NotImplementedError

    @required
    def keys(self, name: str, numbers: Sequence[int]) -> list[AnswerKey | None]:
        """Return the keys of records, from 1. None if a record does not exist."""
        raise NotImplementedError

    def resolve(self, rest: str) -> AnswerKey:
        return self.resolve_all([rest])[0]

    def resolve_all(self, rests: Sequence[str]) -> list[AnswerKey]:
        """Return the keys of references, in their order. Raise as `resolve`."""
        places = [self._place(rest) for rest in rests]
        found: dict[tuple[str, int], AnswerKey | None] = {}
        for wanted in {name for name, _ in places}:
            numbers = list(dict.fromkeys(number for name, number in places if name == wanted))
            found |= zip([(wanted, number) for number in numbers], self.keys(wanted, numbers), strict=True)
        keys: list[AnswerKey] = []
        for rest, place in zip(rests, places, strict=True):
            if (key := found[place]) is None:
                raise self._unknown(
                    rest, f"the file `{place[0]}` has no task on {self.record} {rest.partition('#')[2]!r}"
                )
            keys.append(key)
        return keys

    def _place(self, rest: str) -> tuple[str, int]:
        """Return the name of the files and the number of the record, 0 if it is not a number."""
        name, _, place = rest.partition("@")
        digest, _, number = place.partition("#")
        found = self.digest(name)
        if found is None:
            raise self._unknown(rest, f"no answer file `{name}` is configured here")
        if digest != found[: len(digest)] or not digest:
            raise self._unknown(
                rest, f"the file `{name}` differs from the one the task came from; give both services the same"
            )
        return name, int(number) if _NUMBER.fullmatch(number) else 0

    def _unknown(self, rest: str, cause: str) -> UnknownOracle:
        reference = f"{self.scheme}:{rest}"
        return UnknownOracle(f"oracle `{reference}`: {cause}", oracle_ref=reference)


class JsonlOracle(RecordOracle):
    """Answers from JSONL files by name. The files are read at the start of the service."""

    scheme, record = "jsonl", "line"

    def __init__(self, files: Mapping[str, AnswerFileConfig], base_dir: str | Path | None = None) -> None:
        """Relative paths are relative to `base_dir`, by default the current folder.

        Raise ConfigError if a file cannot be read, and RecordError with file, line and field of a malformed record.
        """
        self._files = {name: _read(config, Path(base_dir or ".") / config.paths[0]) for name, config in files.items()}

    def digest(self, name: str) -> str | None:
        return self._files[name][1] if name in self._files else None

    def keys(self, name: str, numbers: Sequence[int]) -> list[AnswerKey | None]:
        return [self._files[name][0].get(number) for number in numbers]


class FilesOracle(RecordOracle):
    """Answers from files by name. A row is read when its reference is resolved, with all of its columns. Keys that were
    used last are kept, because each episode of a group needs the same one."""

    scheme, record = "files", "row"
    blocks = True

    def __init__(self, files: Mapping[str, AnswerFileConfig], base_dir: str | Path | None = None) -> None:
        """Relative paths are relative to `base_dir`, by default the current folder. Raise ConfigError if a file cannot
        be read."""
        self._files = {name: (config, open_rows(config.paths, base_dir=base_dir)) for name, config in files.items()}
        self._keys = SizedCache[tuple[str, int], AnswerKey](KEYS_BYTES_MAX)
        self._lock = Lock()

    def digest(self, name: str) -> str | None:
        return self._files[name][1].digest if name in self._files else None

    def keys(self, name: str, numbers: Sequence[int]) -> list[AnswerKey | None]:
        config, rows = self._files[name]
        with self._lock:
            found = {number: self._keys.get((name, number)) for number in numbers}
            wanted = [number for number, key in found.items() if key is None and 1 <= number <= len(rows)]
            records = rows.rows([number - 1 for number in wanted]) if wanted else []
            for number, record in zip(wanted, records, strict=True):
                found[number] = key = _key(record, config, _compiled(config))
                self._keys.put((name, number), key, len(repr(key)))
        return [found[number] for number in numbers]


_FILE_ORACLES = (JsonlOracle, FilesOracle)


def names_record(oracle_ref: str) -> bool:
    """Return whether a reference names a record of answer files."""
    return oracle_ref.partition(":")[0] in {kind.scheme for kind in _FILE_ORACLES}


def file_oracles(files: Mapping[str, AnswerFileConfig], base_dir: str | Path | None = None) -> dict[str, Oracle]:
    """Return the oracles of answer files by their scheme. Raise as their constructors."""
    return {
        kind.scheme: kind({name: file for name, file in files.items() if file.source == kind.scheme}, base_dir)
        for kind in _FILE_ORACLES
    }


def _read(config: AnswerFileConfig, path: Path) -> tuple[dict[int, AnswerKey], str]:
    file = read_jsonl(path, num_lines_max=config.num_lines_max)
    pattern = _compiled(config)
    return {record.line: _key(record, config, pattern) for record in file.records}, file.digest


def _compiled(config: AnswerFileConfig) -> re.Pattern[str] | None:
    return re.compile(config.answer_pattern) if config.answer_pattern else None


def _key(record: FileRecord, config: AnswerFileConfig, pattern: re.Pattern[str] | None) -> AnswerKey:
    answers = record.extract_all(config.answer, pattern) if config.answer else ()
    options = record.value(config.options, None)
    if isinstance(options, list):
        texts = plain_options(options)
        places = [option_named(answer, texts) for answer in answers]
        answers = tuple(
            answer if place is None else texts[place] for answer, place in zip(answers, places, strict=True)
        )
    return AnswerKey(answers=answers, record=record.fields, tests=record.tests(config.tests) if config.tests else "")
