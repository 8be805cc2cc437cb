"""The SQL family: answer a question about small tables with one query. The key determines the task, for example

    dak(name,rup,mef): name where mef over 30

Each level is a kind of question. `rup` is a column of words, `mef` a column of numbers:
    1 where   name where mef over 30                  2 order   name by mef desc, first 2
    3 count   sum mef where rup is lok                4 group   sum mef per rup over 60
    5 join    pib where rup is lok                    two tables that share `name`

Tables, columns and values are made-up words that differ between tasks, so a query cannot be remembered. The prompt
shows the tables with a few rows, then the question. The exemplary query and three other databases of that schema are
hidden. Their rows are at and around the number of the question, so a query that is correct only on the shown rows
fails. Only the result of a query is judged (Zhong et al. 2020, distilled test suites). The reward service alone derives
the hidden databases.
"""

from __future__ import annotations

import random
import re
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollmesh.demo.families.judging import JUDGING
from rollmesh.services.data.generated import Demonstration, GeneratedSource
from rollmesh.services.reward.item import AnswerKey
from rollmesh.services.reward.oracles import Oracle
from rollmesh.shared.errors import UnknownOracle

NUM_DATABASES = 3
ROWS_SHOWN = 2
ROWS_HIDDEN = 12
LEVEL_MAX = 5

NAMES = ("amy", "bob", "cid", "dan", "eve", "fay", "gus", "hal", "ida", "joe", "kim", "lea", "ann", "ned", "oda", "pam")
NUM_VALUES = 4
"""Number of different words in a column of words."""
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_RESERVED = frozenset(("for", "not", "set", "sum", "min", "per", *NAMES))
"""Words of SQL and of questions, and names."""
_WORD = f"[{_CONSONANTS}][{_VOWELS}][{_CONSONANTS}]"
_FOLDS = ("sum", "max", "min")

_KEY = re.compile(
    rf"(?P<table>{_WORD})\(name,(?P<category>{_WORD}),(?P<number>{_WORD})\)"
    rf"(?: (?P<joined>{_WORD})\(name,(?P<cost>{_WORD})\))?: (?P<question>.+)"
)
_CONDITION = rf"where (?P<left>[a-z]+) (?:(?P<relation>over|under) (?P<right>\d{{1,2}})|is (?P<value>{_WORD}))"
_QUESTIONS = tuple(
    re.compile(pattern)
    for pattern in (
        rf"(?P<column>(?!count )[a-z]+) {_CONDITION}",
        r"(?P<column>[a-z]+) by (?P<by>[a-z]+)(?P<desc> desc)?(?:, first (?P<first>\d))?",
        rf"(?P<fold>count|(?:sum|max|min) [a-z]+) {_CONDITION}",
        r"(?P<fold>count|(?:sum|max|min) [a-z]+) per (?P<per>[a-z]+)(?: over (?P<over>\d{1,2}))?",
    )
)


@dataclass(frozen=True, slots=True)
class SqlTask:
    """The task of a key."""

    key: str
    level: int
    prompt: str
    query: str
    """An exemplary answer."""
    ordered: bool
    """Whether the order of the rows in the result counts."""
    scripts: tuple[str, ...]
    """The SQL script that creates each hidden database."""


@dataclass(frozen=True, slots=True)
class _Schema:
    table: str
    category: str
    number: str
    joined: str = ""
    cost: str = ""

    def __str__(self) -> str:
        first = f"{self.table}(name,{self.category},{self.number})"
        return f"{first} {self.joined}(name,{self.cost})" if self.joined else first

    @property
    def source(self) -> str:
        return f"{self.table} join {self.joined} using(name)" if self.joined else self.table


def make_key(rng: random.Random, level: int) -> str:
    """Return a random key of a level in [1, LEVEL_MAX]."""
    schema = _Schema(*_words(rng, 5 if level == LEVEL_MAX else 3))
    if schema.joined:
        return f"{schema}: {_make_joined_question(rng, schema)}"
    makers = (_make_where, _make_order, _make_count, _make_group)
    return f"{schema}: {makers[level - 1](rng, schema)}"


@dataclass(frozen=True, slots=True)
class _Shown:
    """What the agent gets of a task, and what its hidden databases are made of, which takes four times as long."""

    schema: _Schema
    level: int
    parts: dict[str, str | None]
    prompt: str
    tables: _Tables
    edge: int


def sql_task(key: str) -> SqlTask:
    """Return the task of a key. Equal keys give equal tasks. Raise ValueError if the text is not a key."""
    shown = _shown_task(key)
    schema, level, edge = shown.schema, shown.level, shown.edge
    query = _write(schema, level, shown.parts)
    hidden = [shown.tables.rows(ROWS_HIDDEN, (edge - 1, edge, edge + 1)) for _ in range(NUM_DATABASES)]
    scripts = tuple(_script(schema, rows) for rows in hidden)
    return SqlTask(key, LEVEL_MAX if schema.joined else level, shown.prompt, query, level == 2, scripts)


def _shown_task(key: str) -> _Shown:
    schema, question = _parse(key)
    matches = [(n, found) for n, pattern in enumerate(_QUESTIONS, start=1) if (found := pattern.fullmatch(question))]
    if not matches:
        raise _not_a_key(key)
    level, parts = matches[0][0], matches[0][1].groupdict()
    rng = random.Random(f"sql/tables/{key}")
    edge = int(parts.get("right") or parts.get("over") or _make_edge(rng))
    values = ([parts["value"]] if parts.get("value") else []) + _words(rng, NUM_VALUES)
    tables = _Tables(schema, values[:NUM_VALUES], rng)
    prompt = f"{_shown(schema, tables.rows(ROWS_SHOWN, ()))}\n{question}"
    return _Shown(schema, level, parts, prompt, tables, edge)


def _words(rng: random.Random, num: int) -> list[str]:
    """Return different made-up words."""
    found: list[str] = []
    while len(found) < num:
        word = rng.choice(_CONSONANTS) + rng.choice(_VOWELS) + rng.choice(_CONSONANTS)
        if word not in found and word not in _RESERVED:
            found.append(word)
    return found


# Questions ------------------------------------------------------------------------------------------------------------


def _make_edge(rng: random.Random) -> int:
    return rng.randrange(10, 100, 10)


def _make_condition(rng: random.Random, schema: _Schema) -> str:
    if rng.random() < 0.5:
        return f"where {schema.category} is {_words(rng, 1)[0]}"
    return f"where {schema.number} {rng.choice(('over', 'under'))} {_make_edge(rng)}"


def _make_where(rng: random.Random, schema: _Schema) -> str:
    return f"{rng.choice(('name', schema.category, schema.number))} {_make_condition(rng, schema)}"


def _make_order(rng: random.Random, schema: _Schema) -> str:
    desc = rng.choice(("", " desc"))
    first = f", first {rng.randint(1, 9)}" if rng.random() < 0.7 else ""
    return f"{rng.choice(('name', schema.category))} by {schema.number}{desc}{first}"


def _make_count(rng: random.Random, schema: _Schema) -> str:
    fold = rng.choice(("count", *(f"{fold} {schema.number}" for fold in _FOLDS)))
    return f"{fold} {_make_condition(rng, schema)}"


def _make_group(rng: random.Random, schema: _Schema) -> str:
    fold = rng.choice(("count", *(f"{fold} {schema.number}" for fold in _FOLDS)))
    over = 1 if fold == "count" else _make_edge(rng)
    return f"{fold} per {schema.category}{rng.choice(('', f' over {over}'))}"


def _make_joined_question(rng: random.Random, schema: _Schema) -> str:
    if rng.random() < 0.5:
        return f"{schema.cost} {_make_condition(rng, schema)}"
    return f"{rng.choice(_FOLDS)} {schema.cost} per {schema.category}"


def _parse(key: str) -> tuple[_Schema, str]:
    found = _KEY.fullmatch(key)
    if found is None:
        raise _not_a_key(key)
    parts = {name: value or "" for name, value in found.groupdict().items()}
    question = parts.pop("question")
    schema = _Schema(**parts)
    own = [word for word in parts.values() if word]
    value = re.findall(rf" is ({_WORD})", question)
    known = {"name", schema.category, schema.number, schema.cost, *value, *_QUESTION_WORDS}
    if len(set(own)) < len(own) or _RESERVED.intersection([*own, *value]):
        raise _not_a_key(key)
    if not known.issuperset(re.findall(r"[a-z]+", question)):
        raise _not_a_key(key)
    return schema, question


_QUESTION_WORDS = ("where", "over", "under", "is", "by", "desc", "first", "count", "per", *_FOLDS)


def _not_a_key(key: str) -> ValueError:
    return ValueError(f"not a key of the SQL family: {key!r}")


def _write(schema: _Schema, level: int, found: dict[str, str | None]) -> str:
    fold = _write_fold(found["fold"]) if found.get("fold") else ""
    if level == 4:
        having = f" having {fold}>{found['over']}" if found["over"] else ""
        return f"select {found['per']},{fold} from {schema.source} group by {found['per']}{having}"
    if level == 2:
        limit = f" limit {found['first']}" if found["first"] else ""
        return f"select {found['column']} from {schema.source} order by {found['by']}{found['desc'] or ''}{limit}"
    relation = {"over": ">", "under": "<"}.get(found["relation"] or "", "=")
    value = f"'{found['value']}'" if found["value"] else found["right"]
    return f"select {fold or found['column']} from {schema.source} where {found['left']}{relation}{value}"


def _write_fold(text: str | None) -> str:
    word, _, column = (text or "").partition(" ")
    return f"{word}({column or '*'})"


# Rows -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Rows:
    first: list[tuple[str, str, int]]
    second: list[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class _Tables:
    """Draws the rows of a task."""

    schema: _Schema
    values: Sequence[str]
    rng: random.Random

    def rows(self, num_rows: int, numbers: Sequence[int]) -> _Rows:
        """Return `num_rows` rows that contain `numbers`. Names and numbers are distinct, so every order is unique. Some
        names have no row to join."""
        rng = self.rng
        rest = [n for n in range(1, 100) if n not in numbers]
        mixed = rng.sample([*numbers, *rng.sample(rest, num_rows - len(numbers))], num_rows)
        names = rng.sample(NAMES, num_rows)
        first = [(name, rng.choice(self.values), n) for name, n in zip(names, mixed, strict=True)]
        num_joined = num_rows if num_rows > ROWS_SHOWN else 1
        return _Rows(first, [(name, rng.randint(1, 99)) for name in rng.choices(names, k=num_joined)])


def _shown(schema: _Schema, rows: _Rows) -> str:
    lines = [f"{schema.table}(name,{schema.category},{schema.number})", *(",".join(map(str, r)) for r in rows.first)]
    if schema.joined:
        lines += [f"{schema.joined}(name,{schema.cost})", *(",".join(map(str, r)) for r in rows.second)]
    return "\n".join(lines)


def _script(schema: _Schema, rows: _Rows) -> str:
    # repr of a str of letters is an SQL literal; every word here has passed the patterns above.
    lines = [f"create table {schema.table}(name text, {schema.category} text, {schema.number} integer);"]
    lines += [f"insert into {schema.table} values {row!r};" for row in rows.first]
    if schema.joined:
        lines.append(f"create table {schema.joined}(name text, {schema.cost} integer);")
        lines += [f"insert into {schema.joined} values {row!r};" for row in rows.second]
    return "\n".join(lines)


class SqlSource(GeneratedSource):
    """The prompt of a task shows the tables and the question. Levels: where, order, count, group, join."""

    name = "sql"
    hardest_level = LEVEL_MAX

    def make(self, rng: random.Random, level: int) -> str:
        return make_key(rng, level)

    def prompt(self, key: str) -> str:
        return _shown_task(key).prompt

    def demonstration(self, key: str) -> Demonstration:
        shown = _shown_task(key)
        return Demonstration((), _write(shown.schema, shown.level, shown.parts))


class SqlOracle(Oracle):
    """Resolves a key to the hidden databases, with the result of the exemplary query on each."""

    def resolve(self, rest: str) -> AnswerKey:
        try:
            task = sql_task(rest)
        except ValueError as err:
            raise UnknownOracle(f"oracle `sql`: {err}", oracle_ref=f"sql:{rest[:100]}") from None
        tests = [{"setup": script, "rows": _result(script, task.query)} for script in task.scripts]
        return AnswerKey(
            answers=(task.query,), tests={"kind": "sql", "ordered": task.ordered, "tests": tests, **JUDGING}
        )


def _result(script: str, query: str) -> list[list[Any]]:
    """Return the result of the exemplary query. Text of a model is never run here."""
    database = sqlite3.connect(":memory:")
    try:
        database.executescript(script)
        return [list(row) for row in database.execute(query)]
    finally:
        database.close()
