"""Arithmetic expressions of the calculator task: how they are made, worked out and demonstrated.

An expression of level L has L operators and L + 1 operands in 1..99. `*` may stand only as the first operator, so working
from left to right and operator precedence give the same answer, and a calculator that does one operation per call needs L
dependent calls. Example of level 3: `12*7-30+5`.
"""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

OPERAND_MAX = 99

_OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_EXPRESSION = re.compile(r"\d+(?:[-+*]\d+)*")
_TOKEN = re.compile(r"\d+|[-+*]")


@dataclass(frozen=True, slots=True)
class CalculatorCall:
    """One operation, as the agent writes it and as the calculator answers it, e.g. (`84-30`, `54`)."""

    expression: str
    result: str


@dataclass(frozen=True, slots=True)
class Demonstration:
    """How to solve an expression: the calls in order, then the answer."""

    prompt: str
    calls: tuple[CalculatorCall, ...]
    answer: str


def make_expression(rng: random.Random, level: int) -> str:
    """An expression with `level` operators, drawn uniformly over operands and allowed operators."""
    parts = [str(rng.randint(1, OPERAND_MAX))]
    for index in range(level):
        parts.append(rng.choice("+-*" if index == 0 else "+-"))
        parts.append(str(rng.randint(1, OPERAND_MAX)))
    return "".join(parts)


def demonstration(expression: str) -> Demonstration:
    """The calls and the answer an ideal agent gives, working from left to right.

    An intermediate result may be negative: the next call then begins with a minus sign, e.g. `-47+2`.
    Raises ValueError for text that is not an expression of this task (see the module's definition).
    """
    if not _EXPRESSION.fullmatch(expression):
        raise ValueError(f"not a calculator expression: {expression!r}")
    tokens = _TOKEN.findall(expression)
    if "*" in tokens[3:]:
        raise ValueError(f"`*` may stand only as the first operator: {expression!r}")
    value = int(tokens[0])
    calls = []
    for symbol, operand in zip(tokens[1::2], tokens[2::2], strict=True):
        result = _OPERATIONS[symbol](value, int(operand))
        calls.append(CalculatorCall(f"{value}{symbol}{operand}", str(result)))
        value = result
    return Demonstration(expression, tuple(calls), str(value))
