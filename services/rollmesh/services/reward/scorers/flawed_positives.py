"""FAPO: a right answer with a wrong step earns less than a clean one (2025-10, arXiv:2510.22543; code: yyDing1/FAPO).

    R = -1   wrong answer
         0   right answer, and the judge finds a wrong step (a flawed positive)
         1   right answer without one

With a baseline of the group, a flawed positive helps while most answers are wrong, and costs while most are clean. Only
right answers are judged. The reward `flawed` is 1 or 0 for them, so its mean is the share of flawed positives; give it
no weight. Deviations: the judge does not get the answer key, because the answer is right; a reply that is not as asked
is an infra failure, where the code counts it as clean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from rollmesh.services.reward.item import ScoreItem
from rollmesh.services.reward.scorer import Scorer, not_applicable
from rollmesh.services.reward.scorers.extract import AnswerOptions, Extractor
from rollmesh.services.reward.scorers.judging import client_of, framed
from rollmesh.shared.config.settings import NonEmptyStr
from rollmesh.shared.domain.trajectory import Outcome, Reward
from rollmesh.shared.endpoints.answer import Asks

QUESTION = """\
Review a solution of a task step by step. Its answer is right.
{data}

Return JSON: {{"first_error": INDEX}}, the index of the earliest wrong step, or -1 if there is none."""


class FlawedPositivesOptions(AnswerOptions):
    """Settings of the scorer `flawed_positives`."""

    endpoint: NonEmptyStr = "judge"
    """Name of the judge in the table `endpoints`."""
    flawed: float = 0.0
    """Reward of a flawed positive."""


class FlawedPositivesScorer(Scorer):
    """See the module."""

    Options: ClassVar[type[msgspec.Struct]] = FlawedPositivesOptions
    version = "1"
    rewards = diagnostics = ("flawed",)

    def __init__(self, *, options: FlawedPositivesOptions) -> None:
        self._options, self._extractor = options, Extractor(options)
        self._endpoints: Asks | None = None

    def use_endpoints(self, endpoints: Asks) -> None:
        self._endpoints = endpoints

    async def score(self, item: ScoreItem) -> Reward | Sequence[Reward]:
        endpoints = client_of(self._endpoints, "flawed_positives", self._options.endpoint)
        if item.answer_key is None or not item.answer_key.answers:
            return not_applicable("the task has no answer key")
        answer = self._extractor.find(item)
        if answer not in item.answer_key.answers:
            not_judged = Reward(name="flawed", value=0.0, outcome=Outcome.NOT_APPLICABLE)
            return [Reward(name="", value=-1.0, answer=answer or ""), not_judged]
        steps = [step for step in item.whole_response("episode").split("\n\n") if step.strip()]
        numbered = "\n".join(f"[{n}] {step}" for n, step in enumerate(steps))
        question = QUESTION.format(data=framed(task=item.task.messages[-1].content, steps=numbered))
        said = await endpoints.ask(self._options.endpoint, question, json=True)
        first = said.value.get("first_error") if isinstance(said.value, dict) else None
        if type(first) is not int or not -1 <= first < len(steps):
            raise ValueError(
                f'the judge must return {{"first_error": INDEX}} with an integer in [-1, {len(steps) - 1}], got '
                f"{str(said.value)[:100]!r}"
            )
        value = 1.0 if first == -1 else self._options.flawed
        return [
            Reward(name="", value=value, evidence=f"first wrong step: {first}", answer=answer),
            Reward(name="flawed", value=float(first != -1)),
        ]
