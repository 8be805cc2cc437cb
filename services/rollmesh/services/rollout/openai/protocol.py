"""Read the requests of the OpenAI protocol: chat completions and completions. Pure.

A request asks for what the engine can do, or it is rejected with the name of the field. Fields that are only hints are
ignored (`_IGNORED`). Collaborators: `fields` (errors that name the field), `replies` (what the server sends back).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from rollmesh.services.rollout.chat_format import ToolSchema
from rollmesh.services.rollout.conversation import ChatMessage, RequestedCall
from rollmesh.services.rollout.openai.fields import read_fields, read_object
from rollmesh.shared.errors import field_error

CHOICES_MAX = 128
MESSAGES_MAX = 4096
"""Maximum number of messages of a request with their calls and parts of content. Each costs the event loop of the
worker some 0.1 ms."""
TOOLS_MAX = 512
"""Maximum number of tools of a request."""
STOPS_MAX = 16
"""Maximum number of stop strings of a request."""

_ALL: tuple[Any, ...] = ()
_IGNORED = dict.fromkeys(
    (
        "seed",
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
    ),
    _ALL,
)
"""Hints. The server samples with the seed of the episode, so that a retry draws the same tokens."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **_IGNORED,
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "logit_bias": ({},),
}
_CHAT_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **_NEUTRAL,
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "top_logprobs": (0,),
    "parallel_tool_calls": (True,),
}
_COMPLETION_NEUTRAL: dict[str, tuple[Any, ...]] = {**_NEUTRAL, "echo": (False,), "best_of": (1,), "suffix": ("",)}
_REMEDIES = {
    "functions": "use `tools`",
    "function_call": "use `tools` and `tool_choice`, or `tool_calls` in a message",
    "audio": "send text",
}
_ROLES = ("system", "developer", "user", "assistant", "tool")

Temperature = Annotated[float, Meta(ge=0, le=2)]
Probability = Annotated[float, Meta(gt=0, le=1)]
Count = Annotated[int, Meta(ge=1)]
_TokenId = Annotated[int, Meta(ge=0, lt=2**31)]


class SamplingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a request says about sampling. None means the setting of `rollout.sampling`."""

    max_tokens: int | None = None
    """Maximum number of new tokens."""
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    """Strings at which generation stops, in addition to the end of a turn. The reply does not contain them."""
    n: int = 1
    """Number of choices."""
    logprobs: bool = False
    """Whether the reply has the log-probs of the sampled tokens."""
    stream: bool = False
    include_usage: bool = False
    """Whether a stream ends with a chunk that has the usage."""


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for chat completions."""

    model: str
    messages: tuple[ChatMessage, ...]
    """At least one."""
    tools: tuple[ToolSchema, ...] = ()
    """The tools of the prompt, as chat templates expect them."""
    parse_calls: bool = False
    """Whether the turn is parsed for calls: there are tools, and `tool_choice` is not none."""
    begin_call: bool = False
    """Whether the turn begins with the opening of a call, because `tool_choice` requires one."""
    sampling: SamplingRequest


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for completions of a text without a chat template."""

    model: str
    prompt: str | tuple[int, ...]
    """A text, or token ids, which are not negative. They may be outside of the vocabulary."""
    sampling: SamplingRequest


def chat_request(body: bytes) -> ChatRequest:
    """Read the body of POST /v1/chat/completions. Raise `InvalidInput`; its violation names the field."""
    fields = read_fields(_ChatFields, read_object(body), neutral=_CHAT_NEUTRAL, remedies=_REMEDIES)
    parts = [message.get(name) for message in fields.messages for name in ("tool_calls", "content")]
    num_parts = len(fields.messages) + sum(len(part) for part in parts if isinstance(part, list))
    for name, num, most in (("messages", num_parts, MESSAGES_MAX), ("tools", len(fields.tools), TOOLS_MAX)):
        if num > most:
            raise field_error(name, f"have at most {most} elements, with their calls and parts of content", num)
    if not fields.messages:
        raise field_error("messages", "have at least one message", None)
    if fields.max_tokens is not None and fields.max_completion_tokens not in (None, fields.max_tokens):
        must = f"equal max_completion_tokens = {fields.max_completion_tokens}"
        raise field_error("max_tokens", must, fields.max_tokens, "remove it")
    tools = tuple(read_tool(tool, f"tools[{number}]") for number, tool in enumerate(fields.tools))
    choice = _tool_choice(fields.tool_choice, tools)
    return ChatRequest(
        model=fields.model,
        messages=tuple(read_message(message, f"messages[{number}]") for number, message in enumerate(fields.messages)),
        tools=tools,
        parse_calls=bool(tools) and choice != "none",
        begin_call=choice == "required",
        sampling=_sampling(fields, fields.max_completion_tokens or fields.max_tokens, fields.logprobs),
    )


def completion_request(body: bytes) -> CompletionRequest:
    """Read the body of POST /v1/completions. Raise `InvalidInput`; its violation names the field."""
    fields = read_fields(_CompletionFields, read_object(body), neutral=_COMPLETION_NEUTRAL, remedies=_REMEDIES)
    prompt: Any = fields.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        (prompt,) = prompt
    if not prompt or not (isinstance(prompt, str) or all(isinstance(token, int) for token in prompt)):
        must = "be one non-empty text or list of token ids"
        raise field_error("prompt", must, fields.prompt, "send one request per prompt")
    return CompletionRequest(
        model=fields.model,
        prompt=prompt if isinstance(prompt, str) else tuple(prompt),
        sampling=_sampling(fields, fields.max_tokens, fields.logprobs is not None),
    )


# Fields as clients write them -----------------------------------------------------------------------------------------


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False
    include_obfuscation: bool = False


class _SharedFields(msgspec.Struct, kw_only=True):
    model: str
    max_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    stop: str | Annotated[list[str], Meta(max_length=STOPS_MAX)] = msgspec.field(default_factory=list)
    n: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] = 1
    stream: bool = False
    stream_options: _StreamOptions = msgspec.field(default_factory=_StreamOptions)


class _ChatFields(_SharedFields, kw_only=True):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    max_completion_tokens: Count | None = None
    logprobs: bool = False


class _CompletionFields(_SharedFields, kw_only=True):
    prompt: str | list[_TokenId | str | list[_TokenId]]
    logprobs: Annotated[int, Meta(ge=0, le=0)] | None = None


class _MessageFields(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[dict[str, Any]] = ""
    name: str = ""
    tool_calls: list[dict[str, Any]] = msgspec.field(default_factory=list)
    tool_call_id: str = ""
    reasoning_content: str = ""


class _CallFields(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: _CalledFunction
    index: int = 0


class _CalledFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: str


class _ToolFields(msgspec.Struct, kw_only=True):
    type: str
    function: dict[str, Any]


class _FunctionFields(msgspec.Struct, kw_only=True):
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    description: str = ""
    parameters: dict[str, Any] = msgspec.field(default_factory=dict)


class _TextPart(msgspec.Struct, kw_only=True):
    type: str
    text: str = ""


def _sampling(fields: _SharedFields, max_tokens: int | None, logprobs: bool) -> SamplingRequest:
    stop = [fields.stop] if isinstance(fields.stop, str) else fields.stop
    if "" in stop:
        raise field_error("stop", "not contain an empty string", stop)
    return SamplingRequest(
        max_tokens=max_tokens,
        temperature=fields.temperature,
        top_p=fields.top_p,
        stop=tuple(dict.fromkeys(stop)),
        n=fields.n,
        logprobs=logprobs,
        stream=fields.stream,
        include_usage=fields.stream and fields.stream_options.include_usage,
    )


# Messages -------------------------------------------------------------------------------------------------------------


_MESSAGE_NEUTRAL: dict[str, tuple[Any, ...]] = {"refusal": ("",), "annotations": ([],), "reasoning": ("",)}


def read_message(value: Mapping[str, Any], at: str) -> ChatMessage:
    fields = read_fields(_MessageFields, value, neutral=_MESSAGE_NEUTRAL, remedies=_REMEDIES, at=at)
    if fields.role not in _ROLES:
        raise field_error(f"{at}.role", f"be one of {', '.join(_ROLES)}", fields.role)
    for name, role in (("tool_calls", "assistant"), ("reasoning_content", "assistant"), ("tool_call_id", "tool")):
        if getattr(fields, name) and fields.role != role:
            raise field_error(f"{at}.{name}", f"be in a message of role {role}", fields.role)
    if fields.role == "tool" and not fields.tool_call_id:
        raise field_error(f"{at}.tool_call_id", "be set in a message of role tool", None, "send the id of the call")
    if fields.role != "assistant" and value.get("content") is None:
        raise field_error(f"{at}.content", f"be set in a message of role {fields.role}", None)
    return ChatMessage(
        role="system" if fields.role == "developer" else fields.role,
        content=fields.content if isinstance(fields.content, str) else _joined(fields.content, f"{at}.content"),
        calls=tuple(_call(call, f"{at}.tool_calls[{number}]") for number, call in enumerate(fields.tool_calls)),
        call_id=fields.tool_call_id,
        name=fields.name,
        reasoning=fields.reasoning_content,
    )


def _joined(parts: Sequence[Mapping[str, Any]], at: str) -> str:
    """Return the text of a content that is a list of parts, one per line."""
    texts = []
    for number, value in enumerate(parts):
        if value.get("type") != "text":
            must = "be text, because the model reads only text"
            raise field_error(f"{at}[{number}].type", must, value.get("type"))
        texts.append(read_fields(_TextPart, value, neutral={}, remedies={}, at=f"{at}[{number}]").text)
    return "\n".join(texts)


def _call(value: Mapping[str, Any], at: str) -> RequestedCall:
    fields = read_fields(_CallFields, value, neutral={}, remedies={}, at=at)
    return RequestedCall(id=fields.id, name=fields.function.name, arguments=fields.function.arguments)


# Tools ----------------------------------------------------------------------------------------------------------------


def read_tool(value: Mapping[str, Any], at: str) -> ToolSchema:
    """Return a tool as chat templates expect it, as the client wrote it.

    `strict` is a hint that is not passed on: the model may write other arguments, which the client validates.
    """
    if value.get("type") != "function":
        raise field_error(f"{at}.type", "be function", value.get("type"), "describe the tool as a function")
    function = read_fields(_ToolFields, value, neutral={}, remedies={}, at=at).function
    read_fields(_FunctionFields, function, neutral={"strict": _ALL}, remedies={}, at=f"{at}.function")
    kept = {name: part for name, part in function.items() if part is not None and name != "strict"}
    return {"type": "function", "function": kept}


def _tool_choice(choice: str | Mapping[str, Any], tools: Sequence[ToolSchema]) -> Literal["auto", "none", "required"]:
    names = [tool["function"]["name"] for tool in tools]
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        named = choice.get("function")
        if isinstance(named, Mapping) and names == [named.get("name")]:
            choice = "required"
    if choice not in ("auto", "none", "required"):
        must = (
            "be auto, none, required or the function of the only tool, because a turn can begin with a call but its "
            "name cannot be forced"
        )
        raise field_error("tool_choice", must, choice, "send required, with the tools that may be called")
    if choice == "required" and not tools:
        raise field_error("tool_choice", "be auto or none without tools", choice, "send the tools")
    return "none" if choice == "none" or not tools else "required" if choice == "required" else "auto"
