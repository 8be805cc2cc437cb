r"""Find the answer in a text, and rewrite it in the LaTeX that math-verify parses. Pure; does not import math-verify.

A text is read as a whole. Models and data sets write LaTeX with and without dollar signs, and plain text such as
`3*sqrt(2)`. A part of an answer is never its value: the first number of `3\sqrt{2}` is not the answer, and `8, 7` is
not 7.
"""

from __future__ import annotations

import re

_UNICODE = str.maketrans(
    {
        "\u2212": "-", "\u2013": "-", "\u00d7": r"\times ",
        "\u00f7": "/", "\u00b7": r"\cdot ", "\u22c5": r"\cdot ", "\u03c0": r"\pi ",
        "\u221a": r"\sqrt ", "\u221e": r"\infty ", "\u2264": r"\le ",
        "\u2265": r"\ge ", "\u2260": r"\ne ", "\u00b0": r"^\circ ",
        "\u222a": r"\cup ", "\u2229": r"\cap ", "\u2208": r"\in ",
        "\u00b1": r"\pm ", "\u00b2": "^2", "\u00b3": "^3", "\u00a0": " ",
        "\u2205": r"\emptyset ",
    }
)  # fmt: skip
_DELIMITERS = re.compile(r"\\\$|\$|\\[()]|\\\[(?!\d*pt)|\\\]")
_SPACES = re.compile(r"(?<!\\)\\[,;: ]|\\q?quad(?![a-z])|~")
_STYLES = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it)|mbox)\s?\{([^{}]*)\}")
_ANSWER_IS = re.compile(r"\banswer(?:\s?is:?|\s?[:=])", re.IGNORECASE)
_APPROXIMATE = re.compile(r"(?:=|\\approx(?![a-z])|\u2248)\s*")
_SENTENCE_END = re.compile(r"\.\s|\n")
_CHOICE_KEY = re.compile(r"\(?([A-J])\)?[.:]?")
_CHOICE = re.compile(r"(?:(?:option|choice|letter)\s)?[(\[]?([a-jA-J])[)\].:]{0,3}", re.IGNORECASE)
_CLOCK = re.compile(r"(\d{1,2}:\d\d)(?:\s?([ap])\.?m\.?)?", re.IGNORECASE)
_BASED = re.compile(r"([0-9A-Fa-f]+)_\{?(\d+)\}?")
_WORD = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{2,}")
_COMMAND = re.compile(r"\\(?:begin|end)\{[A-Za-z]+\}|\\[A-Za-z]+")
_FUNCTION = re.compile(
    r"(?<![A-Za-z\\])(sqrt|log|ln|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|exp|pi|infty)(?![A-Za-z])"
)
_INFINITY = re.compile(r"(?<![A-Za-z\\])infinity(?![A-Za-z])", re.IGNORECASE)
_ROOT = re.compile(r"\\sqrt\s?\(([^()]*)\)")
_EXPONENT = re.compile(r"\^(-?\d+)")
_SCIENTIFIC = re.compile(r"(?<![A-Za-z\d.])(\d{1,40}(?:\.\d{1,40})?|\.\d{1,40})[eE]([+-]?\d{1,9})(?![A-Za-z\d.])")
_MIXED = re.compile(r"(-?)(\d+) (\d+)/(\d+)")
_NEGATIVE_MIXED = re.compile(r"-(\d+)(\\[dt]?frac.*)", re.DOTALL)
_GROUPED = re.compile(r"(?<![\d.])\d{1,3}(?: \d{3})+(?![\d.])")
_JUXTAPOSED = re.compile(r"(?<![\d_^.])[\d.]+\s+\d")
_REPEATING = re.compile(r"(?<!\d)(\d*)\.(\d*)\\(?:overline|bar)\{?(\d+)\}?")
_IMAGINARY = re.compile(r"(?<=\d)i(?![A-Za-z])")
_ENDS_AS_VALUE = re.compile(r"[\d)}%]$")
_UNIT = re.compile(r"([A-Za-z]+)(?:/[A-Za-z]+)?\.?(?:\^\{?[23]\}?)?")
_STYLED_UNIT = re.compile(_STYLES.pattern + r"(?:\^2|\^3|\^\{[23]\})?$")
_LETTER_UNIT = re.compile(r"(\d)\s?[msghlL](?:\^\{?[23]\}?)?$")
_SHORT_UNITS = frozenset(
    {
        "cm",
        "mm",
        "km",
        "kg",
        "mg",
        "ml",
        "ft",
        "in",
        "hr",
        "min",
        "sec",
        "mph",
        "kph",
        "kmh",
        "lb",
        "lbs",
        "oz",
        "yd",
        "sq",
        "cu",
        "deg",
        "rad",
        "am",
        "pm",
        "cents",
    }
)
_LITTLE_WORDS = frozenset(
    {
        "is",
        "it",
        "so",
        "the",
        "of",
        "to",
        "at",
        "not",
        "we",
        "by",
        "an",
        "in",
        "be",
        "as",
        "if",
        "no",
        "yes",
        "he",
        "she",
        "they",
        "was",
        "are",
        "for",
        "can",
        "see",
        "get",
        "has",
    }
)
_OPEN = re.compile(r"\b(?:not|or|either|cannot)\b|n't\b", re.IGNORECASE)
_JOINS = frozenset(("and", "or"))


def answer_in(text: str) -> str:
    """Return what follows the last "answer is" or "answer:" up to the end of the sentence, or else the whole text."""
    found = list(_ANSWER_IS.finditer(text))
    if not found:
        return _trimmed(text)
    rest = text[found[-1].end() :].strip().removeprefix("**").lstrip()
    return _trimmed(_SENTENCE_END.split(rest, maxsplit=1)[0])


def choice_key(text: str) -> str:
    """Return the letter if the text is the letter of an option, such as `C`, `(C)` or `\\textbf{(C)}`. Otherwise return
    ""."""
    found = _CHOICE_KEY.fullmatch(_bare(text))
    return found[1] if found else ""


def choice(text: str) -> str:
    """Return the letter of the only option that the text names, in upper case. Otherwise return ""."""
    found = _CHOICE.fullmatch(_bare(text))
    return found[1].upper() if found else ""


def words(text: str) -> str:
    """Return the text in lower case with single spaces if it is words, such as `Friday` or `\\text{no solution}`.
    Otherwise return ""."""
    bare = " ".join(_bare(text).lower().split())
    letters = bare.replace(" ", "").replace("-", "").replace("'", "")
    styled = _STYLES.fullmatch(text.strip().strip("$")) is not None
    if letters.isalpha():
        return bare if styled or len(letters) >= 4 or bare in _LITTLE_WORDS else ""
    return bare if letters.isalnum() and letters[0].isalpha() and is_prose(bare) else ""


def clock(text: str) -> tuple[str, str] | None:
    """Return the time and "a", "p" or "" if the text is a time of day such as `12:30 p.m.`."""
    found = _CLOCK.fullmatch(_bare(text, stops=False))
    return (found[1], (found[2] or "").lower()) if found else None


def based(text: str) -> tuple[str, str] | None:
    """Return digits and base if the text is a number with its base, such as `1011_2`."""
    found = _BASED.fullmatch(_bare(text))
    return (found[1].upper(), found[2]) if found else None


def latex(text: str, *, letter_units: bool = False) -> str:
    r"""Return the whole text as LaTeX without delimiters and units. Return "" for prose and for numbers without an
    operator between them.

    `letter_units` also removes a unit of one letter, as in `5 m`. It must be False if the key has letters.
    """
    text = _trimmed(_REPEATING.sub(_fraction_of, _DELIMITERS.sub("", text.translate(_UNICODE))))
    text = _SPACES.sub(" ", text.replace("{,}", ",").replace("\\!", "")).strip()
    text = _INFINITY.sub(r"\\infty ", text.replace("\\varnothing", "\\emptyset"))
    if styled := _STYLES.fullmatch(text):
        text = styled[1].strip()
    text = _without_unit(text)
    if letter_units:
        text = _LETTER_UNIT.sub(r"\1", text)
    if is_prose(text):
        return ""
    text = _GROUPED.sub(lambda found: found[0].replace(" ", ""), text)
    if mixed := _MIXED.fullmatch(text):
        text = f"{mixed[1]}({mixed[2]}+\\frac{{{mixed[3]}}}{{{mixed[4]}}})"
    elif negative := _NEGATIVE_MIXED.fullmatch(text):
        text = f"-({negative[1]}{negative[2]})"
    if _JUXTAPOSED.search(text):
        return ""
    text = _FUNCTION.sub(r"\\\1", text.replace("**", "^"))
    text = _EXPONENT.sub(r"^{\1}", _ROOT.sub(r"\\sqrt{\1}", text))
    return _IMAGINARY.sub(" i", _SCIENTIFIC.sub(r"\1 \\times 10^{\2}", text))


def has_letters(text: str) -> bool:
    """Return whether LaTeX has letters outside the names of commands, so that a letter may be a variable."""
    return any(char.isalpha() for char in _COMMAND.sub("", text))


def _trimmed(text: str) -> str:
    """Remove bold marks around the text, space, and punctuation after it."""
    text = text.strip().strip("`")
    if sign := _APPROXIMATE.match(text):
        text = text[sign.end() :]
    if text.startswith("**") and text.endswith("**"):
        text = text[2:-2].strip()
    return text.rstrip(" .,;\n\t") if not text.endswith(("\\,", "\\;")) else text


def _bare(text: str, *, stops: bool = True) -> str:
    """Return the text without delimiters and commands for its style."""
    text = _STYLES.sub(r"\1", _DELIMITERS.sub("", text)).replace("\\ ", " ").strip()
    return _trimmed(text) if stops else text


def _without_unit(text: str) -> str:
    """Remove words behind a value, in `\\text{}` or plain, with their exponents: `5\\text{ cm}^2`, `18 dollars per
    day`."""
    styled = _STYLED_UNIT.search(text)
    if styled and _ENDS_AS_VALUE.search(value := text[: styled.start()].rstrip()):
        return _without_unit_words(value)
    return _without_unit_words(text)


def _without_unit_words(text: str) -> str:
    parts = text.split(" ")
    while len(parts) > 1 and (not parts[-1] or _is_unit(parts[-1])):
        parts.pop()
    value = " ".join(parts)
    if len(parts) < len(text.split(" ")) and _ENDS_AS_VALUE.search(value):
        return value
    digits = text.rstrip("/abcdefghijklmnopqrstuvwxyz")
    unit = text[len(digits) :].partition("/")[0]
    return digits if digits and digits[-1].isdigit() and unit in _SHORT_UNITS else text


def _is_unit(word: str) -> bool:
    found = _UNIT.fullmatch(word)
    return (
        found is not None
        and (found[1] in _SHORT_UNITS or len(found[1]) >= 3)
        and found[1] not in _JOINS
        and not _FUNCTION.fullmatch(found[1])
    )


def is_prose(text: str) -> bool:
    """Return whether the text has words that are neither functions nor variables nor styled text."""
    plain = _COMMAND.sub(" ", _FUNCTION.sub(" ", _STYLES.sub(" ", text)))
    return any(
        word not in _JOINS and (len(word) >= 4 or word.lower() in _LITTLE_WORDS) for word in _WORD.findall(plain)
    )


def leaves_open(text: str) -> bool:
    """Return whether prose denies a value or states several, as in `not 7` or `it is 7 or 8`."""
    return _OPEN.search(text) is not None


def _fraction_of(found: re.Match[str]) -> str:
    """Return a repeating decimal as a fraction: 0.1\\overline{6} = (16 - 1)/90."""
    whole, fixed, repeated = found.groups()
    if len(whole) + len(fixed) + len(repeated) > 100:
        return found[0]
    numerator = int(f"{whole}{fixed}{repeated}") - int(f"{whole}{fixed}" or "0")
    return f"\\frac{{{numerator}}}{{{'9' * len(repeated)}{'0' * len(fixed)}}}"
