"""Choose the parser of tool calls for a model, by the markers of its chat template or by the configuration."""

from __future__ import annotations

from pathlib import Path

from rollmesh.services.rollout.chat_format import ChatFormat
from rollmesh.services.rollout.tool_calls.parsing import ToolCallParser
from rollmesh.shared.registry import Extension, Registry

TOOL_CALL_PARSERS = Registry(
    "tool call parser",
    {
        "hermes": "rollmesh.services.rollout.tool_calls.marked:HermesParser",
        "llama3_json": "rollmesh.services.rollout.tool_calls.whole_turn:Llama3JsonParser",
        "llama_pythonic": "rollmesh.services.rollout.tool_calls.whole_turn:LlamaPythonicParser",
        "bare": "rollmesh.services.rollout.tool_calls.bare:BareParser",
    },
)


def tool_call_parser(
    format: ChatFormat, chosen: Extension | None = None, base_dir: str | Path | None = None
) -> ToolCallParser:
    """Return the chosen parser, or the one for the calls that the model's chat template writes. Raise ConfigError."""
    parser: ToolCallParser = TOOL_CALL_PARSERS.make(chosen or _written_by(format), base_dir, format=format)
    return parser


def _written_by(format: ChatFormat) -> str:
    if format.tool_call_body == "bare":
        return "bare"
    if format.tool_call_body == "pythonic":
        return "llama_pythonic"
    return "hermes" if format.tool_call_start else "llama3_json"
