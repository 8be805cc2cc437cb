"""Let the model write a question by searching, and answer it: proposer and solver in one episode.

SSP, search self-play (2025-10, arXiv:2510.18821; code: Alibaba-Quark/SSP):

    proposer    gets an answer (in the prompt of the task), calls tools, and ends with <question>...</question>
    check       the question is accepted only if its form is right and a reader answers it from the results of the
                proposer's own calls, without tools
    solvers     answer an accepted question, `num_solvers` times, each in a new context with the tools of the task

The proposer and each solver are samples with the roles `proposer` and `solver`, so one update trains both. The scorer
`self_play` rewards the proposer by the failures of the solvers, and the estimator `roles` compares each role by itself.
The form is that of the code: `chars_min` to `chars_max` characters, at least `words_min` words, without the answer, and
at least `searches_min` different calls, none repeated. The reader is an endpoint, or the policy itself, untrained
(`endpoint: ""`); its answer is judged by the reward `reward`. An evaluation has plain questions and one solver.

Deviations: the check reads no results of other questions (the code adds four, against questions that fit many
answers), and a rejected question has no solvers (the code draws an earlier one from a pool). All branches share the
sessions of the tools, so the tools must be stateless.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from rollmesh.services.rollout.agent import Agent, Task
from rollmesh.services.rollout.agent_types import ToolResult
from rollmesh.services.rollout.agents.tool_calling import ToolCall, act
from rollmesh.services.rollout.environment import Environment
from rollmesh.shared.config.settings import NonEmptyStr, PositiveInt, Settings
from rollmesh.shared.domain.extras import ExtraName
from rollmesh.shared.domain.text import elements
from rollmesh.shared.domain.trajectory import Message, Purpose, Role, Source

PROPOSER, SOLVER = "proposer", "solver"


class SearchSelfPlayOptions(Settings):
    """Settings of the agent `search_self_play`."""

    num_solvers: PositiveInt = 5
    """Answers to each accepted question. `rollout.limits` count the turns and tokens of all of them."""
    answer: ExtraName = "answer"
    """Private extra of the task with the answer that the proposer gets. Name its field in
    `data.source.options.private_extras`."""
    reward: NonEmptyStr = "correct"
    """Name of the reward in `reward.scorers` that judges an answer."""
    success_min: float = 1.0
    """Value of the reward from which the answer of the reader is right."""
    endpoint: str = "reader"
    """Name of the reader in the table `endpoints`. Empty: the policy reads."""
    chars_min: PositiveInt = 10
    """Fewest characters of a question."""
    chars_max: PositiveInt = 1000
    """Most characters of a question."""
    words_min: PositiveInt = 10
    """Fewest words of a question."""
    searches_min: PositiveInt = 2
    """Fewest calls of the proposer."""
    prompt: NonEmptyStr = "{question}\n\nWrite the answer between <answer> and </answer>."
    """What a solver reads; {question} stands for the question."""

    def check_fields(self) -> None:
        if "{question}" not in self.prompt:
            raise ValueError(f"`prompt` must contain {{question}}, got {self.prompt!r}")


class SearchSelfPlayAgent(Agent):
    """See the module."""

    Options: ClassVar[type[msgspec.Struct]] = SearchSelfPlayOptions
    parses_calls = True

    def __init__(self, *, options: SearchSelfPlayOptions) -> None:
        self._options = options

    @property
    def private_extras(self) -> tuple[str, ...]:
        """The answer, which no question may contain."""
        return (self._options.answer,)

    async def run(self, task: Task, env: Environment) -> None:
        if env.purpose is not Purpose.TRAIN:
            await act(task, env)
            return
        calls: list[tuple[ToolCall, ToolResult]] = []
        await self._play(task, env, PROPOSER, calls)
        question = self._question(env, calls)
        results = "\n\n".join(env.shortened(result.text) for _, result in calls if result.ok)
        if question is None or not results or not await self._is_answerable(env, question, results):
            return
        for _ in range(self._options.num_solvers):
            solver = env.branch()
            solver.context(self._messages(question))
            await self._play(task, solver, SOLVER)

    async def _play(
        self, task: Task, env: Environment, role: str, calls: list[tuple[ToolCall, ToolResult]] | None = None
    ) -> None:
        """Play one role until it answers. Its branch is a sample, also if a limit ends it."""
        before = env.token_ids.size
        try:
            await act(task, env, called=calls)
        finally:
            if env.token_ids.size > before:
                env.sample(role=role)

    def _question(self, env: Environment, calls: Sequence[tuple[ToolCall, ToolResult]]) -> str | None:
        """Return the question of the proposer, or None if its form is wrong."""
        options = self._options
        answer = env.private_text(options.answer).strip()
        if not answer:
            raise ValueError(
                f"the private extra `{options.answer}` of the task {env.task.task_id} must be the answer that the "
                "proposer gets"
            )
        question = next(iter(elements(env.messages[-1].content, "question")), "").strip()
        texts = [call.text for call, _ in calls]
        is_right = (
            options.chars_min <= len(question) <= options.chars_max
            and len(question.split()) >= options.words_min
            and answer.casefold() not in question.casefold()
            and len(texts) >= options.searches_min
            and len(set(texts)) == len(texts)
        )
        return question if is_right else None

    async def _is_answerable(self, env: Environment, question: str, results: str) -> bool:
        """Return whether the reader answers the question from the results of the calls."""
        options = self._options
        reader = env.branch()
        prompt = [Message(role="user", content=f"[Documents]\n{results}\n\n{self._messages(question)[0].content}")]
        reader.context(prompt)
        if options.endpoint:
            answer = await env.ask(options.endpoint, prompt, temperature=0.0)
            reader.append(reader.encode(answer.text, end=True), role=Role.ACTION, source=Source.HINT)
        else:
            await reader.generate(train=False)
        value = (await reader.score(options.reward))[options.reward]
        if value is None:
            raise ValueError(
                f"the reward `{options.reward}` is not applicable to task {env.task.task_id}, so that it is unknown "
                "whether its question can be answered; name another reward in `rollout.agent.options.reward`"
            )
        return value >= options.success_min

    def _messages(self, question: str) -> list[Message]:
        return [Message(role="user", content=self._options.prompt.replace("{question}", question))]
