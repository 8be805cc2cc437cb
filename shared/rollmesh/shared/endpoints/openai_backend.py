"""Requests to a server of the OpenAI chat protocol: `POST {base_url}/chat/completions`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from rollmesh.shared.domain.trajectory import FinishReason
from rollmesh.shared.endpoints.answer import AskedMessage, AskedPrompt, EndpointCall, ModelReply
from rollmesh.shared.endpoints.config import EndpointConfig
from rollmesh.shared.errors import Internal
from rollmesh.shared.net.http_link import HttpLink, decoded

_PATH = "/chat/completions"
_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class _ChatFunction(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    arguments: str


class _ChatCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    function: _ChatFunction


class _ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    content: str | None = None
    tool_calls: list[_ChatCall] | None = None


class _ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    message: _ChatMessage
    finish_reason: str | None = None


class _ChatUsage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    choices: msgspec.Raw
    """[_ChatChoice], decoded after `usage` is known, because choices of another form are billed too."""
    usage: _ChatUsage | None = None
    model: str | None = None


class OpenAiBackend:
    """Implements `ModelBackend` for one server."""

    def __init__(self, config: EndpointConfig, link: HttpLink) -> None:
        self._config = config
        self._link = link

    @classmethod
    async def open(cls, config: EndpointConfig, base_dir: Path) -> OpenAiBackend:
        """Raises ConfigError for a key that cannot be read, or a missing library. Sends nothing."""
        link = HttpLink(
            config.base_url, api_key=config.key(base_dir), connections_max=config.concurrency, call_s=config.timeout_s
        )
        await link.open()
        return cls(config, link)

    async def ask(self, asked: AskedPrompt, *, seed: int) -> ModelReply:
        completion = await self._link.post(_PATH, self._body(asked), _ChatCompletion)
        usage = completion.usage
        reply = ModelReply(
            text="",
            finish=FinishReason.UNFINISHED,
            prompt_tokens=None if usage is None else usage.prompt_tokens,
            completion_tokens=None if usage is None else usage.completion_tokens,
            model=completion.model or self._config.model,
        )
        try:
            return self._answer(asked, completion.choices, reply)
        except Internal as err:
            return replace(reply, problem=str(err))

    def _answer(self, asked: AskedPrompt, body: msgspec.Raw, reply: ModelReply) -> ModelReply:
        """Return the reply with the first choice. Raise Internal if that is not an answer."""
        name = f"POST {self._link.url}{_PATH}"
        choices = decoded(bytes(body), list[_ChatChoice], name)
        if not choices:
            raise Internal(f"{name}: the response is not as expected: `choices` is empty")
        choice = choices[0]
        calls = tuple(
            EndpointCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
            for call in (choice.message.tool_calls or ())
            if asked.tools
        )
        finish = FinishReason.STOP if calls else _FINISH.get(choice.finish_reason or "")
        if finish is None or (choice.message.content is None and not calls):
            raise Internal(
                f"{name}: the response has no text: its finish_reason is {choice.finish_reason!r}, expected 'stop' or "
                "'length'"
            )
        return replace(reply, text=choice.message.content or "", finish=finish, calls=calls)

    async def close(self) -> None:
        await self._link.close()

    def _body(self, asked: AskedPrompt) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._config.model,
            "messages": [_message(message) for message in asked.messages],
            "temperature": asked.temperature,
            "max_tokens": asked.max_tokens,
            "top_p": asked.top_p if asked.top_p != 1 else None,
            "tools": list(asked.tools) or None,
            "tool_choice": asked.tool_choice if asked.tools and asked.tool_choice != "auto" else None,
            "stop": list(asked.stop) or None,
            "response_format": {"type": "json_object"} if asked.json else None,
            **self._config.request,
        }
        return {name: value for name, value in body.items() if value is not None}


def _message(message: AskedMessage) -> dict[str, Any]:
    """Return a message as the protocol writes it."""
    written: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.calls:
        written["content"] = message.content or None
        written["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.calls
        ]
    if message.name:
        written["name"] = message.name
    if message.call_id:
        written["tool_call_id"] = message.call_id
    return written
