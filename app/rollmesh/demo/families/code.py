"""The code family: write a Python function from a one-line specification.
The specification determines the task.

Each level is a kind of specification:
    1 chain     f(x): plus 12, times 3                  two steps of arithmetic, in that order
    2 branch    f(x): over 12 times 3, else minus 4     a condition
    3 loop      f(a): keep over 12, times 3, sum        a loop over a list; `times 3, keep over 12, count` maps first
    4 text      f(s): last 3, then "ab", upper          two or three steps on a string
    5 examples  f(0)=7, f(1)=10                         the straight line through two points

The specification determines the reference (Python closures, never evaluated text), the hidden tests (inputs drawn from
a hash of the specification, at and around its threshold, with outputs from the reference) and an exemplary solution.
Only the tests judge a solution, so every function that agrees with the reference is correct. The reward service alone
derives the tests.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollmesh.demo.families.judging import JUDGING
from rollmesh.services.data.generated import Demonstration, GeneratedSource
from rollmesh.services.reward.item import AnswerKey
from rollmesh.services.reward.oracles import Oracle
from rollmesh.shared.errors import UnknownOracle

NUM_TESTS = 8
ENTRY = "f"
"""Name of the function that a solution must define."""

_STEP = r"(?:plus|minus|times) \d{1,2}"
_CONDITION = r"(?:over|under) \d{1,2}"
_EDIT = r'(?:first \d|last \d|upper|lower|reverse|twice|then "[a-z]{2}")'
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class HiddenTest:
    """One hidden test: arguments of the call, and the value that it must return."""

    arguments: tuple[Any, ...]
    expected: Any


@dataclass(frozen=True, slots=True)
class CodeTask:
    """The task of a specification."""

    specification: str
    level: int
    solution: str
    """An exemplary solution: source text that defines `f`."""
    reference: Callable[[Any], Any]
    tests: tuple[HiddenTest, ...]


class Kind(Protocol):
    """The specifications of one level."""

    pattern: re.Pattern[str]

    def make(self, rng: random.Random) -> str:
        """Return a random specification."""

    def solution(self, found: re.Match[str]) -> str:
        """Return the source text of an exemplary solution. `found` is a match of `pattern`."""

    def reference(self, found: re.Match[str]) -> Callable[[Any], Any]:
        """Return the specified function."""

    def inputs(self, found: re.Match[str], rng: random.Random) -> list[Any]:
        """Return at least NUM_TESTS arguments, the most informative ones first."""


def make_specification(rng: random.Random, level: int) -> str:
    """Return a random specification of a level in [1, LEVEL_MAX]."""
    return KINDS[level - 1].make(rng)


def code_task(specification: str) -> CodeTask:
    """Return the task of a specification. Equal texts give equal tasks. Raise ValueError if the text is not a
    specification."""
    for level, kind in enumerate(KINDS, start=1):
        found = kind.pattern.fullmatch(specification)
        if found:
            reference = kind.reference(found)
            inputs = kind.inputs(found, random.Random(f"code/tests/{specification}"))[:NUM_TESTS]
            tests = tuple(HiddenTest((value,), reference(value)) for value in inputs)
            return CodeTask(specification, level, kind.solution(found), reference, tests)
    raise ValueError(f"not a specification of the code family: {specification!r}")


# Arithmetic -----------------------------------------------------------------------------------------------------------


def _make_step(rng: random.Random) -> str:
    word = rng.choice(("plus", "minus", "times"))
    return f"{word} {rng.randint(2, 9) if word == 'times' else rng.randint(1, 99)}"


def _make_condition(rng: random.Random) -> str:
    return f"{rng.choice(('over', 'under'))} {rng.randint(1, 99)}"


def _step(text: str, value: int) -> int:
    word, number = text.split()
    return {"plus": value + int(number), "minus": value - int(number), "times": value * int(number)}[word]


def _holds(text: str, value: int) -> bool:
    word, number = text.split()
    return value > int(number) if word == "over" else value < int(number)


def _before_step(text: str, value: int) -> int:
    """Return a number that the step maps to `value`, or next to it."""
    word, number = text.split()
    return {"plus": value - int(number), "minus": value + int(number), "times": value // int(number)}[word]


def _write_steps(steps: Sequence[str], start: str) -> str:
    written, is_sum = start, False
    for step in steps:
        word, number = step.split()
        if word == "times":
            written, is_sum = (f"({written})" if is_sum else written) + f"*{number}", False
        else:
            written, is_sum = written + ("+" if word == "plus" else "-") + number, True
    return written


def _write_condition(text: str, name: str) -> str:
    word, number = text.split()
    return f"{name}{'>' if word == 'over' else '<'}{number}"


def _around(threshold: int, rng: random.Random) -> list[int]:
    return [threshold, threshold + 1, threshold - 1, 2, *(rng.randint(-120, 120) for _ in range(NUM_TESTS))]


class TwoSteps:
    """Two steps of arithmetic."""

    pattern = re.compile(rf"f\(x\): ({_STEP}), ({_STEP})")

    def make(self, rng: random.Random) -> str:
        return f"f(x): {_make_step(rng)}, {_make_step(rng)}"

    def solution(self, found: re.Match[str]) -> str:
        return f"def f(x):return {_write_steps(found.groups(), 'x')}"

    def reference(self, found: re.Match[str]) -> Callable[[int], int]:
        first, second = found.groups()
        return lambda x: _step(second, _step(first, x))

    def inputs(self, found: re.Match[str], rng: random.Random) -> list[int]:
        return _around(0, rng)


class Branch:
    """One of two steps, by a condition."""

    pattern = re.compile(rf"f\(x\): ({_CONDITION}) ({_STEP}), else ({_STEP})")

    def make(self, rng: random.Random) -> str:
        return f"f(x): {_make_condition(rng)} {_make_step(rng)}, else {_make_step(rng)}"

    def solution(self, found: re.Match[str]) -> str:
        condition, yes, no = found.groups()
        yes, no = _write_steps([yes], "x"), _write_steps([no], "x")
        return f"def f(x):\n if {_write_condition(condition, 'x')}:return {yes}\n return {no}"

    def reference(self, found: re.Match[str]) -> Callable[[int], int]:
        condition, yes, no = found.groups()
        return lambda x: _step(yes if _holds(condition, x) else no, x)

    def inputs(self, found: re.Match[str], rng: random.Random) -> list[int]:
        return _around(int(found[1].split()[1]), rng)


class Loop:
    """A sum or count over a list, with a filter before or after the step."""

    pattern = re.compile(
        rf"f\(a\): (?:keep ({_CONDITION}), ({_STEP}), sum|({_STEP}), keep ({_CONDITION}), (sum|count))"
    )

    def make(self, rng: random.Random) -> str:
        keep, step = f"keep {_make_condition(rng)}", _make_step(rng)
        if rng.random() < 0.5:
            return f"f(a): {keep}, {step}, sum"
        return f"f(a): {step}, {keep}, {rng.choice(('sum', 'count'))}"

    def solution(self, found: re.Match[str]) -> str:
        before, step, step_first, after, fold = found.groups()
        head = "def f(a):\n s=0\n for x in a:\n"
        if before:
            body = f"  if {_write_condition(before, 'x')}:s+={_write_steps([step], 'x')}\n"
        else:
            added = "1" if fold == "count" else "x"
            body = f"  x={_write_steps([step_first], 'x')}\n  if {_write_condition(after, 'x')}:s+={added}\n"
        return head + body + " return s"

    def reference(self, found: re.Match[str]) -> Callable[[list[int]], int]:
        before, step, step_first, after, fold = found.groups()
        if before:
            return lambda a: sum(_step(step, x) for x in a if _holds(before, x))
        if fold == "count":
            return lambda a: sum(_holds(after, _step(step_first, x)) for x in a)
        return lambda a: sum(y for x in a if _holds(after, y := _step(step_first, x)))

    def inputs(self, found: re.Match[str], rng: random.Random) -> list[list[int]]:
        threshold = int((found[1] or found[4]).split()[1])
        edge = threshold if found[1] else _before_step(found[3], threshold)
        pool = _around(edge, rng) + [rng.randint(-120, 120) for _ in range(24)]
        return [pool[:3], [], *(rng.sample(pool, rng.randint(3, 8)) for _ in range(NUM_TESTS))]


# Text -----------------------------------------------------------------------------------------------------------------


def _make_edit(rng: random.Random) -> str:
    word = rng.choice(("first", "last", "upper", "lower", "reverse", "twice", "then", "then"))
    if word in ("first", "last"):
        return f"{word} {rng.randint(1, 9)}"
    return f'then "{rng.choice(_LETTERS)}{rng.choice(_LETTERS)}"' if word == "then" else word


def _edit(text: str, value: str) -> str:
    word, _, rest = text.partition(" ")
    match word:
        case "first":
            return value[: int(rest)]
        case "last":
            return value[-int(rest) :]
        case "then":
            return value + rest.strip('"')
        case "reverse":
            return value[::-1]
        case "twice":
            return value * 2
    return value.upper() if word == "upper" else value.lower()


def _write_edits(edits: Sequence[str]) -> str:
    written, loose = "s", False
    for edit in edits:
        word, _, rest = edit.partition(" ")
        inner = f"({written})" if loose else written
        match word:
            case "first":
                written = f"{inner}[:{rest}]"
            case "last":
                written = f"{inner}[-{rest}:]"
            case "then":
                written += f"+{rest}"
            case "reverse":
                written = f"{inner}[::-1]"
            case "twice":
                written = f"{inner}*2"
            case _:
                written = f"{inner}.{word}()"
        loose = word in ("then", "twice")
    return written


class Text:
    """Two or three steps on a string, one of them with an argument."""

    pattern = re.compile(rf"f\(s\): ({_EDIT}(?:, {_EDIT}){{1,2}})")

    def make(self, rng: random.Random) -> str:
        while True:
            edits = [_make_edit(rng) for _ in range(rng.randint(2, 3))]
            words = [edit.partition(" ")[0] for edit in edits]
            if len(set(words)) == len(words) and any(" " in edit for edit in edits):
                return f"f(s): {', '.join(edits)}"

    def solution(self, found: re.Match[str]) -> str:
        return f"def f(s):return {_write_edits(found[1].split(', '))}"

    def reference(self, found: re.Match[str]) -> Callable[[str], str]:
        edits = found[1].split(", ")

        def apply(s: str) -> str:
            for edit in edits:
                s = _edit(edit, s)
            return s

        return apply

    def inputs(self, found: re.Match[str], rng: random.Random) -> list[str]:
        words = ["".join(rng.choices(_LETTERS + _LETTERS.upper(), k=rng.randint(4, 12))) for _ in range(NUM_TESTS)]
        return ["aBcDeFgHiJkL", "", "Zy", *words]


# Examples -------------------------------------------------------------------------------------------------------------


class Examples:
    """The straight line through (0, b) and (1, a + b)."""

    pattern = re.compile(r"f\(0\)=(\d{1,3}), f\(1\)=(\d{1,3})")

    def make(self, rng: random.Random) -> str:
        slope, offset = rng.randint(2, 9), rng.randint(1, 299)
        return f"f(0)={offset}, f(1)={slope + offset}"

    def solution(self, found: re.Match[str]) -> str:
        slope, offset = self._line(found)
        return f"def f(x):return x*{slope}+{offset}"

    def reference(self, found: re.Match[str]) -> Callable[[int], int]:
        slope, offset = self._line(found)
        return lambda x: x * slope + offset

    def inputs(self, found: re.Match[str], rng: random.Random) -> list[int]:
        return [0, 1, 2, *(rng.randint(-120, 120) for _ in range(NUM_TESTS))]

    @staticmethod
    def _line(found: re.Match[str]) -> tuple[int, int]:
        return int(found[2]) - int(found[1]), int(found[1])


KINDS: tuple[Kind, ...] = (TwoSteps(), Branch(), Loop(), Text(), Examples())
"""Specifications by level."""

LEVEL_MAX = len(KINDS)


class CodeSource(GeneratedSource):
    """Key and prompt of a task are the specification."""

    name = "code"
    hardest_level = LEVEL_MAX

    def make(self, rng: random.Random, level: int) -> str:
        return make_specification(rng, level)

    def prompt(self, key: str) -> str:
        return key

    def demonstration(self, key: str) -> Demonstration:
        return Demonstration((), code_task(key).solution)


class CodeOracle(Oracle):
    """Resolves a specification to hidden tests of the function."""

    def resolve(self, rest: str) -> AnswerKey:
        try:
            task = code_task(rest)
        except ValueError as err:
            raise UnknownOracle(f"oracle `code`: {err}", oracle_ref=f"code:{rest[:100]}") from None
        tests = [{"arguments": list(test.arguments), "expected": test.expected} for test in task.tests]
        return AnswerKey(
            answers=(task.solution,), tests={"kind": "function", "function": ENTRY, "tests": tests, **JUDGING}
        )
