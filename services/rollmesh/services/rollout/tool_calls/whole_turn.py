"""Parse turns that are nothing but calls: JSON objects (Llama 3), a list of Python calls (Llama 3.2 and 4), or a text.
Pure.

Without markers, an answer may look like a call. A turn is therefore a call only if all of it is, and if it names tools
of the request. Its text is held back while it may still be one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from rollmesh.services.rollout.chat_format import ChatFormat, ToolSchema
from rollmesh.services.rollout.tool_calls.json_calls import calls_of, read_json
from rollmesh.services.rollout.tool_calls.parsing import (
    MalformedCall,
    ParsedCall,
    ToolCallParser,
    TurnStream,
    find_tool,
)
from rollmesh.services.rollout.tool_calls.python_calls import read_python_calls

Markers = tuple[str, str]
"""The strings around the calls of a turn."""
_PYTHON_TAG = ("<|python_tag|>", "")
"""Llama 3 writes it before some calls."""
_PYTHON_MARKERS = ("<|python_start|>", "<|python_end|>")
"""Llama 4 writes them around the list."""


class Llama3JsonParser(ToolCallParser):
    """`{"name": ..., "parameters": {...}}`, several of them separated by `;` or white space, or a list of them."""

    def __init__(self, *, format: ChatFormat) -> None:
        own = (format.tool_call_start, format.tool_call_end)
        self._markers = (own, _PYTHON_TAG) if format.tool_call_body == "json" else (_PYTHON_TAG,)

    def stream(self, tools: Sequence[ToolSchema]) -> TurnStream:
        return WholeTurnStream(lambda text: read_objects(text, tools), tools, markers=self._markers, first="{[")


class LlamaPythonicParser(ToolCallParser):
    """`[name(argument=value, ...), ...]`, whose values are Python literals."""

    def __init__(self, *, format: ChatFormat) -> None:
        own = (format.tool_call_start, format.tool_call_end)
        self._markers = (own, _PYTHON_MARKERS) if format.tool_call_body == "pythonic" else (_PYTHON_MARKERS,)

    def stream(self, tools: Sequence[ToolSchema]) -> TurnStream:
        return WholeTurnStream(read_python_calls, tools, markers=self._markers, first="[")


class WholeTurnStream:
    """Hold a turn until it ends, or until it cannot be a call any more."""

    def __init__(
        self,
        read: Callable[[str], list[ParsedCall]],
        tools: Sequence[ToolSchema],
        *,
        markers: Sequence[Markers] = (),
        first: str = "",
    ) -> None:
        """`read` returns the calls of a turn, or raises MalformedCall. `first` are the characters with which a call
        begins, after the start marker if there is one; empty allows all."""
        self.error = ""
        self._read, self._tools, self._first = read, tools, first
        own = {pair for pair in markers if pair[0]}
        self._markers = tuple(sorted(own, key=lambda pair: (-len(pair[0]), pair)))
        self._text = ""
        self._parts: list[str] = []
        """The text after `_text`, which cannot change what the turn is."""
        self._is_content = False
        self._is_call = False
        """Whether the beginning is that of a call, so that it is not read again for each token."""

    def feed(self, text: str) -> list[str | ParsedCall]:
        if self._is_content:
            return [text] if text else []
        self._parts.append(text)
        if self._is_call or not text.strip():
            return []
        self._join()
        if self._may_be_call():
            return []
        self._is_content = True
        return [self._text]

    def finish(self) -> list[str | ParsedCall]:
        self._join()
        if self._is_content or not self._text:
            return []
        marked, body = self._split()
        try:
            calls = self._read(body)
        except MalformedCall as err:
            self.error = str(err) if marked else ""  # without a marker it is an answer
            return [self._text]
        known = all(find_tool(call.name, self._tools) is not None for call in calls)
        return list(calls) if calls and known else [self._text]

    def _join(self) -> None:
        self._text, self._parts = "".join((self._text, *self._parts)), []

    def _may_be_call(self) -> bool:
        text = self._text.lstrip()
        _, body = self._split()
        self._is_call = not self._first or (body != "" and body[0] in self._first)
        return self._is_call or any(start.startswith(text) for start, _ in self._markers) or not body

    def _split(self) -> tuple[bool, str]:
        """Return whether the turn begins with a marker, and the turn without white space and markers at its ends."""
        text = self._text.strip()
        start, end = next((pair for pair in self._markers if text.startswith(pair[0])), ("", ""))
        return bool(start), text.removeprefix(start).removesuffix(end).strip()


def read_objects(text: str, tools: Sequence[ToolSchema]) -> list[ParsedCall]:
    """Return the calls of a turn of JSON objects. Raise `MalformedCall`."""
    decoder = json.JSONDecoder()
    calls: list[ParsedCall] = []
    while text:
        try:
            _, end = decoder.raw_decode(text)
        except (ValueError, RecursionError) as err:
            raise MalformedCall(f"a tool call must be JSON: {err}") from err
        calls += calls_of(read_json(text[:end]), tools)
        text = text[end:].lstrip().removeprefix(";").lstrip()
    return calls
