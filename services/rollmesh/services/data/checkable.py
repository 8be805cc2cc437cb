"""Which open answers the scorer `math` can compare by a rule: words, times of day and mathematical expressions.

The scorer parses an expression, and fails for a key that it cannot parse. It takes a word of 2 or 3 letters for a
product of variables, so that `act` would equal `cat`. This module is stricter than its parser, and imports none.
"""

from __future__ import annotations

import re

_WORDS = re.compile(r"[^\W\d_][^\W_]*(?:[ '-][^\W_]+)*")
_FUNCTION_WORD = re.compile(r"(?:sqrt|log|ln|(?:arc)?(?:sin|cos|tan|cot|sec|csc)|exp|pi|infty)(?![A-Za-z])")
_SHORT_WORDS = frozenset(("yes", "no"))
_CLOCK = re.compile(r"\d{1,2}:\d\d(?: ?[ap]\.?m\.?)?", re.IGNORECASE)
_QUANTITY = re.compile(r"([$€£]?-?\d[\d,]*(?:\.\d+)?|\d+/\d+)(?: ?%| [a-z]{4,})?")
_STYLE = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf)|mbox)\s?\{([^{}]*)\}")
_COMMAND = re.compile(
    r"\\(?:[dt]?frac|sqrt|pi|theta|alpha|beta|cdot|times|div|infty|pm|circ|leq?|geq?|cup|cap|in|left|right|ln|log|exp"
    r"|(?:arc)?(?:sin|cos|tan)|[()%$,;! ])(?![A-Za-z])"
)
_EXPRESSION = re.compile(r"[0-9A-Za-z+\-*/^_=<>|(){}\[\]!%$.,° −×÷·π√∞≤≥²³]+")
_NOT_IN_EXPRESSION = re.compile(
    r"[A-Za-z]{3}|[A-Z][A-Za-z]|[A-Za-z][A-Z]"  # a word or a chemical formula
    r"|[A-Za-z](?:\d|\s*\.)"
    r"|[+\-*/^_=<>|]\s*[*/^_=<>]|[+\-*/^_=<>,({\[]\s*$|^\s*[*/^_=<>,)}\]!]"  # an operator without its operand
    r"|([_^])(?:\w|\{[^{}]*\})\s*\1"
    r"|[,.]\s*[,.]|[({\[]\s*[)}\]]"
)

_HALF_FRACTION = re.compile(r"frac\s*(?:\{[^{}]*\}|\d)\s*$")


def is_checkable(answer: str) -> bool:
    """Return whether a rule can compare an answer of one line."""
    text = answer.strip().rstrip(" .,;")
    if styled := _STYLE.fullmatch(text):
        text = styled[1].strip()
    if _is_words(text) or _CLOCK.fullmatch(text) or _QUANTITY.fullmatch(text):
        return True
    plain = _FUNCTION_WORD.sub(" ", _COMMAND.sub(" ", _STYLE.sub("", text)))
    balanced = all(
        sum(map(plain.count, opened)) == sum(map(plain.count, closed)) for opened, closed in (("([", ")]"), ("{", "}"))
    )
    return (
        balanced
        and (len(text) == 1 or not text.isalpha())
        and not _HALF_FRACTION.search(text)
        and any(char.isalnum() for char in plain)
        and _EXPRESSION.fullmatch(plain) is not None
        and _NOT_IN_EXPRESSION.search(plain) is None
    )


def _is_words(text: str) -> bool:
    if not _WORDS.fullmatch(text):
        return False
    letters = re.sub(r"[ '-]", "", text)
    if letters.isalpha():
        return len(letters) >= 4 or text.lower() in _SHORT_WORDS
    return any(len(word) >= 4 and word.isalpha() and not _FUNCTION_WORD.match(word) for word in text.split())
