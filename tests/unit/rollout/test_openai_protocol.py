"""Requests and replies of the OpenAI protocol. The types of the public `openai` package read every reply."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import openai.types as openai_types
import openai.types.chat as chat_types
import pytest
from pydantic import TypeAdapter

from rollmesh.services.rollout.agent_types import LimitReached, Turn
from rollmesh.services.rollout.conversation import ChatMessage, RequestedCall
from rollmesh.services.rollout.openai import protocol
from rollmesh.services.rollout.openai.openai_errors import EpisodeEnded, MethodNotAllowed, UnknownModel
from rollmesh.services.rollout.openai.protocol import (
    CHOICES_MAX,
    STOPS_MAX,
    ChatRequest,
    SamplingRequest,
    chat_request,
    completion_request,
)
from rollmesh.services.rollout.openai.replies import (
    DONE,
    ChatStream,
    Choice,
    ErrorReply,
    ReplyHead,
    Usage,
    call_id,
    chat_reply,
    completion_chunk,
    completion_logprobs,
    completion_reply,
    completion_usage,
    error_reply,
    finish_of,
    models_reply,
    token_logprobs,
)
from rollmesh.shared.domain.trajectory import FinishReason
from rollmesh.shared.errors import (
    EngineFailed,
    InvalidInput,
    MeshError,
    NotFound,
    Overloaded,
    SandboxFailed,
    Unauthenticated,
)
from rollmesh.testing.rollout import CharTokenizer

QUESTION = {"role": "user", "content": "1+2"}
CALL = {"id": "c0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
SUB = {"type": "function", "function": {"name": "sub", "parameters": {"type": "object", "properties": {}}}}
REPLY = ReplyHead(id="chatcmpl-1", created=1_700_000_000, model="policy")


def chat(**fields: Any) -> ChatRequest:
    return chat_request(json.dumps({"model": "policy", "messages": [QUESTION], **fields}).encode())


def rejected(body: dict[str, Any] | bytes, read: Any = chat_request) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        read(body if isinstance(body, bytes) else json.dumps(body).encode())
    return caught.value


# Requests -------------------------------------------------------------------------------------------------------------


def test_a_small_request_has_the_defaults() -> None:
    assert chat() == ChatRequest(
        model="policy", messages=(ChatMessage(role="user", content="1+2"),), sampling=SamplingRequest()
    )


def test_a_request_with_all_fields_is_read() -> None:
    request = chat(
        tools=[ADD],
        tool_choice="auto",
        max_completion_tokens=7,
        temperature=0,
        top_p=0.5,
        stop=["a", "b", "a"],
        n=2,
        logprobs=True,
        stream=True,
        stream_options={"include_usage": True},
        seed=3,
        user="someone",
        parallel_tool_calls=True,
        response_format={"type": "text"},
        frequency_penalty=0,
        presence_penalty=0.0,
        logit_bias={},
        top_logprobs=0,
        metadata=None,
        audio=None,
    )
    assert request.sampling == SamplingRequest(
        max_tokens=7,
        temperature=0.0,
        top_p=0.5,
        stop=("a", "b"),
        n=2,
        logprobs=True,
        stream=True,
        include_usage=True,
    )
    assert (request.tools, request.parse_calls) == ((ADD,), True)


def test_a_conversation_with_calls_is_read() -> None:
    echoed = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": [CALL],
    }
    developer = {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    result = {"role": "tool", "tool_call_id": "c0", "content": "3", "name": "add"}
    assert chat(messages=[developer, QUESTION, echoed, result]).messages == (
        ChatMessage(role="system", content="a\nb"),
        ChatMessage(role="user", content="1+2"),
        ChatMessage(role="assistant", calls=(RequestedCall(id="c0", name="add", arguments='{"a": 1}'),)),
        ChatMessage(role="tool", content="3", call_id="c0", name="add"),
    )


def test_a_tool_reaches_the_template_as_the_client_wrote_it() -> None:
    function = {"description": "Add.", "name": "add", "strict": True, "parameters": {"x": [1]}, "return": None}
    (tool,) = chat(tools=[{"type": "function", "function": {k: v for k, v in function.items() if k != "return"}}]).tools
    assert tool == {"type": "function", "function": {"description": "Add.", "name": "add", "parameters": {"x": [1]}}}
    assert list(tool["function"]) == ["description", "name", "parameters"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_required_call_begins_the_turn(choice: Any) -> None:
    request = chat(tools=[ADD], tool_choice=choice)
    assert (request.parse_calls, request.begin_call) == (True, True)
    assert not chat(tools=[ADD]).begin_call


@pytest.mark.parametrize("fields", [{"tools": [ADD], "tool_choice": "none"}, {}, {"tools": []}])
def test_a_turn_is_not_parsed_for_calls_without_tools_to_choose(fields: dict[str, Any]) -> None:
    assert not chat(**fields).parse_calls


@pytest.mark.parametrize(
    ("fields", "field", "why"),
    [
        ({"model": 3}, "model", "expected `str`, got `int`"),
        ({"model": None}, "model", "must be set"),
        ({"messages": None}, "messages", "must be set"),
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": "hello"}, "messages", "expected `array`"),
        ({"messages": ["hello"]}, "messages[0]", "expected `object`"),
        ({"messages": [{}]}, "messages[0].role", "must be set"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role", "got 'robot'"),
        ({"messages": [QUESTION, {"role": "user"}]}, "messages[1].content", "must be set"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "got `int`"),
        ({"messages": [{**QUESTION, "tool_calls": [CALL]}]}, "messages[0].tool_calls", "role assistant, got 'user'"),
        ({"messages": [{"role": "tool", "content": "3"}]}, "messages[0].tool_call_id", "must be set"),
        ({"messages": [{**QUESTION, "tool_call_id": "x"}]}, "messages[0].tool_call_id", "role tool, got 'user'"),
        ({"messages": [{**QUESTION, "weight": 1}]}, "messages[0].weight", "not supported"),
        ({"messages": [{"role": "assistant", "audio": {"id": "x"}}]}, "messages[0].audio", "send text"),
        ({"messages": [{"role": "assistant", "function_call": {}}]}, "messages[0].function_call", "`tool_calls`"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
            "got 'image_url'",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": {}}}]}
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
            "expected `str`",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]},
            "messages[0].tool_calls[0].function",
            "must be set",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "must be function, got 'web_search'"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "must be set"),
        ({"tools": [ADD, {"type": "function", "function": {"name": ""}}]}, "tools[1].function.name", "length >= 1"),
        ({"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]}, "tools[0].function.x", "not supported"),
        ({"tool_choice": "required"}, "tool_choice", "must be auto or none without tools"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "add"}}},
            "tool_choice",
            "function of the only tool",
        ),
        (
            {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
            "tool_choice",
            "function of the only tool",
        ),
        (
            {"tools": [ADD, SUB], "tool_choice": {"type": "function", "function": {"name": "add"}}},
            "tool_choice",
            "function of the only tool",
        ),
        ({"tools": [ADD], "tool_choice": "any"}, "tool_choice", "must be auto, none, required"),
        ({"tools": [ADD], "tool_choice": {"type": "function"}}, "tool_choice", "must be auto, none, required"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls", "must be true"),
        ({"response_format": {"type": "json_object"}}, "response_format", 'must be {"type":"text"}'),
        ({"functions": []}, "functions", "use `tools`"),
        ({"top_logprobs": 5}, "top_logprobs", "must be 0"),
        ({"logit_bias": {"1": 2}}, "logit_bias", "must be {}"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "must be 0"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "not supported"),
        ({"temprature": 1}, "temprature", "not supported"),
        ({"temperature": 2.5}, "temperature", "<= 2"),
        ({"temperature": "1"}, "temperature", "got `str`"),
        ({"top_p": 0}, "top_p", "> 0"),
        ({"n": 0}, "n", ">= 1"),
        ({"n": CHOICES_MAX + 1}, "n", f"<= {CHOICES_MAX}"),
        ({"max_tokens": 0}, "max_tokens", ">= 1"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "must equal max_completion_tokens = 2"),
        ({"stop": ""}, "stop", "empty string"),
        ({"stop": [1]}, "stop[0]", "got `int`"),
        ({"stop": ["x"] * (STOPS_MAX + 1)}, "stop", f"length <= {STOPS_MAX}"),
        ({"stream": 1}, "stream", "got `int`"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "got `int`"),
        ({"logprobs": 1}, "logprobs", "got `int`"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], field: str, why: str) -> None:
    error = rejected({"model": "policy", "messages": [QUESTION], **fields})
    assert [violation.field for violation in error.violations] == [field]
    assert error.message.startswith(f"`{field}` ")
    assert why in error.message


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff", b"[" * 100_000])
def test_a_body_that_is_not_an_object_is_rejected(body: bytes) -> None:
    assert "must be a JSON object" in rejected(body).message


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("1+2", "1+2"), ([1, 2], (1, 2)), (["1+2"], "1+2"), ([[1, 2]], (1, 2))],
)
def test_a_completion_has_one_prompt(prompt: Any, expected: Any) -> None:
    body = {"model": "policy", "prompt": prompt, "max_tokens": 3, "logprobs": 0, "echo": False, "best_of": 1}
    request = completion_request(json.dumps(body).encode())
    assert (request.prompt, request.sampling) == (expected, SamplingRequest(max_tokens=3, logprobs=True))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [2**31]}, "prompt[0]"),
        ({"prompt": None}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"echo": True}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 2}, "logprobs"),
    ],
)
def test_a_wrong_field_of_a_completion_is_named(fields: dict[str, Any], field: str) -> None:
    error = rejected({"model": "policy", "prompt": "1+2", **fields}, completion_request)
    assert [violation.field for violation in error.violations] == [field]


# Replies --------------------------------------------------------------------------------------------------------------


def made_choice(content: str, *arguments: str, finish: FinishReason = FinishReason.STOP) -> Choice:
    calls = tuple(
        RequestedCall(id=call_id("e1.0", number), name="add", arguments=text) for number, text in enumerate(arguments)
    )
    message = ChatMessage(role="assistant", content=content, calls=calls)
    return Choice(message=message, finish=finish_of(finish, bool(calls)))


def test_a_reply_is_read_by_the_public_package() -> None:
    choices = [made_choice("I add.", '{"a": 1}'), made_choice("3", finish=FinishReason.LENGTH)]
    body = chat_reply(REPLY, choices, Usage(prompt_tokens=5, completion_tokens=2))
    reply = chat_types.ChatCompletion.model_validate_json(body, strict=True)
    first, second = reply.choices
    assert first.message.tool_calls is not None
    (call,) = first.message.tool_calls
    assert call.type == "function"
    assert call.function.arguments == '{"a": 1}'
    assert (first.finish_reason, first.message.content) == ("tool_calls", "I add.")
    assert (second.finish_reason, second.message.content, second.message.tool_calls) == ("length", "3", None)
    assert reply.usage is not None
    assert reply.usage.total_tokens == 7


def test_an_echoed_reply_is_the_message_that_was_returned() -> None:
    choice = made_choice("", '{"a": 1}', "{}")
    body = chat_reply(REPLY, [choice], Usage(prompt_tokens=1, completion_tokens=1))
    message = chat_types.ChatCompletion.model_validate_json(body).choices[0].message
    for echoed in (message.model_dump(), message.model_dump(exclude_none=True), message.model_dump(exclude_unset=True)):
        assert chat(messages=[QUESTION, echoed]).messages[1].key == choice.message.key


def test_ids_of_calls_are_unique_and_fit_every_template() -> None:
    ids = {call_id(f"e{turn}", number) for turn in range(50) for number in range(20)}
    assert len(ids) == 1000
    assert all(len(id_) == 9 and id_.isalnum() for id_ in ids)
    assert call_id("e1.0", 0) == call_id("e1.0", 0)


def test_a_stream_is_read_by_the_public_package() -> None:
    stream = ChatStream(REPLY, include_usage=True)
    call = RequestedCall(id="c0", name="add", arguments="{}")
    events = [
        stream.begin(),
        stream.content("I "),
        stream.content("add."),
        stream.call(call, 0),
        stream.end("tool_calls"),
        stream.usage(Usage(prompt_tokens=5, completion_tokens=2)),
    ]
    chunks = [chunk_of(event) for event in events]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "I add."
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None, None, None, None, "tool_calls"]
    assert chunks[0].choices[0].delta.role == "assistant"
    (delta,) = chunks[3].choices[0].delta.tool_calls or []
    assert delta.function is not None
    assert (delta.index, delta.id, delta.function.name) == (0, "c0", "add")
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 7
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert DONE == b"data: [DONE]\n\n"


def chunk_of(event: bytes) -> chat_types.ChatCompletionChunk:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    return chat_types.ChatCompletionChunk.model_validate_json(event.removeprefix(b"data: "), strict=True)


def test_log_probs_are_those_of_the_sampled_tokens() -> None:
    tokenizer = CharTokenizer()
    ids = tokenizer.encode_markup("hü<|end|>")
    logprobs = np.asarray([-0.5, -1.0, 0.0], dtype=np.float32)
    written = token_logprobs(tokenizer, ids, logprobs)
    choice = Choice(message=ChatMessage(role="assistant", content="hü"), finish="stop", logprobs=written)
    body = chat_reply(REPLY, [choice], Usage(prompt_tokens=1, completion_tokens=3))
    read = chat_types.ChatCompletion.model_validate_json(body, strict=True).choices[0].logprobs
    assert read is not None
    assert read.content is not None
    assert [(token.token, token.logprob) for token in read.content] == [("h", -0.5), ("ü", -1.0), ("<|end|>", 0.0)]
    assert [bytes(token.bytes or []).decode() for token in read.content] == ["h", "ü", "<|end|>"]
    chunk = chunk_of(ChatStream(REPLY).content("hü", logprobs=written))
    assert chunk.choices[0].logprobs is not None
    assert len(chunk.choices[0].logprobs.content or []) == 3


def test_a_completion_is_read_by_the_public_package() -> None:
    tokenizer = CharTokenizer()
    turn = Turn(
        text="ab",
        finish=FinishReason.STOP,
        token_ids=tokenizer.encode_text("ab"),
        logprobs=np.asarray([-0.5, -1.0], dtype=np.float32),
    )
    logprobs = completion_logprobs(tokenizer, turn, offset=3)
    body = completion_reply(REPLY, [("ab", "stop", logprobs)], Usage(prompt_tokens=3, completion_tokens=2))
    reply = openai_types.Completion.model_validate_json(body, strict=True)
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == ("ab", "stop")
    read = reply.choices[0].logprobs
    assert read is not None
    assert (read.tokens, read.text_offset) == (["a", "b"], [3, 4])
    usage = completion_usage(REPLY, Usage(prompt_tokens=3, completion_tokens=2))
    assert json.loads(usage.removeprefix(b"data: "))["usage"]["total_tokens"] == 5
    assert json.loads(completion_chunk(REPLY, "ab", None).removeprefix(b"data: "))["choices"][0]["text"] == "ab"


def test_the_models_are_read_by_the_public_package() -> None:
    body = json.loads(models_reply(["policy", "judge"], 1_700_000_000))
    models = TypeAdapter(list[openai_types.Model]).validate_python(body["data"], strict=True)
    assert [model.id for model in models] == ["policy", "judge"]


# Errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "retry"),
    [
        (Unauthenticated("the key is unknown"), 401, "authentication_error", "invalid_api_key", False),
        (UnknownModel("no such model"), 404, "not_found_error", "model_not_found", False),
        (MethodNotAllowed("no such method"), 405, "invalid_request_error", "method_not_allowed", False),
        (EpisodeEnded("it ended"), 410, "invalid_request_error", "episode_ended", False),
        (NotFound("no such model"), 404, "not_found_error", "not_found", False),
        (LimitReached("tokens"), 400, "invalid_request_error", "context_length_exceeded", False),
        (LimitReached("turns"), 400, "invalid_request_error", "episode_limit", False),
        (EngineFailed("the engine stopped"), 503, "server_error", "engine_failed", False),
        (SandboxFailed("the jail was lost"), 503, "server_error", "sandbox_failed", False),
        (Overloaded("too many requests", retry_after_s=1), 429, "rate_limit_error", "overloaded", True),
    ],
)
def test_an_error_has_the_status_of_its_cause(
    error: MeshError | LimitReached, status: int, kind: str, code: str, retry: bool
) -> None:
    reply = error_reply(error)
    assert (reply.status, reply.error["type"], reply.error["code"]) == (status, kind, code)
    assert reply.headers["x-should-retry"] == str(retry).lower()
    assert str(error) in reply.error["message"]


@pytest.mark.parametrize(
    ("field", "many", "most"),
    [
        ("messages", {"messages": [QUESTION] * 50_000}, 4096),
        ("tools", {"tools": [{"type": "function", "function": {"name": "f"}}] * 50_000}, 512),
        (
            "messages",
            {"messages": [QUESTION, {"role": "assistant", "tool_calls": [{"id": "i"}] * 49_998}]},
            4096,
        ),
        ("messages", {"messages": [QUESTION, {**QUESTION, "content": [{"type": "text"}] * 49_998}]}, 4096),
    ],
)
def test_a_request_with_too_many_elements_is_rejected_before_they_are_read(
    field: str, many: dict[str, Any], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for reader in ("read_message", "read_tool"):
        monkeypatch.setattr(protocol, reader, lambda *_: pytest.fail("an element was read"))
    reply = error_reply(rejected({"model": "policy", "messages": [QUESTION], **many}))
    assert (reply.status, reply.error["param"]) == (400, field)
    assert f"at most {most}" in reply.error["message"]
    assert "got 50000" in reply.error["message"]


def test_an_invalid_request_names_its_field() -> None:
    reply = error_reply(rejected({"model": "policy", "messages": [QUESTION], "top_logprobs": 5}))
    assert (reply.status, reply.error["param"], reply.error["code"]) == (400, "top_logprobs", "invalid_input")
    assert json.loads(reply.body) == {"error": reply.error}
    assert json.loads(reply.event.removeprefix(b"data: ")) == {"error": reply.error}
    assert isinstance(reply, ErrorReply)
