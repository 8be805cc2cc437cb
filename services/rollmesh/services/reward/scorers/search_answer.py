"""Reward the answer of a search agent: the F1 of its words, if every turn is well-formed.

    R = F1(answer) * 1[every turn is well-formed],   or `invalid` if the answer declares the question invalid

A turn is well-formed if it has exactly one complete element of `actions`, such as one call or one answer, and nothing
but white space behind it. F1 is that of `squad`, the best of all keys. An answer that declares the question invalid is
judged by its words where an accepted answer does so, too.

Source: ASearcher (2025-08, arXiv:2508.07976; code: inclusionAI/ASearcher). Which words declare a question invalid is
configuration. The code of the reasoning agent also divides the advantage by the deviation of the group, and a judge
takes the place of F1; see `rubric`.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from rollmesh.services.reward.item import ScoreItem
from rollmesh.services.reward.scorer import Scorer, not_applicable
from rollmesh.services.reward.scorers.extract import AnswerOptions, Extractor, shorten
from rollmesh.services.reward.scorers.squad import word_f1
from rollmesh.shared.config.settings import NonEmptyStr
from rollmesh.shared.domain.trajectory import Reward


class SearchAnswerOptions(AnswerOptions):
    """Settings of the scorer of search agents."""

    actions: Annotated[tuple[NonEmptyStr, ...], Meta(min_length=1)] = ("tool_call", "answer")
    """Names of the elements that a turn may end with, `<name>...</name>`."""
    invalid: float = -0.5
    """Reward of an answer that declares a valid question invalid."""
    invalid_words: tuple[NonEmptyStr, ...] = ("question is invalid", "invalid question")
    """Words, in any case, by which an answer declares the question invalid. Empty: no answer does."""


class SearchAnswerScorer(Scorer):
    """See the module. It does not apply to a task without an answer key."""

    Options: ClassVar[type[msgspec.Struct]] = SearchAnswerOptions
    version = "1"

    def __init__(self, *, options: SearchAnswerOptions) -> None:
        self._extractor = Extractor(options)
        self._options = options

    async def score(self, item: ScoreItem) -> Reward:
        if item.answer_key is None or not item.answer_key.answers:
            return not_applicable("the task has no answer key")
        found = self._extractor.find(item)
        answer = shorten(found or "")
        for number, text in enumerate(_turns(item), 1):
            if not well_formed(text, self._options.actions):
                return Reward(name="", value=0.0, evidence=f"turn {number} is not well-formed", answer=answer)
        if found is None:
            return Reward(name="", value=0.0, evidence="no answer found")
        if self._declares_invalid(found) and not any(map(self._declares_invalid, item.answer_key.answers)):
            return Reward(name="", value=self._options.invalid, evidence="declares the question invalid", answer=answer)
        value = max(word_f1(found, key) for key in item.answer_key.answers)
        return Reward(name="", value=value, evidence=f"answer {answer!r}", answer=answer)

    def _declares_invalid(self, text: str) -> bool:
        return any(words.lower() in text.lower() for words in self._options.invalid_words)


def well_formed(text: str, actions: tuple[str, ...]) -> bool:
    """Return whether a turn has one complete element of `actions` and ends with it."""
    text = text.rstrip()
    starts = [(text.find(f"<{action}>"), action) for action in actions for _ in range(text.count(f"<{action}>"))]
    num_ends = sum(text.count(f"</{action}>") for action in actions)
    if len(starts) != 1 or num_ends != 1:
        return False
    ((begin, action),) = starts
    end = f"</{action}>"
    return text.endswith(end) and begin < len(text) - len(end)


def _turns(item: ScoreItem) -> list[str]:
    """Return the texts of the turns of the model. A written answer has no path, and its messages are the turns."""
    if item.path:
        return [turn.text for turn in item.turns]
    return [message.content for message in item.messages if message.role == "assistant"]
