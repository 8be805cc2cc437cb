"""Comparing answers with expected ones. Runs in the service: the given side is hostile plain data, never an object with methods.

Values are what JSON has. Work is bounded by the expected side: the given one is followed only as far as it agrees.
"""

from __future__ import annotations

import json
import math
from typing import Any, Literal, NoReturn

from rollmesh.services.sandbox.oracle.verdict import Verdict

TextCompare = Literal["exact", "tokens", "numbers", "checker"]
ValueCompare = Literal["equal", "numbers", "checker"]


def strict_json(text: str | bytes) -> Any:
    """The value of a JSON text. ValueError for what JSON has not: NaN, Infinity, a key twice, depth or digits without end."""
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def same_value(expected: Any, given: Any, tolerance: float = 0.0) -> bool:
    """Whether two JSON values are equal; numbers within a tolerance, relative or absolute. A boolean is no number."""
    if isinstance(expected, bool) or isinstance(given, bool):
        return expected is given
    if isinstance(expected, (int, float)):
        return isinstance(given, (int, float)) and same_number(expected, given, tolerance)
    if type(expected) is not type(given):
        return False
    if isinstance(expected, list):
        return len(expected) == len(given) and all(
            same_value(ours, theirs, tolerance) for ours, theirs in zip(expected, given, strict=True)
        )
    if isinstance(expected, dict):
        return expected.keys() == given.keys() and all(
            same_value(ours, given[key], tolerance) for key, ours in expected.items()
        )
    return bool(expected == given)


def same_number(expected: float, given: float, tolerance: float) -> bool:
    """Equal, or within the tolerance times the larger of 1 and the expected magnitude."""
    if expected == given:
        return True
    try:
        return bool(tolerance) and abs(given - expected) <= tolerance * max(1.0, abs(expected))
    except OverflowError:
        return False


def compare_text(expected: str, given: str, how: TextCompare, tolerance: float) -> Verdict:
    """AC, PE or WA of a program's output."""
    if how == "numbers":
        return Verdict.AC if _same_tokens(expected.split(), given.split(), tolerance) else Verdict.WA
    same_tokens = expected.split() == given.split()
    if how == "tokens":
        return Verdict.AC if same_tokens else Verdict.WA
    if _lines(expected) == _lines(given):
        return Verdict.AC
    return Verdict.PE if same_tokens else Verdict.WA


def _lines(text: str) -> list[str]:
    """Without white space at the ends of lines and without empty lines at the end: nobody means those."""
    return "\n".join(line.rstrip() for line in text.split("\n")).rstrip("\n").split("\n")


def _same_tokens(expected: list[str], given: list[str], tolerance: float) -> bool:
    return len(expected) == len(given) and all(
        ours == theirs or _same_numeral(ours, theirs, tolerance) for ours, theirs in zip(expected, given, strict=True)
    )


def _same_numeral(expected: str, given: str, tolerance: float) -> bool:
    try:
        wanted, found = float(expected), float(given)
    except ValueError:
        return False
    return math.isfinite(wanted) and math.isfinite(found) and same_number(wanted, found, tolerance)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a key twice")
    return found
