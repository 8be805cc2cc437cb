"""Task families of `python -m benchmarks methods`, for situations that the families of the demo do not have."""

from __future__ import annotations

import hashlib
import random
import re
from typing import ClassVar

from rollmesh.demo.families.calc import CalcOptions, CalcSource, demonstrate
from rollmesh.services.data.generated import Demonstration, GeneratedOptions, GeneratedSource
from rollmesh.services.reward.item import AnswerKey
from rollmesh.services.reward.oracles import Oracle
from rollmesh.services.rollout.agents.try_again import TryAgainOptions
from rollmesh.shared.config.settings import Share
from rollmesh.shared.errors import UnknownOracle

NUM_FILLERS = 3
"""Turns of a `late` task between the first and the last."""
NUMBERS_PER_LEVEL = 20
"""Numbers that a `count` task of level 1 writes; one of level n writes n times as many."""
COUNT_LEVEL_MAX = 4
HIDDEN = "?"
"""First character of a `guess` task whose answer cannot be known."""
ATTEMPTS_SHOWN = 2
"""Most attempts of a demonstration of `guess` before the last one."""
_GUESS = re.compile(r"[?]?[1-9]{4}")
_DIGITS = re.compile(r"[1-9]{4}")
_RANGE = re.compile(r"([1-9]\d\d) ([1-9]\d\d)")
_LEADING_MINUS = re.compile(r"(\d+)-(\d+)(.*)")


class LateSource(GeneratedSource):
    """A reward after the last turn that the first turn decides. Key and prompt are four different digits.

    The first call is the largest digit, and the calculator echoes it. Three calls of 1 or 2 follow, which do not
    matter; their demonstrations are a hash of the key, so that the model learns to draw them. The answer is 0.
    """

    name = "late"
    hardest_level = 1
    Options: ClassVar[type[GeneratedOptions]] = CalcOptions

    def make(self, rng: random.Random, level: int) -> str:
        return "".join(rng.sample("123456789", 4))

    def prompt(self, key: str) -> str:
        return key

    def demonstration(self, key: str) -> Demonstration:
        fillers = [str(1 + byte % 2) for byte in _digest(key)[:NUM_FILLERS]]
        return Demonstration(tuple((call, call) for call in (max(key), *fillers)), "0")


class LateOracle(Oracle):
    """The accepted answer is the right first call."""

    def resolve(self, rest: str) -> AnswerKey:
        if not _DIGITS.fullmatch(rest):
            raise UnknownOracle(f"oracle `late` must get four digits from 1 to 9, got {rest!r}", oracle_ref=rest)
        return AnswerKey(answers=(max(rest),))


class GuessSource(GeneratedSource):
    """Answers of one turn, and several attempts. Key and prompt are four different digits. At level 1 the answer is the
    largest. At level 2 a question mark is before the digits, and the answer is one of them by a hash of the key.

    A demonstration has up to two earlier attempts, which are any of the digits by a hash of the key. They are between
    the marks of a call, because demonstrations have no other turns before the last one, and each observes the feedback
    of the agent `try_again`.
    """

    name = "guess"
    hardest_level = 2

    def make(self, rng: random.Random, level: int) -> str:
        return HIDDEN * (level - 1) + "".join(rng.sample("123456789", 4))

    def prompt(self, key: str) -> str:
        return key

    def demonstration(self, key: str) -> Demonstration:
        digits, (_, num, *drawn) = key.removeprefix(HIDDEN), _digest(key)
        attempts = [digits[byte % len(digits)] for byte in drawn[: num % (ATTEMPTS_SHOWN + 1)]]
        return Demonstration(tuple((digit, TryAgainOptions().feedback) for digit in attempts), _guessed(key))


class GuessOracle(Oracle):
    """The accepted answer is the largest or the hidden digit."""

    def resolve(self, rest: str) -> AnswerKey:
        if not _GUESS.fullmatch(rest):
            raise UnknownOracle(
                f"oracle `guess` must get four digits from 1 to 9, or these after a question mark, got {rest!r}",
                oracle_ref=rest,
            )
        return AnswerKey(answers=(_guessed(rest),))


class CountSource(GeneratedSource):
    """Long answers. Key and prompt are the first and the last of the numbers to write, for example `123 142`."""

    name = "count"
    hardest_level = COUNT_LEVEL_MAX

    def make(self, rng: random.Random, level: int) -> str:
        number = NUMBERS_PER_LEVEL * level
        first = rng.randint(100, 1000 - number)
        return f"{first} {first + number - 1}"

    def prompt(self, key: str) -> str:
        return key

    def demonstration(self, key: str) -> Demonstration:
        return Demonstration((), _counted(key))


class CountOracle(Oracle):
    """The accepted answer is all numbers of the range, separated by spaces."""

    def resolve(self, rest: str) -> AnswerKey:
        if not _RANGE.fullmatch(rest):
            raise UnknownOracle(f"oracle `count` must get two numbers of three digits, got {rest!r}", oracle_ref=rest)
        return AnswerKey(answers=(_counted(rest),))


class ConfidentOptions(CalcOptions):
    """Settings of the source of confident errors."""

    swapped_share: Share = 0.9
    """Share of the leading subtractions whose demonstration swaps the operands."""


class ConfidentSource(CalcSource):
    """Demonstrations of an initial policy that is confidently wrong: most that begin with a subtraction swap its
    operands, for example `7-12` for `12-7+3`. The rest of the episode follows from the wrong result."""

    Options: ClassVar[type[CalcOptions]] = ConfidentOptions
    options: ConfidentOptions

    def demonstration(self, key: str) -> Demonstration:
        parts = _LEADING_MINUS.fullmatch(key)
        if parts is None or _digest(key)[0] / 256 >= self.options.swapped_share:
            return demonstrate(key)
        return demonstrate(f"{parts[2]}-{parts[1]}{parts[3]}")


def _guessed(key: str) -> str:
    digits = key.removeprefix(HIDDEN)
    return max(digits) if digits == key else digits[_digest(key)[0] % len(digits)]


def _counted(key: str) -> str:
    first, last = map(int, key.split(" "))
    return " ".join(str(number) for number in range(first, last + 1))


def _digest(key: str) -> bytes:
    return hashlib.sha256(f"demonstration of {key}".encode()).digest()
