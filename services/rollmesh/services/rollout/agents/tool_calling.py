"""The agent that lets the model call tools until it answers.

If a turn ends with a tool call, the agent executes the call and observes its result. Any other turn ends the episode.
If a call cannot be parsed, the model observes an error line, so that it can correct the call.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from rollmesh.services.rollout.agent import Agent, LimitReached, Task, Turn
from rollmesh.services.rollout.agent_types import ToolResult
from rollmesh.services.rollout.chat_format import ChatFormat
from rollmesh.services.rollout.environment import Environment
from rollmesh.services.rollout.tool_calls.choice import tool_call_parser
from rollmesh.services.rollout.tool_calls.parsing import ParsedCall
from rollmesh.shared.domain.trajectory import FinishReason


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model wrote it."""

    name: str
    text: str
    rejected: ToolResult | None = None
    """What the model observes after a malformed call, or after one of a tool that does not exist."""


class ToolCallingAgent(Agent):
    """Generate, call and observe until the model answers."""

    parses_calls = True

    async def run(self, task: Task, env: Environment) -> None:
        await act(task, env)


async def act(
    task: Task,
    env: Environment,
    *,
    opening: str = "",
    played: list[tuple[Environment, Turn]] | None = None,
    called: list[tuple[ToolCall, ToolResult]] | None = None,
) -> None:
    """Generate, call and observe until the model answers. `opening` is the text of the given tokens that begin the next
    turn, other than the prefix of a variant. `played` gets each turn, with a fork of the branch before it, and `called`
    each call with its result. Raises `LimitReached`."""
    while True:
        before = None if played is None else await env.fork()
        opening = opening or env.opening
        turn = await env.generate()
        if played is not None and before is not None:
            played.append((before, turn))
        said = opening + turn.text
        call = parse_call(said, env.format, task.tools) if turn.finish is FinishReason.STOP else None
        if call is None:
            return
        if not env.turns_left:
            raise LimitReached("turns")  # before the call, because no turn could use its result
        result = call.rejected or await env.tool(call.name, call.text)
        if called is not None:
            called.append((call, result))
        env.observe(result)
        opening = ""


def parse_call(text: str, words: ChatFormat, tools: Sequence[str]) -> ToolCall | None:
    """Return the tool call at the end of a turn, or None if the turn does not end with one. `tools` are the names of
    the task's tools.

    The tool gets the only argument as text, or several arguments as JSON.
    """
    body = words.without_end(text).rstrip()
    stream = _parser(words).stream([{"type": "function", "function": {"name": name}} for name in tools or ("",)])
    pieces = [*stream.feed(body), *stream.finish()]
    last = pieces[-1] if pieces else ""
    if isinstance(last, ParsedCall):
        if last.name not in tools:
            known = ", ".join(tools) or "none"
            text = f"error: there is no tool {last.name!r}; tools: {known}"
            return ToolCall(last.name, "", ToolResult(text=text, ok=False, error="UNKNOWN_TOOL"))
        values = list(json.loads(last.arguments).values())
        (value,) = values if len(values) == 1 else (last.arguments,)
        return ToolCall(last.name, value if isinstance(value, str) else json.dumps(value))
    if stream.error and body.endswith(words.tool_call_end):
        return ToolCall("", "", ToolResult(text=f"error: {stream.error}", ok=False, error="MALFORMED_CALL"))
    return None


_parser = lru_cache(maxsize=16)(tool_call_parser)
