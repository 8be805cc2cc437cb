"""Let the model call tools, and summarize its work when the context is full (SUPO, arXiv:2510.06727).

When a result would leave no room for a further turn, the model observes a request for a summary instead. Its next turn
is the summary. The next context is the prompt of the task with the summary and the result that had no room. Each
context is a sample, whose summary is trained like its other turns. The scorer `outcome` gives all samples of an episode
one reward. No sample is longer than `context_tokens + turn_tokens`:

    continue after a result     if  context + result <= context_tokens - turn_tokens - request
    so that a turn ends         at most at  context_tokens - request,  and the summary at  context_tokens + turn_tokens

An episode that needs more than `summaries_max` summaries reaches a limit, and all of its samples end with LENGTH. In an
evaluation `eval_summaries_max` may allow more. Not established: the form of the request and of the next context; these
are our own.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec
from msgspec.structs import replace

from rollmesh.services.rollout.agent import Agent, LimitReached, Task
from rollmesh.services.rollout.agent_types import ToolResult
from rollmesh.services.rollout.agents.tool_calling import parse_call
from rollmesh.services.rollout.environment import Environment
from rollmesh.shared.config.settings import NonEmptyStr, NonNegativeInt, PositiveInt, Settings
from rollmesh.shared.domain.trajectory import FinishReason, Message, Purpose


class SummarizingOptions(Settings):
    """Settings of the agent `summarizing`."""

    context_tokens: PositiveInt
    """Number of tokens of a context from which the model has to summarize, besides the summary."""
    turn_tokens: PositiveInt = 256
    """Maximum number of tokens of a turn, and of a summary."""
    summaries_max: NonNegativeInt = 8
    """Maximum number of summaries of an episode."""
    eval_summaries_max: NonNegativeInt | None = None
    """The same in an evaluation. None: as in training."""
    request: NonEmptyStr = "Summarize your work so far: what you know, and what is left to do. Call no tool."
    """What the model observes instead of a result for which there is no room."""
    heading: NonEmptyStr = "Your summary of the work so far:"
    """Text before the summary in the next context."""


class SummarizingAgent(Agent):
    """See the module."""

    Options: ClassVar[type[msgspec.Struct]] = SummarizingOptions
    parses_calls = True

    def __init__(self, *, options: SummarizingOptions) -> None:
        self._options = options

    async def run(self, task: Task, env: Environment) -> None:
        options = self._options
        num_summaries, summaries_max = 0, options.summaries_max
        if env.purpose is Purpose.EVAL and options.eval_summaries_max is not None:
            summaries_max = options.eval_summaries_max
        if not self._has_room(env, ""):
            raise ValueError(
                f"`context_tokens` = {options.context_tokens} has no room for the prompt of task {task.task_id} with "
                f"{env.token_ids.size} tokens, a turn of {options.turn_tokens} and a request; raise it"
            )
        while True:
            opening = env.opening
            turn = await env.generate(max_tokens=options.turn_tokens)
            call = parse_call(opening + turn.text, env.format, task.tools) if turn.finish is FinishReason.STOP else None
            if call is None:
                return
            if not env.turns_left:
                raise LimitReached("turns")
            result = call.rejected or await env.tool(call.name, call.text)
            result = replace(result, text=env.shortened(result.text))
            if self._has_room(env, result.text):
                env.observe(result)
                continue
            if num_summaries == summaries_max:
                raise LimitReached("summaries")
            num_summaries += 1
            env.observe(replace(result, text=options.request))
            summary = await env.generate(max_tokens=options.turn_tokens)
            if not env.turns_left:
                raise LimitReached("turns")
            env.context(self._next_messages(task, env.format.without_end(summary.text), result))
            if not self._has_room(env, ""):
                raise LimitReached("summaries")  # the summary or the result fills the context by itself

    def _has_room(self, env: Environment, result: str) -> bool:
        """Return whether a turn and a request for a summary fit after a result."""
        texts = [text for text in (result, self._options.request) if text]
        frames = len(texts) * sum(env.encode(part, markup=True).size for part in env.format.frame)
        num_observed = frames + sum(env.encode(text).size for text in texts)
        return int(env.token_ids.size) + num_observed + self._options.turn_tokens <= self._options.context_tokens

    def _next_messages(self, task: Task, summary: str, result: ToolResult) -> list[Message]:
        """Return the prompt of the task with the summary, and with the result that the model has not seen."""
        *before, last = task.messages
        text = f"{last.content}\n\n{self._options.heading}\n{summary}\n\nResult of your last call:\n{result.text}"
        return [*before, Message(role=last.role, content=text)]
