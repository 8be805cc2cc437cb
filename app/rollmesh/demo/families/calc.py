"""The calc family: arithmetic expressions to work out with a calculator, one operation per call.

An expression of level L has L operators and L + 1 operands in 1..99. `*` may stand only as the first operator, so
working from left to right and operator precedence give the same answer. L operations need L dependent calls. Example of
level 3: `12*7-30+5`.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable
from functools import lru_cache

from rollmesh.services.data.generated import Demonstration, GeneratedOptions, GeneratedSource
from rollmesh.services.reward.item import AnswerKey
from rollmesh.services.reward.oracles import Oracle
from rollmesh.shared.errors import UnknownOracle

OPERAND_MAX = 99

_OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_EXPRESSION = re.compile(r"\d+(?:[-+*]\d+)*")
_TOKEN = re.compile(r"\d+|[-+*]")
_REFERENCE = re.compile(r"-?\d{1,9}(?:[-+*]\d{1,9}){0,64}")
_NODES: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


def make_expression(rng: random.Random, level: int) -> str:
    """Return an expression with `level` operators, drawn uniformly over operands and allowed operators."""
    parts = [str(rng.randint(1, OPERAND_MAX))]
    for index in range(level):
        parts.append(rng.choice("+-*" if index == 0 else "+-"))
        parts.append(str(rng.randint(1, OPERAND_MAX)))
    return "".join(parts)


def demonstrate(expression: str) -> Demonstration:
    """Return the ideal calls, from left to right, and the answer. Example: `12+7-3` has the calls (`12+7`, `19`) and
    (`19-3`, `16`).

    An intermediate result may be negative. The next call then begins with a minus sign, for example `-47+2`.
    Raise ValueError if the text is not an expression of this family.
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
        calls.append((f"{value}{symbol}{operand}", str(result)))
        value = result
    return Demonstration(tuple(calls), str(value))


class CalcOptions(GeneratedOptions):
    """Settings of the calc source. A level is a number of operators."""

    tools: tuple[str, ...] = ("calculator",)
    """Names of the tools of each task."""


class CalcSource(GeneratedSource):
    """Key and prompt of a task are the expression."""

    name = "calc"
    hardest_level = 32
    Options = CalcOptions

    def make(self, rng: random.Random, level: int) -> str:
        return make_expression(rng, level)

    def prompt(self, key: str) -> str:
        return key

    def demonstration(self, key: str) -> Demonstration:
        return demonstrate(key)


class CalcOracle(Oracle):
    """Computes integer expressions of `+`, `-` and `*` with Python's precedence."""

    def resolve(self, rest: str) -> AnswerKey:
        if not _REFERENCE.fullmatch(rest):
            raise UnknownOracle("oracle `calc`: not an arithmetic expression of + - *", oracle_ref=f"calc:{rest[:100]}")
        return _answer_to(rest)


@lru_cache(maxsize=1024)
def _answer_to(expression: str) -> AnswerKey:
    """Return the value. All episodes of a group ask for the same one."""
    text = re.sub(r"\b0+(?=\d)", "", expression)  # Python rejects leading zeros in literals
    return AnswerKey(answers=(str(_value(ast.parse(text, mode="eval").body)),))


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right):
            return _NODES[type(op)](_value(left), _value(right))
    raise AssertionError(f"the pattern admits no {type(node).__name__}")
