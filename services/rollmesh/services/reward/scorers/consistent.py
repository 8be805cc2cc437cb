"""Reward a right answer more if a judge finds that the reasoning before it agrees with it.

    R = 0.5 format + result (1 + 0.5 consistency)

`format` is 1 if the message is `<think>...</think><answer>...</answer>` with one of each tag and white space around
them, else 0. `result` is 1 if the answer equals an accepted one, whatever its case, else 0. `consistency` is 1 if the
judge says that the end of the reasoning comes to this answer, else 0. Only right answers are judged, and the judge gets
neither the task nor the key.

Source: StableReinforce of R1-Reward (2025-05, arXiv:2505.02835; code: yfzhang114/r1_reward). Its code counts a mismatch
as -1; `inconsistent: -1.0` does so. The judge gets the last three lines of the reasoning, as there. A reply that is not
as asked is an infra failure, where the code asks again and then counts 0.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from rollmesh.services.reward.item import ScoreItem
from rollmesh.services.reward.scorer import Scorer, not_applicable
from rollmesh.services.reward.scorers.extract import ANSWER_END, AnswerOptions, Extractor, shorten
from rollmesh.services.reward.scorers.judging import client_of, framed
from rollmesh.shared.config.settings import NonEmptyStr
from rollmesh.shared.domain.trajectory import Reward
from rollmesh.shared.endpoints.answer import Asks

QUESTION = """\
Does the end of the reasoning come to the answer? It does not if it prefers another answer, accepts several, or comes to none.
{data}

Return JSON: {{"consistent": true}} or {{"consistent": false}}."""  # noqa: E501
LINES = 3
_THINK, _THINK_END, _ANSWER = "<think>", "</think>", "<answer>"


class ConsistentOptions(AnswerOptions):
    """Settings of the scorer of consistent answers."""

    endpoint: NonEmptyStr = "judge"
    """Name of the judge in the table `endpoints`."""
    inconsistent: float = 0.0
    """Value of `consistency` for an answer that the reasoning does not come to."""


class ConsistentScorer(Scorer):
    """See the module. It does not apply to a task without an answer key."""

    Options: ClassVar[type[msgspec.Struct]] = ConsistentOptions
    version = "1"

    def __init__(self, *, options: ConsistentOptions) -> None:
        self._extractor = Extractor(options)
        self._options = options
        self._endpoints: Asks | None = None

    def use_endpoints(self, endpoints: Asks) -> None:
        self._endpoints = endpoints

    async def score(self, item: ScoreItem) -> Reward:
        if item.answer_key is None or not item.answer_key.answers:
            return not_applicable("the task has no answer key")
        text = item.whole_response()
        of_format = 0.5 * thinks_then_answers(text)
        found = self._extractor.find(item)
        if found is None or found.casefold() not in {key.casefold() for key in item.answer_key.answers}:
            evidence = "no answer found" if found is None else f"answer {shorten(found)!r}"
            return Reward(name="", value=of_format, evidence=evidence, answer=shorten(found or ""))
        consistent = await self._is_consistent(text.rpartition(_ANSWER)[0] or text, found)
        value = of_format + 1 + 0.5 * (1.0 if consistent else self._options.inconsistent)
        evidence = f"answer {shorten(found)!r}, {'consistent' if consistent else 'not consistent'}"
        return Reward(name="", value=value, evidence=evidence, answer=shorten(found))

    async def _is_consistent(self, reasoning: str, answer: str) -> bool:
        endpoints = client_of(self._endpoints, "consistent", self._options.endpoint)
        lines = [line for line in reasoning.splitlines() if line.strip()][-LINES:]
        question = QUESTION.format(data=framed(reasoning="\n".join(lines), answer=answer))
        said = await endpoints.ask(self._options.endpoint, question, json=True, temperature=0.0)
        verdict = said.value.get("consistent") if isinstance(said.value, dict) else None
        if not isinstance(verdict, bool):
            raise TypeError(
                f'the judge must return {{"consistent": true}} or {{"consistent": false}}, got '
                f"{str(said.value)[:100]!r}"
            )
        return verdict


def thinks_then_answers(text: str) -> bool:
    """Return whether a text is `<think>...</think><answer>...</answer>` with one of each tag."""
    text = text.strip()
    if any(text.count(tag) != 1 for tag in (_THINK, _THINK_END, _ANSWER, ANSWER_END)):
        return False
    reasoning, _, answer = text.partition(_THINK_END)
    return reasoning.startswith(_THINK) and answer.lstrip().startswith(_ANSWER) and answer.endswith(ANSWER_END)
