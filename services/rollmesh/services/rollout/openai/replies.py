"""Write what the server sends in the OpenAI protocol: replies, chunks of a stream, the list of models, and errors.
Pure.

All functions return JSON as bytes; chunks are server-sent events.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal

import msgspec
import numpy as np

from rollmesh.services.rollout.agent_types import LimitReached, Turn
from rollmesh.services.rollout.conversation import ChatMessage, RequestedCall
from rollmesh.services.rollout.openai.openai_errors import EpisodeEnded, MethodNotAllowed, UnknownModel
from rollmesh.services.rollout.tokenizer import Tokenizer
from rollmesh.shared.domain.trajectory import FinishReason, FloatArray, IntArray
from rollmesh.shared.error_base import Code, MeshError
from rollmesh.shared.errors import PayloadTooLarge, Unauthenticated

Finish = Literal["stop", "length", "tool_calls"]

DONE = b"data: [DONE]\n\n"
"""The last event of a stream."""
_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"
_CALL_ID_CHARS = 9


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    """Sampled tokens of all choices."""

    def counts(self) -> dict[str, int]:
        """Return the counts as the protocol names them."""
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
        }


class ReplyHead(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that all parts of one reply share."""

    id: str
    """Unique, such as `chatcmpl-` with the ids of episode and turn."""
    created: int
    """Unix time, seconds."""
    model: str
    """As the request names it."""

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a reply."""

    message: ChatMessage
    """The turn as the client knows it from now on."""
    finish: Finish
    logprobs: tuple[dict[str, Any], ...] | None = None
    """From `token_logprobs`, or None if the request does not ask for them."""


def finish_of(finish: FinishReason, has_calls: bool) -> Finish:
    """Return the protocol's name for the end of a turn."""
    if finish is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if has_calls else "stop"


def call_id(turn: str, number: int) -> str:
    """Return the id of a call: nine letters and digits, which every chat template accepts, equal in every attempt of an
    episode.

    `turn` identifies the turn in the episode, and `number` the call in the turn.
    """
    value = int.from_bytes(hashlib.sha256(f"{turn}/{number}".encode()).digest())
    return "".join(_ALPHABET[value // 36**place % 36] for place in range(_CALL_ID_CHARS))


def token_logprobs(tokenizer: Tokenizer, token_ids: IntArray, logprobs: FloatArray) -> tuple[dict[str, Any], ...]:
    """Return the log-probs of sampled tokens [n] as the protocol writes them."""
    written = []
    for token_id, logprob in zip(token_ids, logprobs, strict=True):
        text = tokenizer.decode(np.asarray([token_id], dtype=np.int32))
        token_bytes = list(tokenizer.token_bytes(int(token_id)))
        written.append({"token": text, "logprob": float(logprob), "bytes": token_bytes, "top_logprobs": []})
    return tuple(written)


# Chat completions -----------------------------------------------------------------------------------------------------


def chat_reply(reply: ReplyHead, choices: Sequence[Choice], usage: Usage) -> bytes:
    """Return the body of a reply that is not streamed."""
    written = [
        {
            "index": index,
            "message": _message(choice.message),
            "finish_reason": choice.finish,
            "logprobs": _chat_logprobs(choice.logprobs),
        }
        for index, choice in enumerate(choices)
    ]
    return msgspec.json.encode({**reply.head("chat.completion"), "choices": written, "usage": usage.counts()})


class ChatStream:
    """The chunks of a streamed chat completion. Per choice: `begin`, then `content` and `call` in any order, then
    `end`."""

    def __init__(self, reply: ReplyHead, *, include_usage: bool = False) -> None:
        self._head = reply.head("chat.completion.chunk")
        self._usage: dict[str, Any] = {"usage": None} if include_usage else {}

    def begin(self, index: int = 0) -> bytes:
        """Return the first chunk of a choice."""
        return self._chunk(index, {"role": "assistant", "content": ""})

    def content(self, text: str, index: int = 0, logprobs: Sequence[dict[str, Any]] | None = None) -> bytes:
        """Return a chunk with a part of the content, which may be empty if it carries log-probs."""
        return self._chunk(index, {"content": text}, logprobs=logprobs)

    def call(self, call: RequestedCall, number: int, index: int = 0) -> bytes:
        """Return a chunk with a complete call. `number` counts the calls of the choice from 0."""
        return self._chunk(index, {"tool_calls": [{"index": number, **_call(call)}]})

    def end(self, finish: Finish, index: int = 0) -> bytes:
        """Return the last chunk of a choice."""
        return self._chunk(index, {}, finish)

    def usage(self, usage: Usage) -> bytes:
        """Return the chunk with the usage, which follows those of the choices if the request asks for it. `DONE` comes
        after it."""
        return event({**self._head, "choices": [], "usage": usage.counts()})

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        finish: Finish | None = None,
        logprobs: Sequence[dict[str, Any]] | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": _chat_logprobs(logprobs)}
        return event({**self._head, "choices": [choice], **self._usage})


def event(value: Any) -> bytes:
    """Return a server-sent event with this JSON."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _message(message: ChatMessage) -> dict[str, Any]:
    written: dict[str, Any] = {"role": message.role, "content": message.content or None, "refusal": None}
    if message.calls:
        written["tool_calls"] = [_call(call) for call in message.calls]
    else:
        written["content"] = message.content
    return written


def _call(call: RequestedCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _chat_logprobs(logprobs: Sequence[dict[str, Any]] | None) -> dict[str, Any] | None:
    return None if logprobs is None else {"content": list(logprobs), "refusal": None}


# Completions and models -----------------------------------------------------------------------------------------------


def completion_reply(reply: ReplyHead, turns: Sequence[tuple[str, Finish, Any]], usage: Usage) -> bytes:
    """Return the body of a completion. A turn is its text, its finish and its log-probs from `completion_logprobs`, or
    None."""
    written = [_completion_choice(index, *turn) for index, turn in enumerate(turns)]
    return msgspec.json.encode({**reply.head("text_completion"), "choices": written, "usage": usage.counts()})


def completion_chunk(reply: ReplyHead, text: str, finish: Finish | None, index: int = 0, logprobs: Any = None) -> bytes:
    """Return an event of a streamed completion."""
    return event({**reply.head("text_completion"), "choices": [_completion_choice(index, text, finish, logprobs)]})


def completion_usage(reply: ReplyHead, usage: Usage) -> bytes:
    """Return the event with the usage, which follows those of the choices if the request asks for it."""
    return event({**reply.head("text_completion"), "choices": [], "usage": usage.counts()})


def completion_logprobs(tokenizer: Tokenizer, turn: Turn, offset: int = 0) -> dict[str, Any]:
    """Return the log-probs of a turn as completions write them. `offset` is the number of characters before it."""
    tokens = [tokenizer.decode(turn.token_ids[at : at + 1]) for at in range(turn.token_ids.size)]
    offsets = list(accumulate(map(len, tokens[:-1]), initial=offset)) if tokens else []
    logprobs = [float(value) for value in turn.logprobs]
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}


def models_reply(names: Sequence[str], created: int) -> bytes:
    """Return the list of models: `policy`, and the endpoints."""
    return msgspec.json.encode({"object": "list", "data": [_model(name, created) for name in names]})


def model_reply(name: str, created: int) -> bytes:
    """Return one of the models."""
    return msgspec.json.encode(_model(name, created))


def _model(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "rollmesh"}


def _completion_choice(index: int, text: str, finish: Finish | None, logprobs: Any) -> dict[str, Any]:
    return {"index": index, "text": text, "finish_reason": finish, "logprobs": logprobs}


# Errors ---------------------------------------------------------------------------------------------------------------


class ErrorReply(msgspec.Struct, frozen=True, kw_only=True):
    """An error as the server sends it."""

    status: int
    """HTTP status."""
    error: dict[str, Any]
    """The protocol's error object: message, type, param, code."""
    retry: bool
    """Whether the same request may succeed later. The public clients retry unless `x-should-retry` is
    "false"."""

    @property
    def body(self) -> bytes:
        return msgspec.json.encode({"error": self.error})

    @property
    def headers(self) -> dict[str, str]:
        return {"content-type": "application/json", "x-should-retry": "true" if self.retry else "false"}

    @property
    def event(self) -> bytes:
        """The error as an event, for a stream that has begun."""
        return event({"error": self.error})


_STATUS: dict[Code, tuple[int, str]] = {
    Code.INVALID_ARGUMENT: (400, "invalid_request_error"),
    Code.OUT_OF_RANGE: (400, "invalid_request_error"),
    Code.UNAUTHENTICATED: (401, "authentication_error"),
    Code.PERMISSION_DENIED: (403, "permission_error"),
    Code.NOT_FOUND: (404, "not_found_error"),
    Code.DEADLINE_EXCEEDED: (408, "invalid_request_error"),
    Code.RESOURCE_EXHAUSTED: (429, "rate_limit_error"),
}
_OWN_STATUS: dict[type[MeshError], int] = {PayloadTooLarge: 413, EpisodeEnded: 410, MethodNotAllowed: 405}
_CODES = {Unauthenticated.reason: "invalid_api_key", UnknownModel.reason: "model_not_found"}
_LIMIT_CODES = {"tokens": "context_length_exceeded"}


def error_reply(error: MeshError | LimitReached) -> ErrorReply:
    """Return the reply for an error. A limit of the episode is status 400, and an infra failure 503."""
    if isinstance(error, LimitReached):
        code = _LIMIT_CODES.get(error.limit, "episode_limit")
        return _error(400, "invalid_request_error", f"{error}; end the work on this task", code=code, retry=False)
    status, kind = _STATUS.get(error.code, (503, "server_error"))
    code = _CODES.get(error.reason, error.reason.lower())
    for class_, own_status in _OWN_STATUS.items():
        if isinstance(error, class_):
            status, kind = own_status, "invalid_request_error"
    field = error.violations[0].field if error.violations else None
    return _error(status, kind, error.message, code=code, param=field, retry=status == 429 and error.retryable)


def _error(status: int, kind: str, message: str, *, code: str, retry: bool, param: str | None = None) -> ErrorReply:
    error = {"message": message, "type": kind, "param": param, "code": code}
    return ErrorReply(status=status, error=error, retry=retry)
