"""What is asked of an endpoint, and its answer."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, TypedDict, Unpack

import msgspec

from rollmesh.shared.domain.trajectory import FinishReason, Message


class EndpointCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call that a model wrote."""

    id: str
    name: str
    arguments: str
    """JSON as the model wrote it."""


class AskedMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message of a request. Only endpoints of kind `openai` read more of it than `role` and `content`."""

    role: str
    content: str = ""
    name: str = ""
    calls: tuple[EndpointCall, ...] = ()
    """In a message of the assistant: the calls that it made."""
    call_id: str = ""
    """In a message of a tool: the call whose result it is."""


Messages = str | Sequence[Message | AskedMessage]
"""A conversation, or the text of one message of the user."""


class AskedPrompt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request to an endpoint, independent of its kind."""

    messages: tuple[AskedMessage, ...]
    temperature: float
    max_tokens: int
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    json: bool = False
    """Whether the answer must be a JSON value."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tools in the form of the OpenAI protocol. Only for endpoints of kind `openai`."""
    tool_choice: Literal["auto", "none"] = "auto"

    def digest(self, endpoint: str, model: str, further: Mapping[str, Any]) -> str:
        """Return a hash of the request to one endpoint. `further` are the fields that the endpoint adds."""
        parts = [endpoint, model, msgspec.to_builtins(self), dict(further)]
        return hashlib.sha256(msgspec.json.encode(parts, order="sorted")).hexdigest()


class ModelReply(msgspec.Struct, frozen=True, kw_only=True):
    """What a model returned."""

    text: str
    finish: FinishReason
    prompt_tokens: int | None
    """None if the server does not report the use of tokens."""
    completion_tokens: int | None
    calls: tuple[EndpointCall, ...] = ()
    """The calls of the tools of the request that it wrote."""
    model: str = ""
    """The model that answered: as its server names it, or POLICY@STEP of weights on inference nodes."""
    problem: str = ""
    """Why the response is not an answer; empty if it is one. Its price is counted in both cases."""


class EndpointAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of an endpoint."""

    text: str
    """Without the string that ended it."""
    finish: FinishReason
    """STOP, or LENGTH if the token limit cut it."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    price: float = 0.0
    """Price of the request; 0 for a recorded answer."""
    latency_s: float = 0.0
    """Time from the request to the answer with waits and retries, in seconds."""
    replayed: bool = False
    """Whether it is a recorded answer."""
    value: Any = None
    """The JSON value of the text, if the request asked for one."""
    calls: tuple[EndpointCall, ...] = ()
    """Calls of the tools of the request. Beside calls, the text may be empty."""
    model: str = ""
    """The model that answered: as its server names it, or POLICY@STEP of weights on inference nodes."""


class ModelBackend(Protocol):
    """Sends the requests of one endpoint."""

    async def ask(self, asked: AskedPrompt, *, seed: int) -> ModelReply:
        """Send one request and wait for its answer at most `timeout_s`. `seed` is that of its sampling, if the model
        has one.

        A response that is not an answer, and has its use of tokens, is a reply with a `problem`. Raises MeshError.
        """
        ...

    async def close(self) -> None: ...


class AskOptions(TypedDict, total=False):
    """How scorers and task sources ask. What is omitted comes from the table of endpoints."""

    temperature: float | None
    max_tokens: int | None
    stop: Sequence[str]
    json: bool
    """The text must be a JSON value."""


class Asks(Protocol):
    """The part of `rollmesh.shared.endpoints.client.Endpoints` that scorers use."""

    async def ask(self, endpoint: str, messages: Messages, **options: Unpack[AskOptions]) -> EndpointAnswer:
        """Return the answer of an endpoint. Raise EndpointFailed, PriceLimit or UnknownEndpoint."""
        ...


class AsksBlocking(Protocol):
    """The same for task sources, which are not asynchronous."""

    def ask(self, endpoint: str, messages: Messages, **options: Unpack[AskOptions]) -> EndpointAnswer:
        """Return the answer of an endpoint of kind `openai` with `replay`. Raise EndpointFailed, PriceLimit or
        ConfigError."""
        ...
