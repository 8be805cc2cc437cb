"""The agent that lets the model call tools until it answers.

If a turn ends with a tool call, the agent executes the call and observes its result. Any other turn ends the episode. If a call
cannot be parsed, the model observes an error line, so that it can correct the call.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from rollmesh.services.rollout.agent import LimitReached, Task
from rollmesh.services.rollout.chat_format import ChatFormat
from rollmesh.services.rollout.environment import Environment
from rollmesh.shared.trajectory import FinishReason


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model wrote it. `error` describes a malformed call to the model."""

    name: str
    text: str
    error: str = ""


class ToolCallingAgent:
    """Generate, call and observe until the model answers."""

    async def run(self, task: Task, env: Environment) -> None:
        while True:
            turn = await env.generate()
            call = parse_call(turn.text, env.format, task.tools) if turn.finish is FinishReason.STOP else None
            if call is None:
                return
            if not env.turns_left:
                raise LimitReached("turns")  # before the call, because no turn could use its result
            if call.error:
                env.observe(call.error)
            else:
                env.observe((await env.tool(call.name, call.text)).text)


def parse_call(text: str, words: ChatFormat, tools: Sequence[str]) -> ToolCall | None:
    """Return the tool call at the end of a turn, or None if the turn does not end with one."""
    body = words.without_end(text).rstrip()
    if not body.endswith(words.tool_call_end):
        return None
    body = body.removesuffix(words.tool_call_end)
    if words.tool_call_start:
        _, opened, body = body.rpartition(words.tool_call_start)
        if not opened:
            return None
    if words.tool_call_body == "json":
        call = _json_call(body)
        # Without a marker around calls, any turn that does not parse as a call is an answer.
        return None if call.error and not words.tool_call_start else call
    return ToolCall(tools[0] if tools else "", body)


def _json_call(body: str) -> ToolCall:
    """Parse {"name": ..., "arguments": ...}, or a list of one such object. Some models write "parameters" for the arguments.

    The arguments are text, an object whose only value is the text, or JSON for the tool.
    """
    try:
        call = json.loads(body)
        call = call[0] if isinstance(call, list) else call
        name, arguments = str(call["name"]), call.get("arguments", call.get("parameters", ""))
    except (ValueError, TypeError, LookupError, AttributeError) as err:
        return ToolCall("", "", f"error: a tool call is a JSON object with name and arguments ({type(err).__name__})")
    if isinstance(arguments, dict) and len(arguments) == 1:
        (arguments,) = arguments.values()
    return ToolCall(name, arguments if isinstance(arguments, str) else json.dumps(arguments))
