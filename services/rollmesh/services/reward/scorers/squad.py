"""Compare the extracted answer with the accepted ones by their words, as the official script of SQuAD does.

    F1 = 2 P R / (P + R),  P = common / words of the answer,  R = common / words of the key,  the best of all keys

`common` counts each word as often as both have it. Words are what remains of a text in lower case without punctuation
and without the articles a, an, the. `form: exact` is 1 if the words are the same in the same order, else 0.

Source: SQuAD 1.1 (2016, arXiv:1606.05250), evaluate-v1.1.py. Deviation: a key of articles or punctuation only, which
has no words in the official script, is compared in lower case as it is written, so that an empty answer is not right.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar, Literal

import msgspec

from rollmesh.services.reward.item import ScoreItem
from rollmesh.services.reward.scorer import Scorer, not_applicable
from rollmesh.services.reward.scorers.extract import AnswerOptions, Extractor, shorten
from rollmesh.shared.domain.trajectory import Reward

_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class SquadOptions(AnswerOptions):
    """Settings of the scorer of words."""

    form: Literal["f1", "exact"] = "f1"
    """`f1`: the overlap of words; `exact`: 1 for the same words, else 0."""


class SquadScorer(Scorer):
    """See the module. It does not apply to a task without an answer key."""

    Options: ClassVar[type[msgspec.Struct]] = SquadOptions
    version = "1"

    def __init__(self, *, options: SquadOptions) -> None:
        self._extractor = Extractor(options)
        self._measure = word_f1 if options.form == "f1" else same_words

    async def score(self, item: ScoreItem) -> Reward:
        if item.answer_key is None or not item.answer_key.answers:
            return not_applicable("the task has no answer key")
        found = self._extractor.find(item)
        if found is None:
            return Reward(name="", value=0.0, evidence="no answer found")
        value = max(self._measure(found, key) for key in item.answer_key.answers)
        return Reward(name="", value=value, evidence=f"answer {shorten(found)!r}", answer=shorten(found))


def words_of(text: str) -> list[str]:
    """Return the words of a text, normalized as in SQuAD."""
    return _ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def same_words(answer: str, key: str) -> float:
    """Return 1.0 if answer and key have the same words in the same order, else 0.0."""
    said, wanted = _both(answer, key)
    return float(said == wanted)


def word_f1(answer: str, key: str) -> float:
    """Return the F1 of the words of an answer and a key, in [0, 1]."""
    said, wanted = _both(answer, key)
    common = sum((Counter(said) & Counter(wanted)).values())
    return 2 * common / (len(said) + len(wanted)) if common else 0.0  # 2 P R / (P + R)


def _both(answer: str, key: str) -> tuple[Sequence[str], Sequence[str]]:
    wanted = words_of(key)
    return (words_of(answer), wanted) if wanted else (answer.lower().split(), key.lower().split())
