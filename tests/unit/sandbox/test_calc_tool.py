"""The calculator tool: one operation per call."""

from __future__ import annotations

import pytest

from rollmesh.sandbox_runtime.tools import calc


@pytest.mark.parametrize(
    ("text", "value"),
    [("17+3", "20"), ("17 - 30", "-13"), ("9*9", "81"), ("-4+2", "-2"), ("4--2", "6"), ("7", "7"), (" 8 / 2 ", "4.0"),
     ("7//2", "3"), ("7%4", "3")],
)  # fmt: skip
def test_calculator_does_one_operation(text: str, value: str) -> None:
    assert calc.call(text) == value


@pytest.mark.parametrize(
    "text",
    ["1+2+3", "(1+2)*3", "", "1+", "x+1", "1/0", "2**9", "__import__('os')", "1.5+1", "True+1", "'a'*9", "1<2", "1 if 1 else 2",
     "9" * 19, "1" * 18 + "*" + "1" * 18 + "+1", "(" * 30 + "1" + ")" * 30, "1;2", "1\n2", "[1][0]", "\0"],
)  # fmt: skip
def test_calculator_refuses_everything_else(text: str) -> None:
    assert calc.call(text) == "err"
