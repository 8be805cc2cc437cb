"""The SQL family: exemplary queries run, hidden databases tell near misses apart, prompts show the schema and no
answer."""

from __future__ import annotations

import random
import re
import sqlite3

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh.demo.families.sql import LEVEL_MAX, NUM_DATABASES, SqlSource, SqlTask, make_key, sql_task
from rollmesh.services.data.generated import GeneratedOptions
from rollmesh.services.data.task import Split

from .pools import pool_of

CONFIG = GeneratedOptions(num_train=200, num_validation=50, num_test=50)


def answers(task: SqlTask, query: str) -> list[list[tuple[object, ...]]]:
    found = []
    for script in task.scripts:
        database = sqlite3.connect(":memory:")
        database.executescript(script)
        rows = database.execute(query).fetchall()
        found.append(rows if task.ordered else sorted(rows))
        database.close()
    return found


@settings(deadline=None)
@given(st.integers(0, 100_000), st.integers(1, LEVEL_MAX))
def test_exemplary_query_answers_on_every_hidden_database(seed: int, level: int) -> None:
    key = make_key(random.Random(seed), level)
    task = sql_task(key)
    assert task.level == level
    assert len(answers(task, task.query)) == NUM_DATABASES
    assert sql_task(key) == task
    assert task.query not in task.prompt
    assert task.prompt.endswith(key.partition(": ")[2])


@pytest.mark.parametrize(
    ("key", "query"),
    [
        ("dak(name,rup,mef): name where mef over 30", "select name from dak where mef>30"),
        ("dak(name,rup,mef): mef where rup is lok", "select mef from dak where rup='lok'"),
        ("dak(name,rup,mef): name by mef desc, first 2", "select name from dak order by mef desc limit 2"),
        ("dak(name,rup,mef): count where mef under 9", "select count(*) from dak where mef<9"),
        ("dak(name,rup,mef): max mef per rup", "select rup,max(mef) from dak group by rup"),
        (
            "dak(name,rup,mef): sum mef per rup over 60",
            "select rup,sum(mef) from dak group by rup having sum(mef)>60",
        ),
        (
            "dak(name,rup,mef) gos(name,pib): pib where rup is lok",
            "select pib from dak join gos using(name) where rup='lok'",
        ),
    ],
)
def test_exemplary_query_of_a_known_key_is_the_hand_made_one(key: str, query: str) -> None:
    assert sql_task(key).query == query


@pytest.mark.parametrize(
    ("key", "near_miss"),
    [
        ("dak(name,rup,mef): name where mef over 30", "select name from dak where mef>=30"),
        ("dak(name,rup,mef): name where mef over 30", "select name from dak"),
        ("dak(name,rup,mef): name by mef desc, first 2", "select name from dak order by mef limit 2"),
        ("dak(name,rup,mef): name by mef, first 3", "select name from dak limit 3"),
        ("dak(name,rup,mef): max mef per rup", "select rup,min(mef) from dak group by rup"),
        ("dak(name,rup,mef): max mef per rup", "select max(mef),rup from dak group by rup"),
        ("dak(name,rup,mef) gos(name,pib): pib where rup is lok", "select pib from dak,gos where rup='lok'"),
        ("dak(name,rup,mef) gos(name,pib): sum pib per rup", "select rup,sum(pib) from dak join gos group by rup"),
    ],
)  # fmt: skip
def test_hidden_databases_reject_a_near_miss(key: str, near_miss: str) -> None:
    task = sql_task(key)
    assert answers(task, near_miss) != answers(task, task.query)


def test_answer_read_off_the_rows_shown_is_wrong() -> None:
    task = sql_task("dak(name,rup,mef): name where mef over 30")
    shown = [line.split(",") for line in task.prompt.split("\n")[1:-1]]
    names = [name for name, _, mef in shown if int(mef) > 30]
    literal = " union all ".join(f"select '{name}'" for name in names) or "select name from dak where 0"
    assert answers(task, literal) != answers(task, task.query)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "dak(name,rup,mef)",
        "dak(name,rup,mef): ",
        "dak(name,rup,mef): name where mef over 30; drop table dak",
        "dak(name,rup,mef): password where mef over 30",
        "user(name,city,mef): name where mef over 30",
        "dak(name,rup,mef): name where rup is atlantis",
    ],
)
def test_text_that_is_not_a_key_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        sql_task(text)


def test_pools_show_prompts_and_name_keys_of_their_range() -> None:
    for split in Split:
        pool = pool_of(SqlSource, CONFIG, split)
        for task in (pool.task(n) for n in range(len(pool))):
            scheme, _, key = task.oracle_ref.partition(":")
            assert (scheme, SqlSource(options=CONFIG).split(key)) == ("sql", split)
            assert task.messages[0].content == sql_task(key).prompt
            assert task.labels["level"] == str(sql_task(key).level)
