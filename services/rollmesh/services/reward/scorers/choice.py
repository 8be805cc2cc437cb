r"""Compare the option that the answer names with the key of a multiple-choice task: 1 if it is the same, else 0.

The option is the one that the text states last: the content of the last `\boxed{}`, or else what follows the last
"answer is", "Answer:" or similar up to the end of the line, or else the last line. A statement names an option by its
letter alone (`C`, `c.`, `(C)`, `Option C`), by its letter and a text behind it (`C. Paris`, `C because ...`, `C is
correct`), or by its text alone, if the task has texts. If it has none, "answer is C, Paris" names C, too. A statement
that names several options names none: `A or C`, `A, B, C, D`, `ABCD`, `(A) | (B)`. So does a text without a statement
whose lines name different options. A letter that begins a text without a mark
behind it is a word: `A dog` is not option A.

The `math` scorer also compares letters, in answers that are nothing else.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from rollmesh.services.reward import math_text
from rollmesh.services.reward.item import AnswerKey, ScoreItem
from rollmesh.services.reward.scorer import Scorer, not_applicable
from rollmesh.services.reward.scorers.extract import AnswerOptions, Extractor, shorten
from rollmesh.shared.domain.trajectory import Reward

_STATES = re.compile(
    r"\b(?:answer|option|choice)(?:\s(?:is|would be|must be|should be)\b|\s?[:=])\s?[:=]?", re.IGNORECASE
)
_BOXED = "\\boxed{"
_LEADING = re.compile(r"(?:(?:option|choice|letter)\s)?([(\[]?)([A-J])(?![A-Za-z'\d])([)\].:]*)", re.IGNORECASE)
_REASON = re.compile(r"(?:because|since|as|due to)\b|[,;-]\s?(?:because|since|as|due to)\b", re.IGNORECASE)
_AFFIRMED = re.compile(
    r"is (?:the )?(?:(?:correct|right|best)(?: (?:answer|option|choice|one))?|answer|solution)(?![\w'])", re.IGNORECASE
)
_PRONOUN = r"I\s(?:am|think|believe|know|guess|hope|see|chose|would|have|can)\b"
_COMMENT = re.compile(
    rf",\s?(?!.*(?:\b(?:or|either|maybe|perhaps|not)\b|\b(?!{_PRONOUN})[A-J]\b|[(\[][a-j][)\]]|\b[b-j]\b))"
)
_FURTHER = re.compile(
    r"(?:\b(?:and|or|also|either|maybe|nor)\b|[,/&;+|])\s?(?:(?:option|choice|letter)\s)?[(\[]?"
    rf"(?!{_PRONOUN})([A-J])(?![A-Za-z'\d])"
)
_STYLED = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf)|mbox)\s?\{([^{}]*)\}")


class ChoiceOptions(AnswerOptions):
    """Settings of the scorer of multiple choice. With an empty `pattern`, the whole message is searched for the last
    statement."""

    texts: str = ""
    """Field of the line of the task file with the texts of the options: a list in the order of the letters, or a
    mapping of letters to texts. An answer may then name an option by its text. Empty: only letters count."""
    num_options: Annotated[int, Meta(ge=2, le=10)] = 10
    """Number of options, if the task has no texts. Later letters are not options."""


class ChoiceScorer(Scorer):
    """See the module. It does not apply to a task without an answer key."""

    Options: ClassVar[type[msgspec.Struct]] = ChoiceOptions
    version = "1"

    def __init__(self, *, options: ChoiceOptions) -> None:
        self._extractor = Extractor(options)
        self._options = options

    async def score(self, item: ScoreItem) -> Reward:
        if item.answer_key is None or not item.answer_key.answers:
            return not_applicable("the task has no answer key")
        texts = self._texts(item.answer_key)
        accepted = {_letter_of_key(answer, texts) for answer in item.answer_key.answers}
        found = self._extractor.find(item)
        letter = "" if found is None else stated_option(found, texts)
        if not letter:
            cause = "no answer found" if found is None else f"no single option in {shorten(found)!r}"
            return Reward(name="", value=0.0, evidence=cause)
        return Reward(name="", value=float(letter in accepted), evidence=f"option {letter}", answer=letter)

    def _texts(self, key: AnswerKey) -> Mapping[str, str]:
        """Return the texts of the options by letter, which are empty if the task has none. Raise ValueError."""
        letters = string.ascii_uppercase[: self._options.num_options]
        if not self._options.texts:
            return dict.fromkeys(letters, "")
        given = key.record.get(self._options.texts)
        if isinstance(given, Sequence) and not isinstance(given, str) and 2 <= len(given) <= len(letters):
            return {letter: _plain(str(text)) for letter, text in zip(letters, given, strict=False)}
        if isinstance(given, Mapping) and given and {str(letter) for letter in given} <= set(letters):
            return {str(letter): _plain(str(text)) for letter, text in given.items()}
        raise ValueError(
            f"the field `{self._options.texts}` of the task must be a list of 2 to {len(letters)} texts, or a mapping "
            f"of letters to texts, got a {type(given).__name__}; correct the task or `texts`"
        )


def stated_option(text: str, texts: Mapping[str, str]) -> str:
    """Return the letter of the option that a text states last, or "" if the statement does not name a single one.

    `texts` are the normalized texts of the options by letter; an empty one is unknown.
    """
    if (boxed := _last_boxed(text)) is not None:
        return _named(boxed, texts)
    if statements := list(_STATES.finditer(text)):
        rest = text[statements[-1].end() :].strip()
        return _named(rest.partition("\n")[0], texts, stated=True)
    named = [_named(line, texts) for line in text.splitlines() if line.strip()]
    return named[-1] if len({letter for letter in named if letter}) == 1 else ""


def _named(statement: str, texts: Mapping[str, str], *, stated: bool = False) -> str:
    statement = _STYLED.sub(r"\1", statement).replace("*", "").replace("$", "").replace("\\", "").strip(" \t`_#>-")
    if letter := _by_text(statement, texts):
        return letter
    if (found := _LEADING.match(statement)) is None:
        return ""
    letter, rest = found[2].upper(), statement[found.end() :].strip().rstrip(".,;:!")
    if letter not in texts or (found[1] and not found[3].startswith((")", "]"))):
        return ""
    rest = _AFFIRMED.sub("", rest, count=1).strip() if _AFFIRMED.match(rest) else rest
    if not rest:
        return letter
    if found[2] != letter and not found[3]:
        return ""  # `a dog`
    others = {other.upper() for other in _FURTHER.findall(rest) if other.upper() in texts} - {letter}
    next_one = _LEADING.match(rest.lstrip("|-/ "))
    if next_one is not None and next_one[2] in texts and (next_one[3] or next_one.end() == len(rest)):
        others.add(next_one[2])
    said = _by_text(rest, texts)
    if others - {letter} or (said and said != letter):
        return ""
    comment = stated and not any(texts.values()) and _COMMENT.match(rest)
    return letter if found[3] or said or comment or _REASON.match(rest) else ""


def _by_text(statement: str, texts: Mapping[str, str]) -> str:
    """Return the letter of the only option with this text, or ""."""
    plain = _plain(statement)
    found = [letter for letter, text in texts.items() if text and text == plain]
    return found[0] if len(found) == 1 else ""


def _letter_of_key(answer: str, texts: Mapping[str, str]) -> str:
    letter = math_text.choice_key(answer) or _by_text(answer, texts)
    if letter not in texts:
        raise ValueError(
            f"an accepted answer of the key must be a letter of {', '.join(texts)} or the text of one option; correct "
            "the key of the task"
        )
    return letter


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).strip(" .,;:!'\"")


def _last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{}` with balanced braces, or None."""
    begin = text.rfind(_BOXED)
    if begin < 0:
        return None
    depth = 1
    for place in range(begin + len(_BOXED), len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if not depth:
            return text[begin + len(_BOXED) : place]
    return None
