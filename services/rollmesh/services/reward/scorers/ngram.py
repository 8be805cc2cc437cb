"""Measure the similarity of the extracted answer to the closest accepted one, in [0, 1]: ROUGE-L or chrF.

    rouge_l   F = 2 P R / (P + R),  P = L / words of the answer,  R = L / words of the key
    chrf      F = (1 + 4) P R / (4 P + R),  P and R are means over n = 1..6 of the shares of common n-grams

L is the length of the longest common subsequence of words, which are runs of letters and digits in lower case. chrF
compares n-grams of characters without white space and with their case, each as often as both have it; an order n for
which a text is too short does not count. Both measures are those of one sentence.

Source: ROUGE (Lin, 2004) without stemming, with letters of all scripts; chrF (Popovic, 2015) with beta = 2. Similarity
is not correctness: a negated answer may score 0.9. Use it for text that has no other check.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import ClassVar, Literal

import msgspec

from rollmesh.services.reward.item import ScoreItem
from rollmesh.services.reward.scorer import Scorer, not_applicable
from rollmesh.services.reward.scorers.extract import AnswerOptions, Extractor, shorten
from rollmesh.shared.common_subsequence import rouge_l
from rollmesh.shared.domain.trajectory import Reward

_WORD = re.compile(r"[^\W_]+")
CHRF_ORDER = 6
CHRF_BETA = 2.0


class NgramOptions(AnswerOptions):
    """Settings of the scorer of similarity."""

    form: Literal["rouge_l", "chrf"] = "rouge_l"
    """The measure. `chrf` also suits languages that do not separate words by spaces."""


class NgramScorer(Scorer):
    """See the module. It does not apply to a task without an answer key."""

    Options: ClassVar[type[msgspec.Struct]] = NgramOptions
    version = "1"

    def __init__(self, *, options: NgramOptions) -> None:
        self._extractor = Extractor(options)
        self._measure = rouge_l_of_words if options.form == "rouge_l" else chrf

    async def score(self, item: ScoreItem) -> Reward:
        if item.answer_key is None or not item.answer_key.answers:
            return not_applicable("the task has no answer key")
        found = self._extractor.find(item)
        if found is None:
            return Reward(name="", value=0.0, evidence="no answer found")
        value = max(self._measure(found, key) for key in item.answer_key.answers)
        return Reward(name="", value=value, evidence=f"answer {shorten(found)!r}", answer=shorten(found))


def rouge_l_of_words(answer: str, key: str) -> float:
    """Return the F1 of ROUGE-L of two sentences."""
    return rouge_l(_WORD.findall(answer.lower()), _WORD.findall(key.lower()))


def chrf(answer: str, key: str) -> float:
    """Return chrF of two sentences in [0, 1]."""
    said, wanted = "".join(answer.split()), "".join(key.split())
    precisions, recalls = [], []
    for order in range(1, min(CHRF_ORDER, len(said), len(wanted)) + 1):
        ours, theirs = _ngrams(said, order), _ngrams(wanted, order)
        common = sum((ours & theirs).values())
        precisions.append(common / ours.total())
        recalls.append(common / theirs.total())
    precision, recall = sum(precisions), sum(recalls)
    if not precision or not recall:
        return 0.0
    mean_precision, mean_recall, factor = precision / len(precisions), recall / len(recalls), CHRF_BETA**2
    return (1 + factor) * mean_precision * mean_recall / (factor * mean_precision + mean_recall)


def _ngrams(text: str, order: int) -> Counter[str]:
    return Counter(text[begin : begin + order] for begin in range(len(text) - order + 1))
