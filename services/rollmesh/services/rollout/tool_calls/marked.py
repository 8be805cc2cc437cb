"""Parse tool calls between markers: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen),
`[TOOL_CALLS][...]` (Mistral), and calls whose name is outside of the JSON, such as `[TOOL_CALLS]NAME[ARGS]{...}`
(Mistral since 2025, DeepSeek).

The markers come from the model's chat format. A turn may have text around calls, and several calls. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from rollmesh.services.rollout.chat_format import ChatFormat, ToolSchema
from rollmesh.services.rollout.tool_calls.json_calls import (
    UnterminatedCall,
    calls_of,
    made_call,
    read_json,
    read_object,
)
from rollmesh.services.rollout.tool_calls.parsing import (
    MalformedCall,
    ParsedCall,
    ToolCallParser,
    TurnContent,
    TurnStream,
    after_space,
    held_suffix,
    is_name,
)

_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
"""The rest of a string of JSON, up to its end or to a backslash without the next character."""
READS_MAX = 64
"""How often a call with end markers inside its values is read. Each of them could otherwise cost the time of the whole
call."""
HERMES_MARKERS = ("<tool_call>", "</tool_call>")
MISTRAL_WORDS = ("[TOOL_CALLS]", "", "[ARGS]", "[TOOL_CALLS]")
"""Start and end of a call, what ends its name, and what stands between two calls."""


class HermesParser(ToolCallParser):
    """JSON calls between markers. If the chat format has none for JSON, they are those of Hermes."""

    def __init__(self, *, format: ChatFormat) -> None:
        own = format.tool_call_body == "json" and format.tool_call_start
        self._markers = (format.tool_call_start, format.tool_call_end) if own else HERMES_MARKERS

    def stream(self, tools: Sequence[ToolSchema]) -> TurnStream:
        return MarkedStream(*self._markers, lambda body: calls_of(read_json(body.strip()), tools))


class NamedJsonParser(ToolCallParser):
    """The name, a separator and the arguments as JSON, between markers. If the chat format has none, they are those of
    Mistral."""

    def __init__(self, *, format: ChatFormat) -> None:
        own = format.tool_call_body == "named_json" and format.tool_call_start and format.tool_call_separator
        words = (format.tool_call_start, format.tool_call_end, format.tool_call_separator, format.tool_call_next)
        self._start, self._end, separator, self._next = words if own else MISTRAL_WORDS
        self._name_end, _, self._id_end = (part.strip() for part in separator.partition("{id}"))

    def stream(self, tools: Sequence[ToolSchema]) -> TurnStream:
        return MarkedStream(self._start, self._end, self._read)

    def _read(self, body: str) -> list[ParsedCall]:
        """Return the calls of a text between the markers, in linear time. Raise `MalformedCall`."""
        calls: list[ParsedCall] = []
        at, more = 0, True
        while more:
            name_end = body.find(self._name_end, at)
            name = body[at : max(at, name_end)].strip()
            if not is_name(name):
                raise MalformedCall(f"a tool call must have a name before {self._name_end}, got {body[at : at + 40]!r}")
            at = name_end + len(self._name_end)
            if self._id_end:
                id_end = body.find(self._id_end, at)
                if id_end == -1:
                    raise MalformedCall(f"a tool call must have {self._id_end} after its id")
                at = id_end + len(self._id_end)
            arguments, at = read_object(body, at)
            calls.append(made_call(name, arguments))
            at = after_space(body, at)
            more = bool(self._next) and body.startswith(self._next, at)
            at += len(self._next) if more else 0
        if not self._end.startswith(body[at:].rstrip()):
            raise MalformedCall(f"a tool call must end after its arguments, got {body[at : at + 40]!r}")
        return calls


class MarkedStream:
    """Find the calls between markers. Without an end marker, a call ends with the turn."""

    def __init__(self, start: str, end: str, read: Callable[[str], list[ParsedCall]], *, closed: bool = False) -> None:
        """`read` returns the calls of a text between the markers, or raises MalformedCall. `closed` requires the end
        marker."""
        self.error = ""
        self._start, self._end, self._read, self._closed = start, end, read, closed
        self._content = TurnContent()
        self._text = ""
        """Text that is neither content nor a call yet. Inside a call it begins after the start marker."""
        self._inside = False
        self._searched = 0
        """Number of characters of `_text` that have no end marker, or one that is a part of the call."""
        self._in_string: bool | None = None
        """Whether `_searched` is inside a string of JSON; None until an end marker was inside one."""
        self._num_reads = 0
        """How often the call was read and had no end yet."""
        self._value_end = ""
        """What closes the value that `_searched` is inside of; empty outside of such a value."""

    def feed(self, text: str) -> list[str | ParsedCall]:
        self._text += text
        pieces: list[str | ParsedCall] = []
        while self._inside or self._start in self._text:
            if not self._inside:
                before, _, self._text = self._text.partition(self._start)
                pieces += self._content.say(before)
                self._inside = True
                self._begin_call()
            found = self._call()
            if found is None:
                return pieces
            pieces += found
        cut = len(self._text) - held_suffix(self._text, self._start)
        pieces += self._content.say(self._text[:cut])
        self._text = self._text[cut:]
        return pieces

    def finish(self) -> list[str | ParsedCall]:
        if self._inside:
            try:
                if self._closed and self._end:
                    raise MalformedCall(f"a tool call must end with {self._end}")
                pieces = self._content.call(self._read(self._text))
            except MalformedCall as err:
                self.error = str(err)
                pieces = self._content.say(self._start + self._text)
        else:
            pieces = self._content.say(self._text)
        return pieces + self._content.finish()

    def _begin_call(self) -> None:
        self._searched, self._in_string, self._value_end, self._num_reads = 0, None, "", 0

    def _call(self) -> list[str | ParsedCall] | None:
        """Return the call at the beginning of the text, or it as content if it is malformed, or None if its end is
        missing."""
        while self._end and (at := self._next_end()) != -1:
            body, rest = self._text[:at], self._text[at + len(self._end) :]
            try:
                calls = self._read(body)
            except MalformedCall as err:
                self._num_reads += 1
                if isinstance(err, UnterminatedCall) and self._num_reads < READS_MAX:
                    self._searched, self._value_end = at + len(self._end), err.value_end
                    self._in_string = None if err.value_end else True
                    continue
                self.error = str(err)
                if isinstance(err, UnterminatedCall):
                    self.error = f"a tool call must have {self._end} in fewer than {READS_MAX} of its values"
                wrong, again, _ = body.rpartition(self._start)
                if not again:
                    self._inside, self._text = False, rest
                    return self._content.say(self._start + body + self._end)
                # The call that this end closes begins at the last start marker.
                self._text = self._text[len(wrong) + len(again) :]
                self._begin_call()
                return self._content.say(self._start + wrong)
            self._inside, self._text = False, rest
            return self._content.call(calls)
        if self._end and not self._in_string and not self._value_end:
            self._searched = max(self._searched, len(self._text) - len(self._end) + 1)
        return None

    def _next_end(self) -> int:
        """Return the index of the next end marker that may end the call, or -1. A call with markers in its strings is
        read once, and not once for each marker."""
        if self._value_end:
            at = self._text.find(self._value_end, self._searched)
            if at == -1:
                self._searched = max(self._searched, len(self._text) - len(self._value_end) + 1)
                return -1
            self._searched, self._value_end = at + len(self._value_end), ""
        while self._in_string is not None:
            if self._in_string:
                found = _STRING.match(self._text, self._searched)
                self._searched = found.end() if found else self._searched
                if not self._text.startswith('"', self._searched):
                    return -1
                self._searched += 1
            quote = self._text.find('"', self._searched)
            at = self._text.find(self._end, self._searched, quote if quote != -1 else len(self._text))
            self._in_string = False
            if at != -1 or quote == -1:
                return at
            self._searched, self._in_string = quote + 1, True
        return self._text.find(self._end, self._searched)
