"""The SQL family: exemplary queries run, hidden databases tell near misses apart, prompts show the schema and no answer."""

from __future__ import annotations

import random
import re
import sqlite3

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh.services.data.generated import generated_pool
from rollmesh.services.data.sql_source import SqlConfig
from rollmesh.services.data.task import Split
from rollmesh.shared.families.sql import LEVEL_MAX, NUM_DATABASES, SqlTask, make_key, sql_task

CONFIG = SqlConfig(num_train=200, num_validation=50, num_test=50)


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
        ("user(name,city,age): name where age over 30", "select name from user where age>30"),
        ("user(name,city,age): age where city is oslo", "select age from user where city='oslo'"),
        ("pet(name,kind,size): name by size desc, first 2", "select name from pet order by size desc limit 2"),
        ("pet(name,kind,size): count where size under 9", "select count(*) from pet where size<9"),
        ("film(name,city,price): max price per city", "select city,max(price) from film group by city"),
        (
            "film(name,city,price): sum price per city over 60",
            "select city,sum(price) from film group by city having sum(price)>60",
        ),
        (
            "user(name,city,age) pay(name,cost): cost where city is oslo",
            "select cost from user join pay using(name) where city='oslo'",
        ),
    ],
)
def test_exemplary_query_of_a_known_key_is_the_hand_made_one(key: str, query: str) -> None:
    assert sql_task(key).query == query


@pytest.mark.parametrize(
    ("key", "near_miss"),
    [
        ("user(name,city,age): name where age over 30", "select name from user where age>=30"),
        ("user(name,city,age): name where age over 30", "select name from user"),
        ("pet(name,kind,size): name by size desc, first 2", "select name from pet order by size limit 2"),
        ("pet(name,kind,size): name by size, first 3", "select name from pet limit 3"),
        ("film(name,city,price): max price per city", "select city,min(price) from film group by city"),
        ("film(name,city,price): max price per city", "select max(price),city from film group by city"),
        ("user(name,city,age) pay(name,cost): cost where city is oslo", "select cost from user,pay where city='oslo'"),
        ("user(name,city,age) pay(name,cost): sum cost per city", "select city,sum(cost) from user join pay group by city"),
    ],
)  # fmt: skip
def test_hidden_databases_reject_a_near_miss(key: str, near_miss: str) -> None:
    task = sql_task(key)
    assert answers(task, near_miss) != answers(task, task.query)


def test_answer_read_off_the_rows_shown_is_wrong() -> None:
    task = sql_task("user(name,city,age): name where age over 30")
    shown = [line.split(",") for line in task.prompt.split("\n")[1:-1]]
    names = [name for name, _, age in shown if int(age) > 30]
    literal = " union all ".join(f"select '{name}'" for name in names) or "select name from user where 0"
    assert answers(task, literal) != answers(task, task.query)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "user(name,city,age)",
        "user(name,city,age): ",
        "user(name,city,age): name where age over 30; drop table user",
        "user(name,city,age): password where age over 30",
        "master(name,city,age): name where age over 30",
        "user(name,city,age): name where city is atlantis",
    ],
)
def test_text_that_is_no_key_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        sql_task(text)


def test_pools_show_prompts_and_name_keys_of_their_range() -> None:
    for split in Split:
        pool = generated_pool(CONFIG, split)
        for task in (pool.task(n) for n in range(len(pool))):
            scheme, _, key = task.oracle_ref.partition(":")
            assert (scheme, CONFIG.split(key)) == ("sql", split)
            assert task.messages[0].content == sql_task(key).prompt
            assert task.labels["level"] == str(sql_task(key).level)
