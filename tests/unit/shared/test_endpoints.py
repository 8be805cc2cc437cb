"""The client of endpoints against a real HTTP server: limits, retries, prices, records, and what goes wrong."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.domain.trajectory import FinishReason, Message
from rollmesh.shared.endpoints.answer import AskedMessage, EndpointCall
from rollmesh.shared.endpoints.blocking import BlockingEndpoints
from rollmesh.shared.endpoints.client import Endpoints
from rollmesh.shared.endpoints.config import EndpointConfig, check_endpoint
from rollmesh.shared.endpoints.metering import EndpointMeter, metered
from rollmesh.shared.errors import ConfigError, EndpointFailed, Internal, PriceLimit, UnknownEndpoint
from rollmesh.shared.net.http_link import decoded

from .chat_server import ChatServer, chat_server, completion, failure

FAST = {"timeout_s": 5.0, "retry_s": 5.0, "backoff_s": 0.001, "backoff_s_max": 0.01}


def openai(url: str, **options: Any) -> EndpointConfig:
    return config_from_dict(EndpointConfig, {"kind": "openai", "base_url": url, "model": "judge-1", **FAST, **options})


def client(server: ChatServer, tmp_path: Path, **options: Any) -> Endpoints:
    return Endpoints({"judge": openai(server.url, **options)}, base_dir=tmp_path, spent_dir=tmp_path / "spent")


async def test_an_answer_has_its_tokens_price_and_latency_and_the_meter_sums_them(tmp_path: Path) -> None:
    async with chat_server() as server:
        endpoints = client(server, tmp_path, price_prompt=1000.0, price_completion=5000.0)
        with metered(EndpointMeter("e1", caller="judge@1")) as meter:
            answer = await endpoints.ask("judge", "Is 7 prime?")
            await endpoints.ask(
                "judge", [Message(role="system", content="Be brief."), Message(role="user", content="?")]
            )
        await endpoints.close()
    assert (answer.text, answer.finish, answer.prompt_tokens, answer.completion_tokens) == (
        "yes",
        FinishReason.STOP,
        10,
        2,
    )
    assert answer.price == pytest.approx(0.02)
    assert 0 < answer.latency_s < 5
    (use,) = meter.uses
    assert (use.endpoint, use.caller, use.calls, use.replayed) == ("judge", "judge@1", 2, 0)
    assert (use.prompt_tokens, use.completion_tokens) == (20, 4)
    assert use.price == pytest.approx(0.04)
    assert use.latency_s >= answer.latency_s
    assert server.requests[0] == {
        "model": "judge-1", "temperature": 0.0, "max_tokens": 512, "messages": [{"role": "user", "content": "Is 7 prime?"}],
    }  # fmt: skip


async def test_a_request_has_its_own_parameters_and_the_fields_of_the_table(tmp_path: Path) -> None:
    async with chat_server(lambda body: '{"score": 3}') as server:
        endpoints = client(server, tmp_path, request={"seed": 4, "max_tokens": None, "max_completion_tokens": 7})
        answer = await endpoints.ask("judge", "?", temperature=0.5, stop=["\n"], json=True)
        await endpoints.close()
    assert answer.value == {"score": 3}
    (body,) = server.requests
    assert "max_tokens" not in body
    assert (body["seed"], body["max_completion_tokens"], body["temperature"], body["stop"]) == (4, 7, 0.5, ["\n"])
    assert body["response_format"] == {"type": "json_object"}


async def test_a_key_is_read_from_a_file_or_the_environment_and_is_in_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text("secret-1\n")
    monkeypatch.setenv("JUDGE_KEY", "secret-2")
    async with chat_server(lambda body: failure(401, "no")) as server:
        for options in ({"key_file": "key"}, {"key_env": "JUDGE_KEY"}):
            endpoints = client(server, tmp_path, **options)
            with pytest.raises(EndpointFailed, match="endpoint `judge`: .*HTTP 401") as caught:
                await endpoints.ask("judge", "?")
            await endpoints.close()
            assert "secret" not in str(caught.value)
    assert server.keys == ["Bearer secret-1", "Bearer secret-2"]


@pytest.mark.parametrize("broken", [lambda: failure(503, "busy"), lambda: failure(429, "slow down")])
async def test_an_overloaded_server_is_asked_again(tmp_path: Path, broken: Any) -> None:
    answers: Iterator[Any] = iter([broken(), broken(), "yes"])
    async with chat_server(lambda body: next(answers)) as server:
        endpoints = client(server, tmp_path)
        assert (await endpoints.ask("judge", "?")).text == "yes"
        await endpoints.close()
    assert len(server.requests) == 3


BAD_REPLIES: list[tuple[Any, str]] = [
    (web.Response(status=200, text="<html>"), "the response is not as expected"),
    ({"choices": []}, "`choices` is empty"),
    ({"choices": [{"message": {"content": 3}}]}, "Expected `str | null`, got `int`"),
    ({"choices": [{"message": {"content": None}, "finish_reason": "tool_calls"}]}, "finish_reason is 'tool_calls'"),
    ({"error": "no such model"}, "missing required field `choices`"),
    (failure(400, "model `x` does not exist"), "HTTP 400: .*does not exist"),
    (failure(302, "elsewhere"), "HTTP 302"),
]


@pytest.mark.parametrize(("reply", "what"), BAD_REPLIES)
async def test_a_reply_that_is_not_of_the_protocol_fails_at_once(tmp_path: Path, reply: Any, what: str) -> None:
    async with chat_server(lambda body: reply) as server:
        endpoints = client(server, tmp_path)
        with pytest.raises(EndpointFailed, match=f"(?s)endpoint `judge`: .*{what}"):
            await endpoints.ask("judge", "?")
        await endpoints.close()
    assert len(server.requests) == 1


def test_a_response_that_is_not_utf_8_is_named() -> None:
    with pytest.raises(Internal, match="POST http://h"):
        decoded(b'{"text": "\xff"}', dict[str, str], "POST http://h")


@pytest.mark.parametrize(
    ("answer", "shown"), [("three", "'three'"), pytest.param("[" * 100_000, r"'\[\[", id="nested")]
)
async def test_an_answer_that_must_be_json_and_is_not_fails(tmp_path: Path, answer: str, shown: str) -> None:
    async with chat_server(lambda body: answer) as server:
        endpoints = client(server, tmp_path)
        with pytest.raises(EndpointFailed, match=f"not a JSON value .*{shown}"):
            await endpoints.ask("judge", "?", json=True)
        await endpoints.close()


async def test_a_price_needs_the_use_of_tokens(tmp_path: Path) -> None:
    reply = completion("yes")
    del reply["usage"]
    async with chat_server(lambda body: reply) as server:
        free, priced = client(server, tmp_path), client(server, tmp_path, price_prompt=1.0)
        assert (await free.ask("judge", "?")).prompt_tokens == 0
        with pytest.raises(EndpointFailed, match="no `usage`, so its price is unknown"):
            await priced.ask("judge", "?")
        await free.close()
        await priced.close()


async def test_an_unreachable_server_fails_after_the_retry_limit_with_its_name(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        endpoints = Endpoints({"judge": openai(url, retry_s=0.05)}, base_dir=tmp_path)
        with pytest.raises(
            EndpointFailed, match=rf"endpoint `judge`: POST {url}/chat/completions: .*connect"
        ) as caught:
            await endpoints.ask("judge", "?")
        await endpoints.close()
    assert caught.value.metadata["endpoint"] == "judge"


async def test_a_slow_server_fails_after_its_timeout(tmp_path: Path) -> None:
    async with chat_server() as server:
        server.gate = asyncio.Event()
        endpoints = client(server, tmp_path, timeout_s=0.05, retry_s=0.0)
        with pytest.raises(EndpointFailed, match=r"endpoint `judge`: .*no response within 0.05 s"):
            await endpoints.ask("judge", "?")
        await endpoints.close()


async def test_a_cancelled_request_is_noted_as_the_one_that_was_awaited(tmp_path: Path) -> None:
    async with chat_server() as server:
        server.gate = asyncio.Event()
        endpoints, meter = client(server, tmp_path), EndpointMeter("e")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await endpoints.ask("judge", "?", meter=meter)
        await endpoints.close()
    assert (meter.cut, meter.uses) == ("judge", ())


async def test_no_more_requests_run_at_once_than_allowed(tmp_path: Path) -> None:
    async with chat_server() as server:
        server.gate = asyncio.Barrier(3)  # passes three at a time
        endpoints = client(server, tmp_path, concurrency=3)
        await asyncio.gather(*(endpoints.ask("judge", f"{n}?") for n in range(21)))
        await endpoints.close()
    assert (len(server.requests), server.num_running_max) == (21, 3)


async def test_requests_per_second_are_limited(tmp_path: Path) -> None:
    async with chat_server() as server:
        endpoints = client(server, tmp_path, requests_per_s=100.0)
        begun_s = asyncio.get_running_loop().time()
        await asyncio.gather(*(endpoints.ask("judge", f"{n}?") for n in range(11)))
        await endpoints.close()
    assert asyncio.get_running_loop().time() - begun_s >= 0.1


async def test_the_price_limit_holds_for_all_processes_of_a_run_and_over_restarts(tmp_path: Path) -> None:
    options = {"price_prompt": 100_000.0, "price_max": 2.5}  # an answer costs 1
    async with chat_server() as server:
        one, two = client(server, tmp_path, **options), client(server, tmp_path, **options)
        for endpoints in (one, two, one):
            await endpoints.ask("judge", "?")
        with pytest.raises(PriceLimit, match=r"endpoint `judge`: the run has spent 3 of `price_max` = 2.5") as caught:
            await two.ask("judge", "?")
        assert not caught.value.retryable
        again = client(server, tmp_path, **options)
        with pytest.raises(PriceLimit):
            await again.ask("judge", "?")
        more = client(server, tmp_path, **options | {"price_max": 10.0})
        assert (await more.ask("judge", "?")).price == pytest.approx(1.0)
        for endpoints in (one, two, again, more):
            await endpoints.close()
    assert len(server.requests) == 4


@pytest.mark.parametrize(
    "choices",
    [
        [],
        [{"message": {"content": None}, "finish_reason": "length"}],
        [{"message": {"content": "cut"}, "finish_reason": "content_filter"}],
        [{"message": {"content": [{"type": "thinking"}]}, "finish_reason": "stop"}],
        [{"message": {"content": "no JSON"}, "finish_reason": "stop"}],
    ],
)
async def test_the_price_limit_counts_a_response_that_fails_the_request(tmp_path: Path, choices: Any) -> None:
    reply = {**completion(""), "choices": choices}
    async with chat_server(lambda body: reply) as server:
        endpoints, meter = client(server, tmp_path, price_prompt=100_000.0, price_max=1.5), EndpointMeter("e")
        for _ in range(2):  # each costs 1
            with pytest.raises(EndpointFailed):
                await endpoints.ask("judge", "?", json=True, meter=meter)
        with pytest.raises(PriceLimit, match=r"the run has spent 2 of `price_max` = 1.5"):
            await endpoints.ask("judge", "?", json=True, meter=meter)
        await endpoints.close()
    assert len(server.requests) == 2
    (use,) = meter.uses
    assert (use.calls, use.price) == (0, 2.0)


async def test_an_unknown_endpoint_is_named_with_the_known_ones() -> None:
    with pytest.raises(UnknownEndpoint, match="endpoint `jugde` is not configured; known: judge"):
        await Endpoints({"judge": openai("http://h/v1")}).ask("jugde", "?")


# Recorded answers -----------------------------------------------------------------------------------------------------


async def recorded(server: ChatServer, tmp_path: Path, scopes: list[str]) -> list[str]:
    """Ask the same twice in each scope and return the answers."""
    endpoints = client(server, tmp_path, record="answers")
    texts = []
    for scope in scopes:
        meter = EndpointMeter(scope)
        texts += [(await endpoints.ask("judge", "?", meter=meter)).text for _ in range(2)]
    await endpoints.close()
    return texts


async def test_recorded_answers_are_replayed_without_a_server(tmp_path: Path) -> None:
    numbers = iter(range(100))
    async with chat_server(lambda body: str(next(numbers))) as server:
        texts = await recorded(server, tmp_path, ["e1", "e2"])
    assert texts == ["0", "1", "2", "3"]
    endpoints = client(server, tmp_path, replay="answers", key_file="no such file", price_prompt=1.0)  # it has stopped
    replayed = []
    for scope in ("e2", "e1"):
        meter = EndpointMeter(scope)
        answers = [await endpoints.ask("judge", "?", meter=meter) for _ in range(2)]
        replayed += [answer.text for answer in answers]
        assert [(answer.replayed, answer.price, answer.prompt_tokens) for answer in answers] == [(True, 0.0, 10)] * 2
        assert (meter.uses[0].calls, meter.uses[0].replayed) == (2, 2)
        with pytest.raises(EndpointFailed, match="endpoint `judge`: no answer is recorded in `replay` = 'answers'"):
            await endpoints.ask("judge", "?", meter=meter)  # a third time
    assert replayed == ["2", "3", "0", "1"]
    other = EndpointMeter("e9")
    assert (await endpoints.ask("judge", "?", meter=other)).text == "2"  # the newest of the same request and number
    with pytest.raises(EndpointFailed, match="which ends with 'another'"):
        await endpoints.ask("judge", "another", meter=other)
    await endpoints.close()


async def test_calls_of_tools_are_recorded_and_replayed_for_the_same_tools_only(tmp_path: Path) -> None:
    tool: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {}}}
    reply = completion("", finish="tool_calls")
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    reply["choices"][0]["message"] = {"role": "assistant", "content": None, "tool_calls": [call]}
    made = EndpointCall(id="c1", name="add", arguments="{}")
    history = [
        AskedMessage(role="user", content="?"),
        AskedMessage(role="assistant", calls=(made,)),
        AskedMessage(role="tool", content="3", call_id="c1"),
    ]
    async with chat_server(lambda body: reply) as server:
        endpoints = client(server, tmp_path, record="answers")
        for messages in ("?", history):
            answer = await endpoints.ask("judge", messages, top_p=0.5, tools=[tool])
            assert (answer.text, answer.finish, answer.calls) == ("", FinishReason.STOP, (made,))
        await endpoints.ask("judge", "?", tools=[tool], tool_choice="none")
        with pytest.raises(EndpointFailed, match="the response has no text: its finish_reason is 'tool_calls'"):
            await endpoints.ask("judge", "?")
        await endpoints.close()
    first, second, third, _ = server.requests
    assert (first["tools"], first["top_p"], "tool_choice" in first) == ([tool], 0.5, False)
    assert (third["tool_choice"], "top_p" in third) == ("none", False)
    assert second["messages"] == [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
    ]
    endpoints = client(server, tmp_path, replay="answers")
    for messages in ("?", history):
        replayed = await endpoints.ask("judge", messages, top_p=0.5, tools=[tool])
        assert (replayed.calls, replayed.replayed) == ((made,), True)
    with pytest.raises(EndpointFailed, match="no answer is recorded"):
        await endpoints.ask("judge", "?", top_p=0.5)
    await endpoints.close()


async def test_a_repeated_episode_replaces_its_answers(tmp_path: Path) -> None:
    numbers = iter(range(100))
    async with chat_server(lambda body: str(next(numbers))) as server:
        await recorded(server, tmp_path, ["e1"])
        assert await recorded(server, tmp_path, ["e1"]) == ["2", "3"]
        endpoints = client(server, tmp_path, replay="answers")
        assert (await endpoints.ask("judge", "?", meter=EndpointMeter("e1"))).text == "2"
        await endpoints.close()


async def test_with_both_folders_only_new_requests_are_sent(tmp_path: Path) -> None:
    async with chat_server() as server:
        for _ in range(2):
            endpoints = client(server, tmp_path, record="answers", replay="answers")
            await endpoints.ask("judge", "a", meter=EndpointMeter("e"))
            await endpoints.close()
    assert len(server.requests) == 1


async def test_a_request_without_an_answer_does_not_count_in_a_replay(tmp_path: Path) -> None:
    """One request is cancelled and one is answered without JSON; both are repeated. The replay has no such failures."""
    replies = iter(["0", "no JSON", "1", "2"])
    async with chat_server(lambda body: next(replies)) as server:
        endpoints = client(server, tmp_path, record="answers")
        meter = EndpointMeter("e1")
        server.gate = asyncio.Event()
        asking = asyncio.ensure_future(endpoints.ask("judge", "?", json=True, meter=meter))
        while not server.requests:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        server.gate.set()
        with pytest.raises(EndpointFailed, match="not a JSON value"):
            await endpoints.ask("judge", "?", json=True, meter=meter)
        answers = [(await endpoints.ask("judge", "?", json=True, meter=meter)).value for _ in range(2)]
        await endpoints.close()
        endpoints = client(server, tmp_path, replay="answers")
        again = EndpointMeter("e1")
        assert [(await endpoints.ask("judge", "?", json=True, meter=again)).value for _ in range(2)] == answers
        await endpoints.close()


async def test_a_torn_last_line_is_skipped_and_a_broken_one_is_named(tmp_path: Path) -> None:
    async with chat_server() as server:
        await recorded(server, tmp_path, ["e1"])
    (path,) = (tmp_path / "answers").iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:40])
    endpoints = client(server, tmp_path, replay="answers")
    assert (await endpoints.ask("judge", "?", meter=EndpointMeter("e1"))).replayed
    await endpoints.close()
    path.write_bytes(b"{}\n" + whole)
    endpoints = client(server, tmp_path, replay="answers")
    with pytest.raises(EndpointFailed, match=r"line 1 is not a recorded answer: .*missing required field"):
        await endpoints.ask("judge", "?")
    await endpoints.close()


# Task sources ---------------------------------------------------------------------------------------------------------


async def test_a_source_asks_from_a_thread_without_a_loop_and_must_replay(tmp_path: Path) -> None:
    async with chat_server() as server:

        def ask(**options: Any) -> str:
            table = {"judge": openai(server.url, **options)}
            with BlockingEndpoints(table, base_dir=tmp_path) as endpoints:
                return endpoints.ask("judge", "write a task").text

        for _ in range(2):
            assert await asyncio.to_thread(ask, record="answers", replay="answers") == "yes"
        with pytest.raises(ConfigError, match=r"`endpoints.judge.replay` must be set, because a task source"):
            await asyncio.to_thread(ask, record="answers")
    assert len(server.requests) == 1


# The table ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"kind": "openai", "model": "m"}, r"`base_url` must be http://... or https://..., got ''"),
        ({"kind": "openai", "base_url": "http://h"}, "`model` must not be empty for the kind openai"),
        (
            {"kind": "frozen", "model": "m", "base_url": "http://h"},
            "`base_url` is a key of the kind openai, got kind 'frozen'",
        ),
        ({"kind": "policy_step", "model": "m"}, "`model` must be empty for the kind policy_step"),
        (
            {"kind": "openai", "base_url": "http://h", "model": "m", "step": 3},
            "`step` is a key of the kind policy_step",
        ),
        (
            {"kind": "openai", "base_url": "http://h", "model": "m", "key_file": "k", "key_env": "K"},
            "`key_env` must be empty",
        ),
        ({"kind": "teacher", "model": "m"}, "teacher"),
    ],
)
def test_a_table_entry_has_the_keys_of_its_kind(options: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        config_from_dict(EndpointConfig, options)


def test_check_names_what_this_host_lacks(tmp_path: Path) -> None:
    entry = {"kind": "openai", "base_url": "http://h", "model": "m"}
    for more, what in (
        ({"key_file": "none"}, "`key_file`: cannot read .*none"),
        ({"key_env": "ROLLMESH_NO_SUCH_KEY"}, "the environment variable ROLLMESH_NO_SUCH_KEY must contain"),
        ({"replay": "none"}, "`replay`: there is no folder"),
    ):
        with pytest.raises(ConfigError, match=what):
            check_endpoint(config_from_dict(EndpointConfig, entry | more), tmp_path)
    with pytest.raises(ConfigError, match=r"config\.json"):
        check_endpoint(config_from_dict(EndpointConfig, {"kind": "frozen", "model": "none"}), tmp_path)
