"""The tool-calling agent whose tool results another model refines, and whose answer is also given.

The refiner is an endpoint. It gets the task, the call and the result, and returns the passages that help, in fewer
words; the model observes them behind the ids of the documents of the result (lines `id: ...`, as the tool `search`
writes them), so that the scorer `progress` sees what was retrieved. A result of an error is not refined.

While training, a task with the private extra `solution` also gives a sample that ends with this text in place of the
answer of the model. The same queries and documents are its context, without loss, so that the queries are trained only
in the sample of the policy, and only supervised terms train on the text (docs/agents.md). The run needs
`external_sources: [dataset]`, and an estimator without given solutions in the baseline, such as `trloo` or `grpo` with
`baseline: policy`.

Source: IM-RAG (2024-05, arXiv:2405.13021): reasoner, retriever, refiner, and supervised fine-tuning of the answer. The
paper trains the queries and the answer in two stages, and this agent in one run.
"""

from __future__ import annotations

import re
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from rollmesh.services.rollout.agent import LimitReached, Task
from rollmesh.services.rollout.agent_types import ToolResult
from rollmesh.services.rollout.agents.tool_calling import ToolCallingAgent, parse_call
from rollmesh.services.rollout.environment import Environment
from rollmesh.shared.config.settings import NonEmptyStr, NonNegativeFloat, Settings
from rollmesh.shared.domain.extras import EXTRA_NAME
from rollmesh.shared.domain.trajectory import FinishReason, Purpose, Role, Source

QUESTION = """\
[Task]
{task}

[Call of the tool {tool}]
{call}

[Result]
{result}

Return the parts of the result that help with the task, in the order of their use. Add nothing."""
_ID = re.compile(r"^id: [^\n]+$", re.MULTILINE)


class RefinedSearchOptions(Settings):
    """Settings of the agent with a refiner."""

    endpoint: NonEmptyStr = "refiner"
    """Name of the refiner in the table `endpoints`."""
    solution: Annotated[str, Meta(pattern=rf"{EXTRA_NAME}|^\Z")] = "solution"
    """Private extra of the task with the right answer as the model must write it, or null for none. Name its field in
    `data.source.options.private_extras`. Empty: no answer is given."""
    weight: NonNegativeFloat = 0.25
    """Weight of the sample with the given answer, which every episode of a group gives."""


class RefinedSearchAgent(ToolCallingAgent):
    """Generate, call, observe what the refiner returns, until the model answers."""

    Options: ClassVar[type[msgspec.Struct]] = RefinedSearchOptions

    def __init__(self, *, options: RefinedSearchOptions) -> None:
        self._options = options

    @property
    def private_extras(self) -> tuple[str, ...]:
        """The right answer, if it is given."""
        return (self._options.solution,) if self._options.solution else ()

    async def run(self, task: Task, env: Environment) -> None:
        given = self._options.solution and env.purpose is Purpose.TRAIN
        solution = env.private_text(self._options.solution) if given else ""
        acted = False
        try:
            while True:
                before = env.branch()
                opening = env.opening
                turn = await env.generate()
                acted = True
                call = (
                    parse_call(opening + turn.text, env.format, task.tools)
                    if turn.finish is FinishReason.STOP
                    else None
                )
                if call is None:
                    if solution:
                        tokens = before.encode(solution, end=True)
                        before.begin(before.token_ids, before.messages)
                        before.append(tokens, role=Role.ACTION, source=Source.DATASET, train=True)
                        before.sample(weight=self._options.weight)
                    return
                if not env.turns_left:
                    raise LimitReached("turns")
                env.observe(call.rejected or await self._refined(task, env, call.name, call.text))
        finally:
            if acted:
                env.sample()

    async def _refined(self, task: Task, env: Environment, tool: str, call: str) -> ToolResult:
        result = await env.tool(tool, call)
        if not result.ok or not result.text.strip():
            return result
        asked = task.messages[-1].content if task.messages else ""
        question = QUESTION.format(task=asked, tool=tool, call=call, result=result.text)
        answer = await env.ask(self._options.endpoint, question, temperature=0.0)
        return replace(result, text="\n".join([*_ID.findall(result.text), answer.text]))
