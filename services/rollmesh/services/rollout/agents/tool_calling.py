"""The agent that lets the model call tools until it answers.

A turn ends with a tool call, which is carried out and observed, or with anything else, which ends the episode: an answer, or
words without one. A call that cannot be parsed is answered with an error line, so that the model can correct it.
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
    """A call as the model wrote it; `error` says what is wrong with it, for the model."""

    name: str
    text: str
    error: str = ""


class ToolCallingAgent:
    """Generate, call, observe, until the model answers."""

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
    """The tool call that a turn ends with; None if it doesn't end with one."""
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
        # Without words around a call, any turn that is not one is an answer.
        return None if call.error and not words.tool_call_start else call
    return ToolCall(tools[0] if tools else "", body)


def _json_call(body: str) -> ToolCall:
    """{"name": ..., "arguments": ...}, or a list of one such object; some models write "parameters" for the arguments.

    The arguments are text, or an object whose only value is the text, or JSON for the tool.
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
