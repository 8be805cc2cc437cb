"""The code family: exemplary solutions pass the hidden tests, the tests tell near misses apart, prompts hold all there
is."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh.demo.families.code import LEVEL_MAX, NUM_TESTS, CodeSource, CodeTask, code_task, make_specification
from rollmesh.services.data.generated import GeneratedOptions
from rollmesh.services.data.task import Split, split_of

from .pools import pool_of

CONFIG = GeneratedOptions(num_train=200, num_validation=50, num_test=50)


def accepted(task: CodeTask, source: str) -> bool:
    """Return whether a source text of this test passes the tests of the task."""
    names: dict[str, Any] = {}
    exec(source, names)  # noqa: S102 - our own text
    return all(names["f"](*test.arguments) == test.expected for test in task.tests)


@settings(deadline=None)
@given(st.integers(0, 100_000), st.integers(1, LEVEL_MAX))
def test_exemplary_solution_passes_every_hidden_test(seed: int, level: int) -> None:
    specification = make_specification(random.Random(seed), level)
    task = code_task(specification)
    assert task.level == level
    assert len(task.tests) == NUM_TESTS
    assert accepted(task, task.solution)
    assert code_task(specification).tests == task.tests
    assert json.loads(json.dumps([test.expected for test in task.tests])) == [test.expected for test in task.tests]


@pytest.mark.parametrize(
    ("specification", "solution"),
    [
        ("f(x): plus 12, times 3", "def f(x):return (x+12)*3"),
        ("f(x): times 3, minus 12", "def f(x):return x*3-12"),
        ("f(x): over 12 times 3, else minus 4", "def f(x):\n if x>12:return x*3\n return x-4"),
        ("f(a): keep under 5, plus 1, sum", "def f(a):\n s=0\n for x in a:\n  if x<5:s+=x+1\n return s"),
        ("f(a): times 2, keep over 5, count", "def f(a):\n s=0\n for x in a:\n  x=x*2\n  if x>5:s+=1\n return s"),
        ('f(s): last 3, then "ab", upper', 'def f(s):return (s[-3:]+"ab").upper()'),
        ("f(s): twice, first 4", "def f(s):return (s*2)[:4]"),
        ("f(0)=7, f(1)=10", "def f(x):return x*3+7"),
    ],
)
def test_exemplary_solution_of_a_known_specification_is_the_hand_made_one(specification: str, solution: str) -> None:
    assert code_task(specification).solution == solution


@pytest.mark.parametrize(
    ("specification", "near_miss"),
    [
        ("f(x): plus 12, times 3", "def f(x):return x+12*3"),
        ("f(x): over 12 times 3, else minus 4", "def f(x):\n if x>=12:return x*3\n return x-4"),
        ("f(x): over 12 times 3, else minus 4", "def f(x):return x*3"),
        ("f(a): keep over 12, times 3, sum", "def f(a):\n s=0\n for x in a:\n  if x>11:s+=x*3\n return s"),
        ("f(a): keep over 12, times 3, sum", "def f(a):\n s=0\n for x in a:\n  if x>12:s=x*3\n return s"),
        ("f(a): times 5, keep over 42, count", "def f(a):\n s=0\n for x in a:\n  x=x*5\n  if x>45:s+=1\n return s"),
        ('f(s): last 3, then "ab", upper', 'def f(s):return s[-3:]+"ab".upper()'),
        ("f(s): reverse, first 2", "def f(s):return s[:2][::-1]"),
        ("f(0)=7, f(1)=10", "def f(x):return x*10+7"),
    ],
)
def test_hidden_tests_reject_a_near_miss(specification: str, near_miss: str) -> None:
    assert not accepted(code_task(specification), near_miss)


def test_another_way_to_write_the_same_function_is_right() -> None:
    task = code_task("f(a): keep over 12, times 3, sum")
    assert accepted(task, "def f(a):\n return 3*sum(x for x in a if x>=13)")


@pytest.mark.parametrize(
    "text", ["", "f(x): plus 1", "f(x): plus 1, plus __import__('os')", "f(x): over 1 plus 2", "12+3"]
)
def test_text_that_is_no_specification_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        code_task(text)


def test_pools_hold_prompts_of_their_range_and_references_to_the_tests() -> None:
    for split in Split:
        pool = pool_of(CodeSource, CONFIG, split)
        for task in (pool.task(n) for n in range(len(pool))):
            prompt = task.messages[0].content
            assert split_of(prompt, validation_share=0.1, test_share=0.1) is split
            assert task.oracle_ref == f"code:{prompt}"
            assert task.labels["level"] == str(code_task(prompt).level)
            assert task.tools == ()
