"""Derive the markers of a conversation from the model's chat template: the end of a turn, tool calls and tool results.

A template is a program. This module renders example conversations with marked texts and takes the strings around the
marks as the format. `rollout.format` overrides single markers. Pure; collaborator: `tokenizer` (renders, stores the
special tokens).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

from rollmesh.services.rollout.config import FormatConfig, ToolCallBody
from rollmesh.shared.errors import ConfigError, InvalidInput

ToolSchema = Mapping[str, Any]
"""A tool as chat templates expect it: {"type": "function", "function": {"name", "description", "parameters"}}."""
Render = Callable[..., str]
"""render(messages, tools, add_generation_prompt): text. Raises InvalidInput for a conversation that the template
rejects."""

_QUESTION, _ANSWER, _RESULT, _TOOL = "rollmesh question", "rollmesh answer", "rollmesh result", "rollmesh_tool"
_PROBES = (_TOOL, "text", _ANSWER), ("other_tool", "words", "other answer")
"""Name, argument and value of the calls whose common parts are the markers: what only one of them has is not a
marker."""
_CALL_ID = "rollmesh0"
"""Some templates require an id of nine letters or digits."""
_ID_PLACE = "{id}"
"""Stands for the id of a call in `ChatFormat.tool_call_separator`."""
_KEY = "rollout.format.turn_end"
_CALL_SHAPES: Mapping[ToolCallBody, str] = {
    "json": '{"name": NAME, "arguments": {...}}',
    "pythonic": "[NAME(ARGUMENT=VALUE)]",
    "bare": "TEXT",
    "xml": "\n<function=NAME>\n<parameter=ARGUMENT>\nVALUE\n</parameter>\n</function>\n",
    "named_json": "NAME{separator}{...}",
    "arg_tags": "NAME\n<arg_key>ARGUMENT</arg_key>\n<arg_value>VALUE</arg_value>\n",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """The markers of the conversation for one model."""

    turn_ends: tuple[str, ...]
    """Generation stops at these strings. The chat template writes the first after an assistant turn; the others are the
    model's end-of-sequence tokens."""
    tool_call_start: str
    """Opens a tool call. Empty: the whole turn is the call."""
    tool_call_end: str
    """Closes a tool call; the end of the turn follows."""
    tool_call_body: ToolCallBody
    """Content of a call: `bare` is the text for the task's first tool, `json` is {"name": ..., "arguments": {...} or
    text}, `pythonic` is `[name(argument=value, ...), ...]`, `xml` has a tag per function and argument, `named_json` is
    the name, `tool_call_separator` and the arguments as a JSON object, `arg_tags` is the name and a pair of tags per
    argument."""
    tool_call_separator: str = ""
    """Between the name and the arguments of a call of body `named_json`. `{id}` stands for the id of the call."""
    tool_call_next: str = ""
    """Between the arguments of such a call and the name of the next one in the same turn."""
    observation: str
    """Text appended after a turn to show a tool's result, up to the model's next turn. Special tokens are encoded only
    around `{text}`."""
    tool_role: str = "tool"
    assistant_role: str = "assistant"
    renders_tools: bool = True
    """False: the template ignores tools, so they are described in a system message (`tools_text`)."""
    renders_results: bool = True
    """False: the template cannot write a call and its result, so that calls and results of a request become texts."""
    arguments_as_text: bool = False
    """True: the template writes the arguments of a call only if they are JSON text, and not an object."""

    @property
    def turn_end(self) -> str:
        """The string that the chat template writes after an assistant turn."""
        return self.turn_ends[0]

    @property
    def call_opening(self) -> str:
        """The string with which a turn begins that is a call."""
        return self.tool_call_start or {"json": '{"name": "', "pythonic": "["}.get(self.tool_call_body, "")

    @property
    def frame(self) -> tuple[str, str]:
        """The strings before and after the text of an observation."""
        before, _, after = self.observation.partition("{text}")
        return before, after

    def without_end(self, text: str) -> str:
        """Return a turn's text without the token that ended it."""
        return next((text.removesuffix(end) for end in self.turn_ends if text.endswith(end)), text)


def derive_format(config: FormatConfig, render: Render, *, special: Sequence[str], eos: Sequence[str]) -> ChatFormat:
    """Return the format of a model. `special` are its special tokens, `eos` the tokens that end a sequence.

    Raise `ConfigError` if no token ends a turn, if the template does not write the configured token there, or if
    nothing would show where a call begins or its name ends.
    """
    as_text = _takes_text_only(render)
    tail = _tail(render)
    turn_end = _turn_end(config, tail, special, eos)
    call = _written_call(render, turn_end, as_text) or _Call("<tool_call>", "</tool_call>", "json")
    turn_ends = tuple(dict.fromkeys((turn_end, *eos)))
    observation = config.observation or _observation(render, turn_ends, as_text)
    words = ChatFormat(
        turn_ends=turn_ends,
        tool_call_start=call.start if config.tool_call_start is None else config.tool_call_start,
        tool_call_end=call.end if config.tool_call_end is None else config.tool_call_end,
        tool_call_body=config.tool_call_body or call.body,
        tool_call_separator=call.separator if config.tool_call_separator is None else config.tool_call_separator,
        tool_call_next=_next_call(render, as_text) if call.body == "named_json" else "",
        observation=observation,
        tool_role=config.tool_role,
        assistant_role=config.assistant_role,
        renders_tools=_renders_tools(render),
        renders_results=_renders_results(render, as_text),
        arguments_as_text=as_text,
    )
    if words.tool_call_body == "named_json":
        _check_named(words)
    return words


def _check_named(words: ChatFormat) -> None:
    for name, word, must in (
        ("tool_call_start", words.tool_call_start, "not be empty"),
        ("tool_call_separator", words.tool_call_separator, f"begin with text that ends the name, before {_ID_PLACE}"),
    ):
        if not word.partition(_ID_PLACE)[0].strip():
            raise ConfigError(
                f"`rollout.format.{name}`: must {must} for the body named_json, got {word!r}; set the key",
                key=f"rollout.format.{name}",
            )


def tools_text(tools: Sequence[ToolSchema], words: ChatFormat) -> str:
    """Describe the tools as text, for templates that ignore them."""
    described = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    body = _CALL_SHAPES[words.tool_call_body].replace("{separator}", words.tool_call_separator)
    how = f"{words.tool_call_start}{body}{words.tool_call_end}"
    return f"You can call these tools, one per turn:\n{described}\nTo call one, end your turn with {how}"


# Turns ----------------------------------------------------------------------------------------------------------------


def _tail(render: Render) -> str:
    """Return the string that the template writes after the text of an assistant turn."""
    try:
        text = render([_user(), _said(_ANSWER)], None, False)
    except InvalidInput as err:
        raise ConfigError(f"the chat template must render a question and an answer: {err}", key="model") from err
    _, found, tail = text.rpartition(_ANSWER)
    if not found:
        raise ConfigError(
            "the chat template does not write what the assistant says; use that of a chat model", key="model"
        )
    return tail


def _turn_end(config: FormatConfig, tail: str, special: Sequence[str], eos: Sequence[str]) -> str:
    found = _first_of(special, tail) or tail.strip()
    if config.turn_end is None:
        end = found or next(iter(eos), "")
        if not end:
            raise ConfigError(
                f"`{_KEY}`: the chat template writes nothing after an assistant turn and the model has no eos_token; "
                "name the token that ends a turn",
                key=_KEY,
            )
        return end
    if config.turn_end in tail:
        return config.turn_end
    why = "the chat template never writes it there" if config.turn_end in special else "the model has no such token"
    written = f"it writes {tail!r}; use {found!r}, or remove the key" if found else "it writes nothing; remove the key"
    raise ConfigError(
        f"`{_KEY}`: must be what the chat template writes after an assistant turn, got {config.turn_end!r}: {why}; "
        f"{written}",
        key=_KEY,
    )


def _first_of(tokens: Sequence[str], text: str) -> str:
    """Return the token that occurs first in `text`; of tokens at the same position the longest."""
    found = [(text.index(token), -len(token), token) for token in tokens if token and token in text]
    return min(found)[2] if found else ""


# Tools ----------------------------------------------------------------------------------------------------------------


def _observation(render: Render, turn_ends: Sequence[str], as_text: bool) -> str:
    """Return a tool's result as the template writes it, or as a user turn if the template ignores tools.

    A template that writes nothing after a turn has the tag of the next role there, which is then an eos token.
    """
    for said, result, tools in (
        (_called(as_text), _tool_result(), [_EXAMPLE]),
        (_said(_ANSWER), _tool_result(), None),
        (_said(_ANSWER), {"role": "user", "content": _RESULT}, None),
    ):
        try:
            text = render([_user(), said, result], tools, True)
        except InvalidInput:
            continue
        said_at = text.find(_ANSWER)
        at = text.find(_RESULT, max(0, said_at))
        between = text[said_at + len(_ANSWER) : at]
        end = turn_ends[0] if turn_ends[0] in between else _first_of(turn_ends, between)
        if -1 not in (said_at, at) and end:
            return f"{between.partition(end)[2]}{{text}}{text[at + len(_RESULT) :]}"
    raise ConfigError(
        "`rollout.format.observation`: the chat template renders neither a tool's result nor a second user turn; set "
        "the key",
        key="rollout.format.observation",
    )


@dataclass(frozen=True, slots=True)
class _Call:
    """What a template writes around and inside a tool call."""

    start: str
    end: str
    body: ToolCallBody
    separator: str = ""


def _written_call(render: Render, turn_end: str, as_text: bool) -> _Call | None:
    """Return the words of a tool call as the template writes it, or None if it does not write tool calls, or others."""
    found = {_markers(render, turn_end, as_text, *probe) for probe in _PROBES}
    return found.pop() if len(found) == 1 else None


def _markers(render: Render, turn_end: str, as_text: bool, name: str, key: str, value: str) -> _Call | None:
    """Return what the template writes around one call, with what belongs to the call itself if the format is not
    known."""
    tools = [_example(name, key)]
    try:
        plain = render([_user(), _said(value)], tools, False)
        text = render([_user(), _called(as_text, (name, key, value))], tools, False)
    except InvalidInput:
        return None
    turn = text[len(commonprefix([plain, text])) :]
    if value not in turn:
        return None
    end = turn.find(turn_end, turn.index(value))
    turn = turn[: end if end != -1 else None].strip()
    before, named, after = turn.partition(name)
    if f"<function={name}>" in turn and f"<parameter={key}>" in turn:
        return _Call(turn.partition("<function=")[0].strip(), turn.rpartition("</function>")[2].strip(), "xml")
    if f"[{name}(" in turn:
        start, _, rest = turn.partition("[")
        return _Call(start.strip(), rest.rpartition("]")[2].strip(), "pythonic")
    if named and "{" in before:
        start, _, _ = turn.partition("{")
        return _Call(start.strip().rstrip("[").strip(), turn.rpartition("}")[2].lstrip("]").strip(), "json")
    if before and f"<arg_key>{key}</arg_key>" in after:
        return _Call(before.strip(), after.rpartition("</arg_value>")[2].strip(), "arg_tags")
    if before and "{" in after:
        separator = after.partition("{")[0].strip().replace(_CALL_ID, _ID_PLACE)
        if not separator.partition(_ID_PLACE)[0].strip():
            return None  # nothing ends the name
        return _Call(before.strip(), after.rpartition("}")[2].strip(), "named_json", separator)
    start, _, rest = turn.partition(value)
    # A bare call without a marker cannot be distinguished from an answer.
    return _Call(start.strip(), rest.strip(), "bare") if start.strip() and rest.strip() else None


def _next_call(render: Render, as_text: bool) -> str:
    """Return what the template writes between the arguments of a call and the name of the next; empty if a turn has one
    call at most."""
    (first, _, _), (second, _, _) = _PROBES
    try:
        text = render([_user(), _called(as_text, *_PROBES)], [_example(name, key) for name, key, _ in _PROBES], False)
    except InvalidInput:
        return ""
    between = text.rpartition(first)[2].rpartition(second)[0]
    return between.rpartition("}")[2].strip()


def _renders_tools(render: Render) -> bool:
    try:
        return _TOOL in render([_user()], [_EXAMPLE], True)
    except InvalidInput:
        return False


def _takes_text_only(render: Render) -> bool:
    """Return whether the template writes a call with its arguments as text, and none with an object."""
    for as_text in (False, True):
        try:
            render([_user(), _called(as_text)], [_EXAMPLE], False)
        except InvalidInput:
            continue
        return as_text
    return False


def _renders_results(render: Render, as_text: bool) -> bool:
    try:
        return _RESULT in render([_user(), _called(as_text), _tool_result()], [_EXAMPLE], True)
    except InvalidInput:
        return False


def _tool_result() -> dict[str, Any]:
    return {"role": "tool", "name": _TOOL, "tool_call_id": _CALL_ID, "content": _RESULT}


def _user() -> dict[str, Any]:
    return {"role": "user", "content": _QUESTION}


def _said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _called(as_text: bool, *calls: tuple[str, str, str]) -> dict[str, Any]:
    """Return a turn with these calls, each a name, an argument and its value; without any, the first probe."""
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": _CALL_ID,
                "type": "function",
                "function": {"name": name, "arguments": json.dumps({key: value}) if as_text else {key: value}},
            }
            for name, key, value in calls or _PROBES[:1]
        ],
    }


def _example(name: str, key: str) -> ToolSchema:
    parameters = {"type": "object", "properties": {key: {"type": "string"}}, "required": [key]}
    return {
        "type": "function",
        "function": {"name": name, "description": "rollmesh description", "parameters": parameters},
    }


_EXAMPLE = _example(_TOOL, "text")
