"""Reward a text by the diversity of its language: the mean of signals in [0, 1].

    lexical     words that differ / words
    entropy     entropy of the words / log(words that differ)
    length      standard deviation / mean of the lengths of sentences, at most 1
    pattern     entropy of the kinds of sentences / log 3:  statements, questions, exclamations
    adjacent    mean over neighboring sentences of  1 - common words / words of both
    yule        1 / (1 + K / 100),   K = 10^4 (sum over words of count^2 - N) / N^2  of N words
    bigrams     pairs of words that differ / pairs of words
    function    entropy of the function words / log(their number in the list)

A text without what a signal needs, such as two sentences, has 0 there. An added perspective brings new words and other
kinds of sentences, and a paraphrase repeats what is there. Use a small weight beside a verifiable reward, and leave the
scorer out of tasks that should not be diverse (`scorers` of a task).

Source: MultiRole-R1 (2025-07, arXiv:2507.20187, appendix F; weights 0.9 and 0.1, appendix B), which weights its eight
signals equally. Not established: the scale of Yule's K (here 100), the list of function words, and a normalization by
length. The paper judges the answer of each perspective; here another scorer judges the last answer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import log
from statistics import fmean, pstdev
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from rollmesh.services.reward.item import ScoreItem, Where
from rollmesh.services.reward.scorer import Scorer
from rollmesh.shared.config.settings import Settings
from rollmesh.shared.domain.trajectory import Reward

Signal = Literal["lexical", "entropy", "length", "pattern", "adjacent", "yule", "bigrams", "function"]
_FUNCTION_WORDS = """
a an the and or but if because as until while of at by for with about against between into through to from in out on off
over under again then once here there when where why how all any both each few more most other some such no nor not only
own same so than too very can will just should now i you he she it we they this that is are was were
"""
FUNCTION_WORDS = frozenset(_FUNCTION_WORDS.split())
"""Words that say little alone; part of the label of the reward, as `version`."""
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)?")
_SENTENCE = re.compile(r"[^.!?\n]+[.!?]*")


class DiversityOptions(Settings):
    """Settings of the scorer `diversity`."""

    signals: Annotated[tuple[Signal, ...], Meta(min_length=1)] = (
        "lexical",
        "entropy",
        "length",
        "pattern",
        "adjacent",
        "yule",
        "bigrams",
        "function",
    )
    """Signals whose mean is the reward."""
    where: Where = "final"
    """`final`: the last assistant message; `episode`: all assistant messages."""


class DiversityScorer(Scorer):
    """See the module."""

    Options: ClassVar[type[msgspec.Struct]] = DiversityOptions
    version = "1"

    def __init__(self, *, options: DiversityOptions) -> None:
        self._options = options

    async def score(self, item: ScoreItem) -> Reward:
        found = signals_of(item.response(self._options.where), self._options.signals)
        shown = ", ".join(f"{name} {value:.2f}" for name, value in found.items())
        return Reward(name="", value=fmean(found.values()), evidence=shown)


def signals_of(text: str, names: Sequence[Signal]) -> dict[Signal, float]:
    """Return the signals of a text by name, each in [0, 1]."""
    sentences = [words for found in _SENTENCE.findall(text) if (words := _WORD.findall(found.lower()))]
    ends = [found.rstrip()[-1] for found in _SENTENCE.findall(text) if _WORD.search(found)]
    words = [word for sentence in sentences for word in sentence]
    made: Mapping[Signal, Callable[[], float]] = {
        "lexical": lambda: _distinct(words),
        "entropy": lambda: _evenness(words, len(set(words))),
        "length": lambda: _spread([len(sentence) for sentence in sentences]),
        "pattern": lambda: _evenness([end if end in "!?" else "." for end in ends], 3),
        "adjacent": lambda: _distance(sentences),
        "yule": lambda: _yule(words),
        "bigrams": lambda: _distinct(list(pairwise(words))),
        "function": lambda: _evenness([word for word in words if word in FUNCTION_WORDS], len(FUNCTION_WORDS)),
    }
    return {name: made[name]() for name in names}


def _distinct(units: Sequence[object]) -> float:
    return len(set(units)) / len(units) if units else 0.0


def _evenness(units: Sequence[object], num_kinds: int) -> float:
    """Return the entropy of the units, divided by that of `num_kinds` equally frequent ones."""
    if len(units) < 2 or num_kinds < 2:
        return 0.0
    shares = [count / len(units) for count in Counter(units).values()]
    return min(1.0, -sum(share * log(share) for share in shares) / log(num_kinds))


def _spread(lengths: Sequence[int]) -> float:
    return min(1.0, pstdev(lengths) / fmean(lengths)) if lengths else 0.0


def _distance(sentences: Sequence[Sequence[str]]) -> float:
    pairs = [(set(first), set(second)) for first, second in pairwise(sentences)]
    return fmean(1 - len(first & second) / len(first | second) for first, second in pairs) if pairs else 0.0


def _yule(words: Sequence[str]) -> float:
    if not words:
        return 0.0
    num = len(words)
    k = 1e4 * (sum(count * count for count in Counter(words).values()) - num) / (num * num)
    return 1 / (1 + k / 100)
