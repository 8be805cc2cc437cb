"""The calculator tool: one arithmetic operation per call; everything else returns `err`.

A task of L operators then needs L dependent calls, so this restriction makes the task multi-turn.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

REFUSED = "err"
_DIGITS_MAX = 18
"""Maximum digits of an operand, so that no result is expensive to print."""

_OPERATIONS: dict[type[ast.operator], Callable[[int | float, int | float], int | float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def call(text: str) -> str:
    """Return the value of `text`, an expression of integers with at most one operator; `err` for anything else."""
    if len(text) > 2 * _DIGITS_MAX + 8:
        return REFUSED
    try:
        return str(_value(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, MemoryError, RecursionError):
        return REFUSED


def _value(node: ast.expr) -> int | float:
    if not isinstance(node, ast.BinOp):
        return _operand(node)
    if type(node.op) not in _OPERATIONS:
        raise ValueError("operator not allowed")
    return _OPERATIONS[type(node.op)](_operand(node.left), _operand(node.right))


def _operand(node: ast.expr) -> int:
    """Return an integer, possibly negated: a sign is not an operation."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_operand(node.operand)
    if isinstance(node, ast.Constant) and type(node.value) is int and len(str(node.value)) <= _DIGITS_MAX:
        return node.value
    raise ValueError("not an integer")
