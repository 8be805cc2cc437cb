"""Ask a judge to grade the answer by criteria, and return the weighted sum of the grades, in [0, 1].

    R = clip(sum_i w_i g_i / sum of the w_i > 0, 0, 1),   g_i in [0, 1]

The criteria are those of the option, or of the task: a field of its line with a list of {criterion, weight}. A negative
weight marks a fault. `ask: together` makes one request, whose answer has all grades; `ask: each` makes one request per
criterion, at once. What the judge returns is not believed in any other form: an answer that is not the JSON that was
asked for, or a grade out of [0, 1], raises, which is an infra failure of the sample and never a 0.

The text of the model stands between lines with a hash of it, which the text cannot contain, and the judge is asked to
read it as data. That does not make a judge safe: a policy learns what a judge believes.

Source: rubrics as in HealthBench (2025-05, arXiv:2505.08775) and Rubrics as Rewards (2025-07, arXiv:2507.17746).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from rollmesh.services.reward.item import ScoreItem, Where
from rollmesh.services.reward.scorer import Scorer, not_applicable
from rollmesh.services.reward.scorers.judging import all_of, client_of, framed, is_score
from rollmesh.shared.config.settings import NonEmptyStr, Settings
from rollmesh.shared.domain.trajectory import Reward
from rollmesh.shared.endpoints.answer import Asks

CRITERIA_MAX = 64
QUESTION = """\
Grade an answer to a task by criteria. A grade is a number from 0 (the criterion is not met) to 1 (it is met).
{data}

Criteria:
{criteria}

Return a JSON object with one number for each criterion, and nothing else: {{{form}}}"""


class Criterion(Settings):
    """One criterion and its weight."""

    criterion: NonEmptyStr
    """What the answer must do, as a sentence for the judge."""
    weight: Annotated[float, Meta(ge=-1e6, le=1e6)] = 1.0
    """Weight of its grade. Negative for a fault."""


class RubricOptions(Settings):
    """Settings of the scorer of rubrics."""

    endpoint: NonEmptyStr = "judge"
    """Name of the judge in the table `endpoints`."""
    criteria: Annotated[tuple[Criterion, ...], Meta(max_length=CRITERIA_MAX)] = ()
    """Criteria for all tasks. Empty: each task has its criteria in `field`."""
    field: str = "rubric"
    """Field of the line of the task file with the criteria of the task."""
    ask: Literal["together", "each"] = "together"
    """One request for all criteria, or one for each."""
    where: Where = "final"
    """`final`: the last assistant message; `episode`: all assistant messages."""
    max_tokens: Annotated[int, Meta(ge=1)] = 1024
    """Token limit of an answer of the judge."""

    def check_fields(self) -> None:
        if self.criteria and not any(criterion.weight > 0 for criterion in self.criteria):
            raise ValueError("`criteria` must have a weight > 0, got only weights <= 0")


class RubricScorer(Scorer):
    """See the module. It does not apply to a task without criteria."""

    Options: ClassVar[type[msgspec.Struct]] = RubricOptions
    version = "1"

    def __init__(self, *, options: RubricOptions) -> None:
        self._options = options
        self._endpoints: Asks | None = None

    def use_endpoints(self, endpoints: Asks) -> None:
        self._endpoints = endpoints

    async def score(self, item: ScoreItem) -> Reward:
        criteria = self._options.criteria or _criteria_of(item, self._options.field)
        if not criteria:
            return not_applicable("the task has no criteria")
        answer = item.whole_response(self._options.where)
        if not answer.strip():
            return Reward(name="", value=0.0, evidence="the answer is empty")
        numbered = list(enumerate(criteria, 1))
        parts = [numbered] if self._options.ask == "together" else [[one] for one in numbered]
        graded = await all_of(self._grades(item, answer, part) for part in parts)
        grades = [grade for part in graded for grade in part]
        total = sum(criterion.weight * grade for criterion, grade in zip(criteria, grades, strict=True))
        value = total / sum(max(criterion.weight, 0.0) for criterion in criteria)
        shown = ", ".join(f"{number}: {grade:g}" for number, grade in enumerate(grades, 1))
        evidence = f"`{self._options.endpoint}` graded {shown}"
        return Reward(name="", value=min(max(value, 0.0), 1.0), evidence=evidence)

    async def _grades(self, item: ScoreItem, answer: str, criteria: Sequence[tuple[int, Criterion]]) -> list[float]:
        endpoints = client_of(self._endpoints, "rubric", self._options.endpoint)
        question = QUESTION.format(
            data=framed(task=item.task.messages[-1].content if item.task.messages else "", answer=answer),
            criteria="\n".join(f"{number}. {criterion.criterion}" for number, criterion in criteria),
            form=", ".join(f'"{number}": NUMBER' for number, _ in criteria),
        )
        said = await endpoints.ask(
            self._options.endpoint, question, json=True, temperature=0.0, max_tokens=self._options.max_tokens
        )
        return [_grade(said.value, str(number)) for number, _ in criteria]


def _grade(value: Any, number: str) -> float:
    grade = value.get(number) if isinstance(value, dict) else None
    if not is_score(grade):
        raise ValueError(
            f"the judge must return a JSON object with a number in [0, 1] for the criterion {number}, got "
            f"{str(value)[:100]!r}"
        )
    return float(grade)


def _criteria_of(item: ScoreItem, field: str) -> tuple[Criterion, ...]:
    """Return the criteria of a task. Raise ValueError if its field is not a list of them."""
    given = None if item.answer_key is None else item.answer_key.record.get(field)
    if given is None:
        return ()
    try:
        made = msgspec.convert(given, type=tuple[Criterion, ...])
    except msgspec.ValidationError as error:
        raise ValueError(f"the field `{field}` of the task must be a list of criteria: {error}") from None
    if not 0 < len(made) <= CRITERIA_MAX or not any(criterion.weight > 0 for criterion in made):
        raise ValueError(f"the field `{field}` of the task must have 1 to {CRITERIA_MAX} criteria, one of weight > 0")
    return made
