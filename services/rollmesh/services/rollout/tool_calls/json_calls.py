"""Read tool calls from JSON: {"name": ..., "arguments": {...} or text}, or a list of them. Pure.

Some models write "parameters" for the arguments. The text comes from a model: depth, numbers and characters that JSON
clients cannot read make a call malformed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from rollmesh.services.rollout.chat_format import ToolSchema
from rollmesh.services.rollout.tool_calls.parsing import (
    MalformedCall,
    ParsedCall,
    after_space,
    find_tool,
    text_argument,
)

_EXPECTED = "a tool call must be a JSON object with name and arguments"


class UnterminatedCall(MalformedCall):
    """The text ends inside a string of JSON, or inside a value that `value_end` closes, so a marker in it may be a part
    of that value."""

    def __init__(self, message: str, *, value_end: str = "") -> None:
        super().__init__(message)
        self.value_end = value_end


def read_json(text: str) -> Any:
    """Return the value of a JSON text. Raise `MalformedCall`."""
    return _decoded(lambda: json.loads(text, parse_constant=_reject_constant), _EXPECTED)


def read_object(text: str, at: int) -> tuple[dict[str, Any], int]:
    """Return the JSON object that begins at a place of the text, or after white space there, and the place after it.
    Raise `MalformedCall`."""
    at = after_space(text, at)
    expected = "the arguments of a tool call must be a JSON object"
    value, end = _decoded(lambda: _DECODER.raw_decode(text, at), expected)
    if not isinstance(value, dict):
        raise MalformedCall(f"{expected}, got {type(value).__name__}")
    return value, end


def _decoded(decode: Callable[[], Any], expected: str) -> Any:
    """Return what `decode` returns. Raise `MalformedCall`, which begins with what is expected, for a text that is not
    JSON."""
    try:
        return decode()
    except json.JSONDecodeError as err:
        kind = UnterminatedCall if err.msg.startswith("Unterminated string") else MalformedCall
        raise kind(f"{expected}, got JSON with an error at character {err.pos}: {err.msg}") from err
    except (ValueError, RecursionError) as err:  # a number with too many digits, or too many brackets
        raise MalformedCall(f"{expected}, got JSON that cannot be read: {err}") from err


def calls_of(value: Any, tools: Sequence[ToolSchema]) -> list[ParsedCall]:
    """Return the calls of a JSON value: one call, or a list of at least one. Raise `MalformedCall`."""
    values = value if isinstance(value, list) else [value]
    if not values:
        raise MalformedCall(f"{_EXPECTED}, got an empty list")
    return [_call(entry, tools) for entry in values]


def made_call(name: str, arguments: dict[str, Any]) -> ParsedCall:
    """Return a call whose arguments are written as JSON. Raise `MalformedCall` for values that JSON does not have."""
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        name.encode()
    except (ValueError, RecursionError) as err:
        raise MalformedCall(f"a tool call must have a name and arguments that JSON can write: {err}") from err
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:  # half of a surrogate pair, which only an escape can write
            text = json.dumps(arguments)
    return ParsedCall(name, text)


def _call(value: Any, tools: Sequence[ToolSchema]) -> ParsedCall:
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        raise MalformedCall(f"{_EXPECTED}, got no name")
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = _written_arguments(arguments) or text_argument(arguments, find_tool(name, tools))
    if arguments is not None and not isinstance(arguments, dict):
        raise MalformedCall(f"the arguments of a tool call must be an object or a text, got {type(arguments).__name__}")
    return made_call(name, arguments or {})


def _written_arguments(text: str) -> dict[str, Any] | None:
    """Return the arguments of a call that has them as the text of a JSON object, or None."""
    try:
        value = read_json(text) if text.lstrip().startswith("{") else None
    except MalformedCall:
        return None
    return value if isinstance(value, dict) else None


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


_DECODER = json.JSONDecoder(parse_constant=_reject_constant)
