"""Parse tool calls that have their arguments in tags, as Qwen3-Coder and GLM 4.5 write them. Pure.

    <tool_call>               <tool_call>NAME
    <function=NAME>           <arg_key>KEY</arg_key>
    <parameter=KEY>           <arg_value>VALUE</arg_value>
    VALUE                     </tool_call>
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

_NAMED = {"True": True, "False": False, "None": None}
"""Values as templates write them in Python's notation."""


@dataclass(frozen=True, slots=True)
class Tags:
    """What stands before and after the parts of a call."""

    name: tuple[str, str]
    """The name may have no tags. It then ends at the first argument."""
    key: tuple[str, str]
    value: tuple[str, str]
    end: str
    padding: str
    """A character that a value may have at each side, and that does not belong to it."""


_QWEN3_CODER = Tags(("<function=", ">"), ("<parameter=", ">"), ("", "</parameter>"), "</function>", "\n")
_GLM45 = Tags(("", ""), ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"), "", "")


class _TagParser(ToolCallParser):
    """Calls in tags, between the markers of the chat format."""

    _body: ToolCallBody
    _tags: Tags

    def __init__(self, *, format: ChatFormat) -> None:
        own = format.tool_call_body == self._body and format.tool_call_start
        self._markers = (format.tool_call_start, format.tool_call_end) if own else HERMES_MARKERS

    def stream(self, tools: Sequence[ToolSchema]) -> TurnStream:
        return MarkedStream(*self._markers, lambda body: [read_tags(body, tools, self._tags)])


class Qwen3CoderParser(_TagParser):
    """A tag per function and per argument."""

    _body, _tags = "xml", _QWEN3_CODER


class Glm45Parser(_TagParser):
    """The name as text, and a pair of tags per argument."""

    _body, _tags = "arg_tags", _GLM45


def read_tags(text: str, tools: Sequence[ToolSchema], tags: Tags) -> ParsedCall:
    """Return the call of a text between the markers, in linear time. Raise `MalformedCall`."""
    text = text.strip()
    name, at = _opened(text, 0, tags.name) if tags.name[0] else _plain_name(text, tags.key[0])
    types = _types(find_tool(name, tools))
    arguments: dict[str, Any] = {}
    at = after_space(text, at)
    while not text.startswith(tags.end, at) if tags.end else at < len(text):
        key, at = _opened(text, at, tags.key)
        opening, closing = tags.value
        if opening:
            at = after_space(text, at)
            if not text.startswith(opening, at):
                raise MalformedCall(f"a tool call must have {opening} at this place, got {text[at : at + 40]!r}")
            at += len(opening)
        end = text.find(closing, at)
        if end == -1:
            raise UnterminatedCall(f"a tool call must close the parameter {key} with {closing}", value_end=closing)
        if key in arguments:
            raise MalformedCall(f"a tool call must name each argument once, got {key} twice")
        value = text[at:end].removeprefix(tags.padding).removesuffix(tags.padding)
        arguments[key] = _value(value, types.get(key, "string"))
        at = after_space(text, end + len(closing))
    if at + len(tags.end) != len(text):
        raise MalformedCall(f"a tool call must end with {tags.end}, got more text after it")
    return made_call(name, arguments)


def _opened(text: str, at: int, tag: tuple[str, str]) -> tuple[str, int]:
    """Return the name in the tag at a place of the text, and the place after the tag."""
    opening, closing = tag
    end = text.find(closing, at)
    name = text[at + len(opening) : end].strip() if text.startswith(opening, at) and end != -1 else ""
    if not name:
        raise MalformedCall(f"a tool call must have {opening}NAME{closing} at this place, got {text[at : at + 40]!r}")
    return name, end + len(closing)


def _plain_name(text: str, key: str) -> tuple[str, int]:
    """Return the name before the first argument, and the place after it."""
    name, _, _ = text.partition(key)
    if not is_name(name.strip()):
        raise MalformedCall(f"a tool call must begin with the name of a tool, got {text[:40]!r}")
    return name.strip(), len(name)


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
