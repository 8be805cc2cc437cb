"""Parse tool calls in the format of Qwen3-Coder: a tag per function and per argument. Pure.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

A value is text. It is read as JSON if the schema of the tool gives the argument another type than string.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollmesh.services.rollout.chat_format import ChatFormat, ToolSchema
from rollmesh.services.rollout.config import ToolCallBody
from rollmesh.services.rollout.tool_calls.json_calls import UnterminatedCall, made_call, read_json
from rollmesh.services.rollout.tool_calls.marked import HERMES_MARKERS, MarkedStream
from rollmesh.services.rollout.tool_calls.parsing import (
    MalformedCall,
    ParsedCall,
    ToolCallParser,
    TurnStream,
    after_space,
    find_tool,
    is_name,
)

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NAMED = {"True": True, "False": False, "None": None}
"""Values as templates write them in Python's notation."""


class Qwen3CoderParser:
    """Calls in tags, between the markers of the chat format."""

    def __init__(self, *, format: ChatFormat) -> None:
        own = format.tool_call_body == "xml" and format.tool_call_start
        self._markers = (format.tool_call_start, format.tool_call_end) if own else HERMES_MARKERS

    def stream(self, tools: Sequence[ToolSchema]) -> TurnStream:
        return MarkedStream(*self._markers, lambda body: [read_tags(body, tools)])


def read_tags(text: str, tools: Sequence[ToolSchema]) -> ParsedCall:
    """Return the call of a text between the markers, in linear time. Raise `MalformedCall`."""
    text = text.strip()
    name, at = _opened(text, 0, _FUNCTION)
    types = _types(find_tool(name, tools))
    arguments: dict[str, Any] = {}
    at = _skipped(text, at)
    while not text.startswith(_FUNCTION_END, at):
        key, at = _opened(text, at, _PARAMETER)
        end = text.find(_PARAMETER_END, at)
        if end == -1:
            raise UnterminatedCall(
                f"a tool call must close the parameter {key} with {_PARAMETER_END}", value_end=_PARAMETER_END
            )
        if key in arguments:
            raise MalformedCall(f"a tool call must name each argument once, got {key} twice")
        arguments[key] = _value(text[at:end].removeprefix("\n").removesuffix("\n"), types.get(key, "string"))
        at = _skipped(text, end + len(_PARAMETER_END))
    if at + len(_FUNCTION_END) != len(text):
        raise MalformedCall(f"a tool call must end with {_FUNCTION_END}, got more text after it")
    return made_call(name, arguments)


def _opened(text: str, at: int, tag: str) -> tuple[str, int]:
    """Return the name in the tag at a place of the text, and the place after the tag."""
    end = text.find(">", at)
    name = text[at + len(tag) : end].strip() if text.startswith(tag, at) and end != -1 else ""
    if not name:
        raise MalformedCall(f"a tool call must have {tag}NAME> at this place, got {text[at : at + 40]!r}")
    return name, end + 1


def _skipped(text: str, at: int) -> int:
    """Return the place of the next character that is not white space."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _types(tool: ToolSchema | None) -> Mapping[str, Any]:
    """Return the types of the arguments that have one."""
    parameters = tool["function"].get("parameters") if tool is not None else None
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    found = properties.items() if isinstance(properties, dict) else ()
    return {name: one["type"] for name, one in found if isinstance(one, dict) and "type" in one}


def _value(text: str, type_: Any) -> Any:
    if type_ == "string":
        return text
    if text in _NAMED:
        return _NAMED[text]
    try:
        return read_json(text)
    except MalformedCall:
        return text
