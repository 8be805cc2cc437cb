"""Let the model question a simulated patient over several turns, and end with a diagnosis.

DoctorAgent-RL (2025-05, arXiv:2505.19630; code: JarvisUSTC/DoctorAgent-RL). The patient is an endpoint, which gets a
description that the model does not see (the private extra `description`), the questions so far, and the question. Each
turn of the model is a question, or a diagnosis, which begins with `marker` and ends the episode. Rewards of the turns:

    -2      the turn has no <answer>...</answer> at its end, or does not ask exactly one question     (`malformed`)
    -2      the question was asked before                                                            (`repeated`)
    -1      the patient does not know                                                                (`unknown`)
    +1      the patient answers                                                                      (`answered`)
    -5      the last turn is not a diagnosis                                                         (`late`)

Their sum is the reward `inquiry` of the sample, which a scorer `environment` declares, and another scorer judges the
diagnosis. A limit, also that of the tokens of a turn, counts as a last turn without a diagnosis. The number of turns is
drawn uniformly from `turns_min` to `turns_max` for each group, and the model observes which turn it is. The patient
returns JSON, and another answer is an infra failure.

Deviations: one request answers, and says whether the question was asked before or is unknown (the code has two, and
reads the word "Sorry"). An evaluation has `turns_max`.
"""

from __future__ import annotations

import asyncio
import re
from typing import Annotated, Any, ClassVar, Literal, get_args

import msgspec
from msgspec import Meta

from rollmesh.services.rollout.agent import Agent, LimitReached, Task
from rollmesh.services.rollout.agents.draws import drawing
from rollmesh.services.rollout.environment import Environment
from rollmesh.shared.config.settings import NonEmptyStr, Settings
from rollmesh.shared.domain.extras import ExtraName
from rollmesh.shared.domain.text import elements
from rollmesh.shared.domain.trajectory import FinishReason, Purpose

Known = Literal["answered", "unknown", "repeated"]
PATIENT = """\
You are a patient. Answer the question of the doctor in one sentence, from your report alone. Mention no diagnosis.

[Your report]
{description}

[Earlier questions of the doctor]
{asked}

[Question]
{question}

Return JSON: {{"status": "answered", "answer": TEXT}}, with the status "repeated" if an earlier question has the same
meaning, or "unknown" if the report does not say."""


class ConsultationOptions(Settings):
    """Settings of the agent `consultation`."""

    endpoint: NonEmptyStr = "patient"
    """Name of the patient in the table `endpoints`."""
    description: ExtraName = "description"
    """Private extra of the task with the report of the patient. Name its field in
    `data.source.options.private_extras`."""
    marker: NonEmptyStr = "Diagnosis:"
    """Text in an answer that makes it a diagnosis."""
    turns_min: Annotated[int, Meta(ge=1)] = 2
    """Fewest turns of an episode."""
    turns_max: Annotated[int, Meta(ge=1)] = 10
    """Most turns of an episode. `rollout.limits.turns_max` must allow them."""
    answered: float = 1.0
    """Reward of a question that the patient answers."""
    unknown: float = -1.0
    """Reward of a question that the patient cannot answer."""
    repeated: float = -2.0
    """Reward of a question that was asked before."""
    malformed: float = -2.0
    """Reward of a turn without an answer, or with no or several questions."""
    late: float = -5.0
    """Reward of a last turn that is not a diagnosis."""

    def check_fields(self) -> None:
        if self.turns_min > self.turns_max:
            raise ValueError(f"`turns_min` must be <= turns_max = {self.turns_max}, got {self.turns_min}")


class ConsultationAgent(Agent):
    """See the module."""

    Options: ClassVar[type[msgspec.Struct]] = ConsultationOptions

    def __init__(self, *, options: ConsultationOptions) -> None:
        self._options = options

    @property
    def private_extras(self) -> tuple[str, ...]:
        """The report of the patient, which the model must find out."""
        return (self._options.description,)

    @property
    def environment_extras(self) -> tuple[str, ...]:
        """The patient has it in an evaluation, too."""
        return (self._options.description,)

    async def run(self, task: Task, env: Environment) -> None:
        options, description = self._options, env.private_text(self._options.description)
        if not description:
            raise ValueError(f"the private extra `{options.description}` of the task {task.task_id} must be a report")
        num_turns = options.turns_max
        if env.purpose is Purpose.TRAIN:
            num_turns = drawing(env, group=True).randint(options.turns_min, options.turns_max)
        rewards: list[float] = []
        try:
            await self._talk(env, description, num_turns, rewards)
        except (LimitReached, asyncio.CancelledError):  # the time limit cancels the agent
            rewards.append(options.late)
            raise
        finally:
            env.reward("inquiry", sum(rewards), evidence=", ".join(f"{value:g}" for value in rewards))

    async def _talk(self, env: Environment, description: str, num_turns: int, rewards: list[float]) -> None:
        """Generate and answer until the diagnosis or the last turn. `rewards` gets the reward of each turn but the
        diagnosis."""
        options, asked = self._options, list[str]()
        for turn in range(1, num_turns + 1):
            generated = await env.generate()
            said = _said(env.messages[-1].content)
            if said is not None and options.marker in said:
                return
            if turn == num_turns or generated.finish is not FinishReason.STOP:
                rewards.append(options.late)
                return
            if said is None or len(re.findall("[?\N{FULLWIDTH QUESTION MARK}]", said)) != 1:
                rewards.append(options.malformed)
                shown = "Ask exactly one question, between <answer> and </answer>."
            else:
                status, shown = await self._patient(env, description, asked, said)
                rewards.append({"answered": options.answered, "unknown": options.unknown}.get(status, options.repeated))
                asked.append(said)
            env.observe(f"{shown}\nTurn {turn} of {num_turns}.")

    async def _patient(self, env: Environment, description: str, asked: list[str], question: str) -> tuple[Known, str]:
        """Return how the patient takes a question, and what the model observes."""
        earlier = "\n".join(f"{number}. {text}" for number, text in enumerate(asked, 1)) or "none"
        prompt = PATIENT.format(description=description, asked=earlier, question=question)
        status, answer = _answer((await env.ask(self._options.endpoint, prompt, json=True, temperature=0.0)).value)
        shown = {"answered": answer, "unknown": "I do not know.", "repeated": "You have asked this before."}
        return status, shown[status]


def _said(text: str) -> str | None:
    """Return the answer at the end of a turn, or None if the turn does not have exactly one there."""
    is_right = text.count("<answer>") == text.count("</answer>") == 1 and text.rstrip().endswith("</answer>")
    return elements(text, "answer")[0].strip() if is_right else None


def _answer(value: Any) -> tuple[Known, str]:
    given = value if isinstance(value, dict) else {}
    answer = given.get("answer", "")
    for status in get_args(Known):
        if given.get("status") == status and isinstance(answer, str) and (answer.strip() or status != "answered"):
            return status, answer
    raise ValueError(
        f'the patient must return JSON with "status" (one of {", ".join(get_args(Known))}) and the text "answer", got '
        f"{str(value)[:100]!r}"
    )
