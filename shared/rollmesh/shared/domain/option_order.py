"""The order of the options of a made multiple-choice task, which its reference determines.

The data service writes the options in this order, and the reward service computes the letter of the answer. So neither
service sends the answer, and the reference contains no part of it. The reference itself is not in the task that an
agent gets.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from fractions import Fraction

NUM_OPTIONS_MAX = 10
"""Greatest number of options: the letters A to J, which the scorer `choice` reads."""
LETTERS = "ABCDEFGHIJ"
_LETTER = re.compile(r"\(?([A-Ja-j])[).:]?")

_WHOLE = r"[-+\u2212]?(?:\d{1,3}(?:,\d{3})+|\d{1,40})"
_DECIMAL = re.compile(rf"({_WHOLE}|[-+\u2212]?)(?:\.(\d{{1,40}}))?")
_FRACTION = re.compile(
    rf"({_WHOLE})\s?/\s?(\d{{1,40}})|([-+\u2212]?)\\[dt]?frac\s?\{{(\d{{1,40}})\}}\s?\{{(\d{{1,40}})\}}"
)

_OWN_LETTER = re.compile(r"^\s*\(?[A-J][).:]\s+(?=\S)")


def plain_options(options: Sequence[object]) -> tuple[str, ...]:
    """Return the options of a task file as texts, without letters of the file, if all of them begin with one."""
    texts = tuple(map(str, options))
    found = [_OWN_LETTER.match(text) for text in texts]
    return tuple(
        text[match.end() :] if match and all(found) else text for text, match in zip(texts, found, strict=True)
    )


def option_order(reference: str, num_options: int) -> tuple[int, ...]:
    """Return a random permutation of 0..n-1 that depends on nothing but the arguments. Position 0 of the options before
    the shuffle is the answer."""
    order = list(range(num_options))
    random.Random(f"options/{reference}/{num_options}").shuffle(order)
    return tuple(order)


def letter_of_answer(reference: str, num_options: int) -> str:
    """Return the letter of the answer of a task with that reference."""
    return LETTERS[option_order(reference, num_options).index(0)]


def option_value(text: str) -> str | Fraction:
    """Return what an option states: two options with equal values are the same. That is its number, for a decimal or a
    fraction such as `1,000`, `0.50` or `1/2`, otherwise its text without case and repeated space."""
    plain = " ".join(text.split()).casefold()
    number = plain.strip("$").strip().replace("\u2212", "-")
    if found := _FRACTION.fullmatch(number):
        above, below = found[1] or f"{found[3]}{found[4]}", int(found[2] or found[5])
        return Fraction(int(above.replace(",", "")), below) if below else plain
    found = _DECIMAL.fullmatch(number)
    if not found or not any(char.isdigit() for char in number):
        return plain
    return Fraction(f"{found[1].replace(',', '')}.{found[2] or 0}" if found[1] not in ("", "-", "+") else number)


def option_named(answer: str, options: Sequence[str]) -> int | None:
    """Return the index of the option that an answer of a task file names by its text or, if no option has this text, by
    its value (`option_value`) or else by its letter. None if it names no single option."""
    plain = [" ".join(option.split()).casefold() for option in options]
    for said in (answer, _OWN_LETTER.sub("", answer)):
        text = " ".join(said.split()).casefold()
        if text in plain:
            return plain.index(text) if plain.count(text) == 1 else None
        values, value = list(map(option_value, options)), option_value(said)
        if value in values:
            return values.index(value) if values.count(value) == 1 else None
    letter = _LETTER.fullmatch(text)
    place = LETTERS.index(letter[1].upper()) if letter else len(options)
    return place if place < len(options) else None
