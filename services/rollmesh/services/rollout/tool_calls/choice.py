"""Choose the parser of tool calls for a model, by the markers of its chat template or by the configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from rollmesh.services.rollout.chat_format import ChatFormat, ToolSchema
from rollmesh.services.rollout.config import ToolCallBody
from rollmesh.services.rollout.conversation import ChatMessage, RequestedCall, turn_tokens
from rollmesh.services.rollout.tokenizer import Tokenizer
from rollmesh.services.rollout.tool_calls.parsing import ToolCallParser, parse_turn
from rollmesh.shared.config.registry import Extension, Registry
from rollmesh.shared.errors import InvalidInput

TOOL_CALL_PARSERS = Registry(
    "tool call parser",
    {
        "hermes": "rollmesh.services.rollout.tool_calls.marked:HermesParser",
        "llama3_json": "rollmesh.services.rollout.tool_calls.whole_turn:Llama3JsonParser",
        "llama_pythonic": "rollmesh.services.rollout.tool_calls.whole_turn:LlamaPythonicParser",
        "qwen3_coder": "rollmesh.services.rollout.tool_calls.xml_calls:Qwen3CoderParser",
        "glm45": "rollmesh.services.rollout.tool_calls.xml_calls:Glm45Parser",
        "named_json": "rollmesh.services.rollout.tool_calls.marked:NamedJsonParser",
        "bare": "rollmesh.services.rollout.tool_calls.bare:BareParser",
    },
    ToolCallParser,
)


def tool_call_parser(
    format: ChatFormat, chosen: Extension | None = None, base_dir: str | Path | None = None
) -> ToolCallParser:
    """Return the chosen parser, or the one for the calls that the model's chat template writes. Raise ConfigError."""
    parser: ToolCallParser = TOOL_CALL_PARSERS.make(chosen or _written_by(format), base_dir, format=format)
    return parser


def why_unread(tokenizer: Tokenizer, parser: ToolCallParser) -> str:
    """Return why the parser does not read a call that the chat template writes; empty if it does.

    A call that the parser takes for text would be shown to a client, or end the episode, as the model's answer.
    """
    is_bare = tokenizer.format.tool_call_body == "bare"
    for function, arguments in _BARE_CALLS if is_bare else _CALLS:
        call = RequestedCall(id="rollmesh1", name=function["function"]["name"], arguments=json.dumps(arguments))
        question, turn = ChatMessage(role="user", content="hello"), ChatMessage(role="assistant", calls=(call,))
        try:
            written = tokenizer.decode(turn_tokens(tokenizer, [question], turn, [function]))
        except InvalidInput as err:
            return err.message
        text = tokenizer.format.without_end(written)
        calls = parse_turn(parser, text, [function]).calls
        if [(found.name, json.loads(found.arguments)) for found in calls] != [(call.name, arguments)]:
            return (
                f"the chat template writes a call as {text.strip()!r}, from which {type(parser).__name__} reads "
                f"{len(calls)} calls, or others"
            )
    return ""


def _tool(name: str, **types: str) -> ToolSchema:
    properties = {key: {"type": type_} for key, type_ in types.items()}
    parameters = {"type": "object", "properties": properties, "required": list(types)}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


_BARE_CALLS = ((_tool("add", text="string"), {"text": "1+2"}), (_tool("look_up", words="string"), {"words": "a b"}))
_CALLS = (
    *_BARE_CALLS,
    (_tool("plan", days="integer", places="array"), {"days": 2, "places": ["Bern", "x, y"]}),
)


def _written_by(format: ChatFormat) -> str:
    if format.tool_call_body == "json":
        return "hermes" if format.tool_call_start else "llama3_json"
    return _PARSERS[format.tool_call_body]


_PARSERS: Mapping[ToolCallBody, str] = {
    "bare": "bare",
    "xml": "qwen3_coder",
    "pythonic": "llama_pythonic",
    "arg_tags": "glm45",
    "named_json": "named_json",
}
