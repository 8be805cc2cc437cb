"""The page of the catalog is current, and what recipes claim is asserted by a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmesh.trainer.recipe import About, find_recipe, read_recipe, recipe_names
from tools.coverage import Mark, disagreements, marks_in, page, rows, rows_of

ROOT = Path(__file__).parents[1]
CATALOG = {"S001": "One", "S002": "Two", "S003": "Three"}
SOURCE = """
@pytest.mark.row("S001")
def test_one(): ...

@pytest.mark.parametrize("a", [pytest.param(1, marks=pytest.mark.row("S002"))])
@pytest.mark.row("S001", missing="the rest")
async def test_two(): ...

def test_three(): ...
"""


def test_the_page_is_current_and_no_recipe_claims_what_no_test_asserts() -> None:
    found = rows()
    written = (ROOT / "docs/reference/coverage.md").read_text(encoding="utf-8")
    assert written == page(found), "run: python -m tools.coverage docs"
    assert not disagreements(found, {name: read_recipe(find_recipe(name))[0] for name in recipe_names()})


def test_every_built_in_recipe_states_its_status() -> None:
    assert not [name for name in recipe_names() if not read_recipe(find_recipe(name))[0].status]


def test_marks_are_read_with_their_tests() -> None:
    assert marks_in(SOURCE, "t.py") == [
        Mark("S001", "t.py::test_one"),
        Mark("S001", "t.py::test_two", "the rest"),
        Mark("S002", "t.py::test_two"),
    ]


def test_the_status_follows_from_marks_and_recipes() -> None:
    partial = About(seeds=("S002",), status="partial", missing="half")
    works = About(seeds=("S001",), status="works")
    marks = [Mark("S002", "t.py::a"), Mark("S003", "t.py::b", "the rest")]
    one, two, three = rows_of(CATALOG, {"grpo": works, "gdpo": partial}, marks)
    assert (one.status, two.status, three.status) == ("partial", "partial", "partial")
    assert (two.missing, three.missing, three.partial_test) == ("half", "the rest", ("t.py::b",))
    assert disagreements([one, two, three], {"grpo": works, "gdpo": partial}) == [
        "the recipe grpo says `works`, and no test is marked with row('S001')"
    ]
    one, *_ = rows_of(CATALOG, {"grpo": works}, [Mark("S001", "t.py::a")])
    assert (one.status, one.test) == ("works", ("t.py::a",))
    assert [row.status for row in rows_of(CATALOG, {}, [Mark("S003", "t.py::b")])] == ["missing", "missing", "works"]


def test_an_unknown_row_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"t\.py::a names the row S999"):
        rows_of(CATALOG, {}, [Mark("S999", "t.py::a")])
