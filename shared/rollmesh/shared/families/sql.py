"""The SQL family: answer a question about small tables with one query. Everything follows from the key, e.g.

    user(name,city,age): name where age over 30

Levels, each a kind of question:
    1 where   name where age over 30                  2 order   name by age desc, first 2
    3 count   sum age where city is oslo              4 group   sum age per city over 60
    5 join    cost where city is oslo                 two tables that share `name`

The model is shown the tables with a few rows, then the question. Hidden are the exemplary query and three other databases of that
schema, with rows at and around the question's number: a query that is only right on the rows shown is wrong. A query is judged by
its result alone (Zhong et al. 2020, distilled test suites).

Collaborators: the data service shows prompts, the reward service works out what the exemplary query answers.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

NUM_DATABASES = 3
ROWS_SHOWN = 2
ROWS_HIDDEN = 12
LEVEL_MAX = 5

TABLES = ("user", "pet", "film", "shop", "team", "book", "car", "boat")
JOINED = ("pay", "visit", "loan", "call")
NAMES = ("amy", "bob", "cid", "dan", "eve", "fay", "gus", "hal", "ida", "joe", "kim", "lea", "max", "ned", "oda", "pam")
CATEGORIES = {
    "city": ("oslo", "rome", "lima", "bonn", "kyiv"),
    "color": ("red", "blue", "pink", "gray", "teal"),
    "kind": ("old", "new", "big", "tiny", "slow"),
}
NUMBERS = ("age", "price", "size", "score")
JOINED_NUMBERS = ("cost", "days", "hours")
_FOLDS = ("sum", "max", "min")

_KEY = re.compile(
    r"(?P<table>[a-z]+)\(name,(?P<category>[a-z]+),(?P<number>[a-z]+)\)"
    r"(?: (?P<joined>[a-z]+)\(name,(?P<cost>[a-z]+)\))?: (?P<question>.+)"
)
_CONDITION = r"where (?P<left>[a-z]+) (?P<relation>over|under|is) (?P<right>[a-z]+|\d{1,2})"
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
    """What follows from a key."""

    key: str
    level: int
    prompt: str
    query: str
    """An exemplary answer."""
    ordered: bool
    """Whether the order of the result's rows counts."""
    scripts: tuple[str, ...]
    """SQL that makes each hidden database."""


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
    """The key of a task of that level, 1 ... LEVEL_MAX."""
    schema = _Schema(rng.choice(TABLES), rng.choice(list(CATEGORIES)), rng.choice(NUMBERS))
    if level == LEVEL_MAX:
        joined = _Schema(schema.table, schema.category, schema.number, rng.choice(JOINED), rng.choice(JOINED_NUMBERS))
        return f"{joined}: {_make_joined_question(rng, joined)}"
    makers = (_make_where, _make_order, _make_count, _make_group)
    return f"{schema}: {makers[level - 1](rng, schema)}"


def sql_task(key: str) -> SqlTask:
    """The task behind a key; equal keys give equal tasks. ValueError for a text that is none."""
    schema, question = _parse(key)
    for level, pattern in enumerate(_QUESTIONS, start=1):
        if found := pattern.fullmatch(question):
            query, ordered = _write(schema, level, found.groupdict()), level == 2
            break
    else:
        raise _not_a_key(key)
    rng = random.Random(f"sql/tables/{key}")
    edge = next((int(digits) for digits in re.findall(r"(?:over|under) (\d+)", question)), _make_edge(rng))
    around = (edge - 1, edge, edge + 1)
    prompt = f"{_shown(schema, _rows(schema, rng, ROWS_SHOWN, ()))}\n{question}"
    scripts = tuple(_script(schema, _rows(schema, rng, ROWS_HIDDEN, around)) for _ in range(NUM_DATABASES))
    return SqlTask(key, LEVEL_MAX if schema.joined else level, prompt, query, ordered, scripts)


# Questions ------------------------------------------------------------------------------------------------------------


def _make_edge(rng: random.Random) -> int:
    return rng.randrange(10, 100, 10)


def _make_condition(rng: random.Random, schema: _Schema) -> str:
    if rng.random() < 0.5:
        return f"where {schema.category} is {rng.choice(CATEGORIES[schema.category])}"
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
    known = schema.table in TABLES and schema.category in CATEGORIES and schema.number in NUMBERS
    joins = (schema.joined in JOINED and schema.cost in JOINED_NUMBERS) if schema.joined else True
    words = {"name", schema.category, schema.number, schema.cost, *CATEGORIES.get(schema.category, ()), *_WORDS}
    if not (known and joins and words.issuperset(re.findall(r"[a-z]+", question))):
        raise _not_a_key(key)
    return schema, question


_WORDS = ("where", "over", "under", "is", "by", "desc", "first", "count", "per", *_FOLDS)


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
    operator = {"over": ">", "under": "<", "is": "="}[found["relation"] or ""]
    value = f"'{found['right']}'" if found["relation"] == "is" else found["right"]
    return f"select {fold or found['column']} from {schema.source} where {found['left']}{operator}{value}"


def _write_fold(text: str | None) -> str:
    word, _, column = (text or "").partition(" ")
    return f"{word}({column or '*'})"


# Rows -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Rows:
    first: list[tuple[str, str, int]]
    second: list[tuple[str, int]]


def _rows(schema: _Schema, rng: random.Random, num_rows: int, numbers: Sequence[int]) -> _Rows:
    """`numbers` are among those of the rows. Names and numbers are distinct, so that an order is never a matter of taste; some names
    have no row to join."""
    numbers = list(numbers)
    numbers += rng.sample([n for n in range(1, 100) if n not in numbers], num_rows - len(numbers))
    rng.shuffle(numbers)
    names = rng.sample(NAMES, num_rows)
    first = [(name, rng.choice(CATEGORIES[schema.category]), n) for name, n in zip(names, numbers, strict=True)]
    second = [(name, rng.randint(1, 99)) for name in rng.choices(names, k=num_rows if num_rows > ROWS_SHOWN else 1)]
    return _Rows(first, second)


def _shown(schema: _Schema, rows: _Rows) -> str:
    lines = [f"{schema.table}(name,{schema.category},{schema.number})", *(",".join(map(str, r)) for r in rows.first)]
    if schema.joined:
        lines += [f"{schema.joined}(name,{schema.cost})", *(",".join(map(str, r)) for r in rows.second)]
    return "\n".join(lines)


def _script(schema: _Schema, rows: _Rows) -> str:
    # repr of a str of letters is an SQL literal; every word here is from the lists above.
    lines = [f"create table {schema.table}(name text, {schema.category} text, {schema.number} integer);"]
    lines += [f"insert into {schema.table} values {row!r};" for row in rows.first]
    if schema.joined:
        lines.append(f"create table {schema.joined}(name text, {schema.cost} integer);")
        lines += [f"insert into {schema.joined} values {row!r};" for row in rows.second]
    return "\n".join(lines)
