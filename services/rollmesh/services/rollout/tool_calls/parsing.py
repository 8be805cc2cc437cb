"""Define what a parser of tool calls is: it makes content and calls from the text of a turn, piece by piece.

A turn is parsed in one way only. `parse_turn` feeds the whole text to the stream that a streaming reply feeds in
pieces, so both give the same content and the same calls, wherever the pieces are cut. Content is returned as soon as it
cannot belong to a call, and a call as soon as it is complete. A malformed call stays in the content, so that no text is
lost; `error` describes it. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from rollmesh.services.rollout.chat_format import ToolSchema
from rollmesh.shared.config.plugin import Plugin, required


class ParsedCall(msgspec.Struct, frozen=True):
    """A call of a tool, as the model wrote it."""

    name: str
    """Not necessarily the name of a tool of the request."""
    arguments: str
    """A JSON object."""


class ParsedTurn(msgspec.Struct, frozen=True):
    """The content and the calls of a turn."""

    content: str
    """Text outside of calls. Without calls, exactly the text of the turn. Otherwise without white space at both sides
    of a call."""
    calls: tuple[ParsedCall, ...] = ()
    error: str = ""
    """What is wrong with the last malformed call, or empty."""


class TurnStream(Protocol):
    """The parser of one turn."""

    @property
    def error(self) -> str:
        """What is wrong with the last malformed call, or empty."""
        ...

    def feed(self, text: str) -> list[str | ParsedCall]:
        """Return what became complete with the next piece of text. No part of the content is empty."""
        ...

    def finish(self) -> list[str | ParsedCall]:
        """Return the rest at the end of the turn."""
        ...


class ToolCallParser(Plugin):
    """Base of parsers of one format of tool calls. A class gets the markers of the model's conversation as `format:
    ChatFormat`."""

    @required
    def stream(self, tools: Sequence[ToolSchema]) -> TurnStream:
        """Begin a turn. `tools` are those of the request, never empty."""
        raise NotImplementedError


class MalformedCall(ValueError):
    """The text between the markers of a call is not a call. The message is for the model."""


def parse_turn(parser: ToolCallParser, text: str, tools: Sequence[ToolSchema]) -> ParsedTurn:
    """Return content and calls of a whole turn, without the string that ended it. Without tools, all of it is
    content."""
    if not tools:
        return ParsedTurn(text)
    stream = parser.stream(tools)
    pieces = [*stream.feed(text), *stream.finish()]
    return ParsedTurn(
        content="".join(piece for piece in pieces if isinstance(piece, str)),
        calls=tuple(piece for piece in pieces if isinstance(piece, ParsedCall)),
        error=stream.error,
    )


class TurnContent:
    """Collect what a turn says outside of calls, and hold white space back until it is known whether a call follows."""

    def __init__(self) -> None:
        self._held: list[str] = []
        self._num_calls = 0

    def say(self, text: str) -> list[str | ParsedCall]:
        """Return the content up to the last character that is not white space."""
        said = text.rstrip()
        if not said:
            self._held.append(text)
            return []
        said, self._held = "".join((*self._held, said)), [text[len(said) :]]
        return [said]

    def call(self, calls: Sequence[ParsedCall]) -> list[str | ParsedCall]:
        """Return the calls, and drop the white space before them."""
        self._held = []
        self._num_calls += len(calls)
        return list(calls)

    def finish(self) -> list[str | ParsedCall]:
        """Return held white space if the turn is content alone."""
        held = "".join(self._held)
        return [held] if held and not self._num_calls else []


def held_suffix(text: str, marker: str) -> int:
    """Return the length of the longest end of `text` with which `marker` may begin."""
    most = min(len(text), len(marker) - 1)
    return next((size for size in range(most, 0, -1) if marker.startswith(text[-size:])), 0)


def text_argument(text: str, tool: ToolSchema | None) -> dict[str, Any]:
    """Return the arguments of a call that is only a text: the tool's first parameter has it, or else `text`."""
    function: Mapping[str, Any] = tool.get("function", {}) if tool is not None else {}
    parameters = function.get("parameters") or {}
    # The client has written them, and they may be any JSON.
    given = [parameters.get(key) for key in ("required", "properties")]
    names = [name for names in given if isinstance(names, (list, tuple, dict)) for name in names]
    return {next((name for name in names if isinstance(name, str)), "text"): text}


def after_space(text: str, at: int) -> int:
    """Return the place of the next character that is not white space."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def is_name(text: str) -> bool:
    """Return whether a text outside of JSON can be the name of a tool. What has white space, brackets or quotes is
    something else."""
    return bool(text) and not _NOT_IN_NAMES.search(text)


_NOT_IN_NAMES = re.compile(r"[\s{}<>\[\]\"]")


def find_tool(name: str, tools: Sequence[ToolSchema]) -> ToolSchema | None:
    """Return the tool of this name, or None."""
    return next((tool for tool in tools if tool["function"]["name"] == name), None)
