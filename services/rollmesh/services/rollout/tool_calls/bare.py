"""Parse tool calls that are only a text, such as `<tool_call>1+2</tool_call>`: the first parameter of the request's
first tool. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rollmesh.services.rollout.chat_format import ChatFormat, ToolSchema
from rollmesh.services.rollout.tool_calls.json_calls import made_call
from rollmesh.services.rollout.tool_calls.marked import HERMES_MARKERS, MarkedStream
from rollmesh.services.rollout.tool_calls.parsing import (
    MalformedCall,
    ParsedCall,
    ToolCallParser,
    TurnStream,
    text_argument,
)
from rollmesh.services.rollout.tool_calls.whole_turn import WholeTurnStream


class BareParser(ToolCallParser):
    """A text between the markers of the chat format. Without a start marker, the whole turn is the call."""

    def __init__(self, *, format: ChatFormat) -> None:
        own = format.tool_call_body == "bare"
        self._start, self._end = (format.tool_call_start, format.tool_call_end) if own else HERMES_MARKERS

    def stream(self, tools: Sequence[ToolSchema]) -> TurnStream:
        def read(body: str) -> list[ParsedCall]:
            if self._start and self._start in body:
                raise MalformedCall(f"a tool call must not contain {self._start}")
            return [made_call(tools[0]["function"]["name"], text_argument(body, tools[0]))]

        def read_turn(text: str) -> list[ParsedCall]:
            if not text.endswith(self._end):
                raise MalformedCall(f"a tool call must end with {self._end}")
            return read(text.removesuffix(self._end))

        return (
            MarkedStream(self._start, self._end, read, closed=True)
            if self._start
            else WholeTurnStream(read_turn, tools)
        )
