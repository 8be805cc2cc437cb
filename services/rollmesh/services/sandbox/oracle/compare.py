"""Compare answers with expected ones. Runs in the service: the given side is hostile plain data, never an object with
methods.

Values are JSON values. The CPU time is linear in the length of both sides, so `output_bytes` limits it. Long answers
are compared in a thread (`off_loop`), because 64 KB take up to 40 ms, in which no other session would be served.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Literal, NoReturn, TypeVar

from rollmesh.services.sandbox.oracle.verdict import JudgeVerdict

T = TypeVar("T")
TextCompare = Literal["exact", "lines", "tokens", "numbers", "checker"]
ValueCompare = Literal["equal", "numbers", "checker"]

_WHITE_SPACE = " \t\n\r\v\f"
"""Characters that separate words and may end a line. Every other character, for example a no-break space, is part of
the answer."""
_WORD = re.compile(f"[^{_WHITE_SPACE}]+")
_INTEGER = re.compile("[+-]?[0-9]+")
_NUMERAL = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
_INLINE_CHARS_MAX = 4096
"""Maximum length of an answer that is compared in the event loop, which takes at most 4 ms."""


async def off_loop(length: int, compare: Callable[[], T]) -> T:
    """Return the result of `compare` for an answer of `length` characters, from a thread if the answer is long."""
    return compare() if length <= _INLINE_CHARS_MAX else await asyncio.to_thread(compare)


def strict_json(text: str | bytes) -> Any:
    """Decode a JSON text. Raises ValueError for extensions of JSON: NaN, Infinity, numbers outside the range of floats,
    duplicate keys, excessive depth or digits."""
    try:
        return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def same_value(expected: Any, given: Any, tolerance: float = 0.0) -> bool:
    """Return whether two JSON values are equal; numbers within a relative or absolute tolerance. A boolean is not a
    number."""
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
    """Return whether two numbers are equal, or differ by at most the tolerance times the larger of 1 and the expected
    magnitude. Two integers must be equal."""
    if expected == given or (isinstance(expected, int) and isinstance(given, int)):
        return expected == given
    try:
        return bool(tolerance) and abs(given - expected) <= tolerance * max(1.0, abs(expected))
    except OverflowError:
        return False


def compare_text(expected: str, given: str, how: TextCompare, tolerance: float) -> JudgeVerdict:
    """Return AC, PE or WA for the output of a program."""
    if how == "lines":
        return JudgeVerdict.AC if _same_lines(expected, given) else JudgeVerdict.WA
    ours, theirs = _WORD.findall(expected), _WORD.findall(given)
    if how == "numbers":
        return JudgeVerdict.AC if _same_words(ours, theirs, tolerance) else JudgeVerdict.WA
    if how == "tokens":
        return JudgeVerdict.AC if ours == theirs else JudgeVerdict.WA
    if _lines(expected) == _lines(given):
        return JudgeVerdict.AC
    return JudgeVerdict.PE if ours == theirs else JudgeVerdict.WA


def _lines(text: str) -> list[str]:
    """Split into lines without trailing white space, and without empty lines at the end of the text."""
    return "\n".join(line.rstrip(_WHITE_SPACE) for line in text.split("\n")).rstrip("\n").split("\n")


def _same_lines(expected: str, given: str) -> bool:
    """Compare the words of each line, numerals by value, without blank lines at both ends."""
    ours, theirs = expected.strip(_WHITE_SPACE).split("\n"), given.strip(_WHITE_SPACE).split("\n")
    return len(ours) == len(theirs) and all(
        _same_words(_WORD.findall(one), _WORD.findall(other), 0.0) for one, other in zip(ours, theirs, strict=True)
    )


def _same_words(expected: list[str], given: list[str], tolerance: float) -> bool:
    return len(expected) == len(given) and all(
        ours == theirs or _same_numeral(ours, theirs, tolerance) for ours, theirs in zip(expected, given, strict=True)
    )


def _same_numeral(expected: str, given: str, tolerance: float) -> bool:
    """Return whether two words are ASCII numerals with the same value, or, unless both are integers, within the
    tolerance."""
    if not (_NUMERAL.fullmatch(expected) and _NUMERAL.fullmatch(given)):
        return False
    try:
        wanted, found = Decimal(expected), Decimal(given)
    except ArithmeticError:  # an exponent of more than 18 digits
        return False
    if wanted == found or (_INTEGER.fullmatch(expected) and _INTEGER.fullmatch(given)):
        return wanted == found
    return tolerance > 0 and math.isfinite(float(wanted)) and same_number(float(wanted), float(found), tolerance)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large for a number")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a duplicate key")
    return found
