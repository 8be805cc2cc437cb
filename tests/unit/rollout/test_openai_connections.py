"""Connections to the OpenAI-compatible server that misbehave: garbage, half requests, slow clients, clients that are
gone."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollmesh.services.rollout.agent import Agent, Environment, Task
from rollmesh.services.rollout.config import LimitsConfig, OpenAiServerConfig, RolloutConfig
from rollmesh.services.rollout.openai import app
from rollmesh.services.rollout.openai.served import Served
from rollmesh.shared.domain.trajectory import FinishReason
from rollmesh.testing.rollout import LocalMesh, lease
from rollmesh.v1 import coordinator_pb2

from .test_openai_server import until

COMPLETED = coordinator_pb2.EPISODE_OUTCOME_COMPLETED
ASK = {"model": "policy", "messages": [{"role": "user", "content": "a"}]}


class SocketAgent(Agent):
    """Runs `work` on the served episode."""

    def __init__(self, work: Callable[[Served], Awaitable[None]]) -> None:
        self._work = work

    async def run(self, task: Task, env: Environment) -> None:
        async with env.serve() as api:
            assert isinstance(api, Served)
            await self._work(api)


def head(api: Served, num_bytes: int, *lines: str, path: str = "chat/completions") -> bytes:
    """The head of a request with a body of this size."""
    host, prefix = api.base_url.removeprefix("http://").split("/")
    given = [f"Host: {host}", f"Authorization: Bearer {api.key}", f"Content-Length: {num_bytes}", *lines]
    return "\r\n".join([f"POST /{prefix}/{path} HTTP/1.1", *given, "", ""]).encode()


@asynccontextmanager
async def connected(api: Served) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, _, port = api.base_url.removeprefix("http://").split("/")[0].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()


async def request(api: Served, body: bytes, path: str = "chat/completions", *, close: bool = True) -> tuple[int, bytes]:
    """Return the status and the body of a reply. With `close`, the server closes the connection after it."""
    async with connected(api) as (reader, writer), asyncio.timeout(20):
        writer.write(head(api, len(body), *(["Connection: close"] if close else []), path=path) + body)
        top = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        size = int(top.partition("content-length: ")[2].split()[0]) if not close else -1
        return int(top.split()[1]), await (reader.read() if close else reader.readexactly(size))


@asynccontextmanager
async def made_mesh(script: str = "hm<|end|>", **options: Any) -> AsyncIterator[LocalMesh]:
    config = RolloutConfig(
        limits=LimitsConfig(turns_max=1000, segments_max=4000), openai=OpenAiServerConfig(request_mb_max=1)
    )
    mesh = LocalMesh(script=lambda text: script, config=config, **options)
    try:
        yield mesh
        assert (mesh.server.num_episodes, mesh.num_open) == (0, 0)
    finally:
        await mesh.server.close()


async def run(mesh: LocalMesh, work: Callable[[Served], Awaitable[None]]) -> coordinator_pb2.EpisodeReport:
    return await mesh.runner(SocketAgent(work)).run(lease())


async def test_a_body_that_does_not_arrive_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(api: Served) -> None:
        async with connected(api) as (reader, writer), asyncio.timeout(20):
            writer.write(head(api, 1000) + b"{")
            assert b"HTTP/1.1 408" in await reader.readline()
            reply = (await reader.read()).decode()  # to its end: the server closes the connection
            assert "must arrive within 0.2 s, got 1 bytes of it" in reply
        assert (await request(api, json.dumps(ASK).encode()))[0] == 200

    monkeypatch.setattr(app, "BODY_S_MAX", 0.2)
    async with made_mesh() as mesh:
        report = await run(mesh, work)
    assert report.outcome == COMPLETED, report.failure


async def test_a_body_that_arrives_after_the_end_of_its_episode_is_refused() -> None:
    body = json.dumps(ASK).encode()
    late: list[Any] = []

    async def work(api: Served) -> None:
        assert (await request(api, body))[0] == 200
        late.append(connected(api))
        reader, writer = await late[0].__aenter__()
        before = api.num_requests
        writer.write(head(api, len(body)) + body[:-1])
        await writer.drain()
        assert (await request(api, body))[0] == 200  # so the server has read the head before
        assert api.num_requests == before + 1
        late.extend([reader, writer])

    async with made_mesh() as mesh:
        report = await run(mesh, work)
        assert report.outcome == COMPLETED, report.failure
        context, reader, writer = late
        num_asked = len(mesh.generator.asked)
        writer.write(body[-1:])
        async with asyncio.timeout(20):
            assert b" 410 " in await reader.readline()
        assert len(mesh.generator.asked) == num_asked
        await context.__aexit__(None, None, None)


async def test_a_client_that_disconnects_before_the_first_token_of_a_stream_cancels_its_turn() -> None:
    body = json.dumps({**ASK, "stream": True}).encode()

    async def work(api: Served) -> None:
        assert (await request(api, json.dumps(ASK).encode()))[0] == 200
        gate = mesh.generator.gate
        gate.held = True
        async with connected(api) as (_, writer):
            writer.write(head(api, len(body)) + body)
            await until(lambda: gate.num_inside == 1)
        await until(lambda: gate.num_inside == 0)
        gate.held = False

    async with made_mesh() as mesh:
        report = await run(mesh, work)
    assert report.outcome == COMPLETED, report.failure
    assert [sample.finish for sample in mesh.samples.episodes[0].samples] == [FinishReason.STOP]


async def test_a_client_that_does_not_read_and_disconnects_cancels_its_turn() -> None:
    """The turn is longer than all buffers between the server and the client."""
    body = json.dumps({**ASK, "stream": True, "logprobs": True, "max_tokens": 300}).encode()

    async def work(api: Served) -> None:
        gate = mesh.generator.gate
        gate.passes_max = 290
        async with connected(api) as (_, writer):
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(head(api, len(body)) + body)
            await until(lambda: gate.held)
        await until(lambda: gate.num_inside == 0)
        gate.held = False
        gate.passes_max = 10**9
        assert (await request(api, json.dumps(ASK).encode()))[0] == 200

    async with made_mesh(f"<|{'a' * 10_000}|>" * 299 + "<|end|>", steps=range(300)) as mesh:
        report = await run(mesh, work)
    assert report.outcome == COMPLETED, report.failure
    assert FinishReason.CANCELLED not in [sample.finish for sample in mesh.samples.episodes[0].samples]


async def test_the_server_closes_with_open_connections() -> None:
    """Connections that are idle, in a head, in a body, and in a stream that the client does not read."""
    body = json.dumps({**ASK, "stream": True, "logprobs": True, "max_tokens": 300}).encode()
    parts: list[Callable[[Served], bytes]] = [
        lambda api: b"",
        lambda api: b"POST /v1/",
        lambda api: head(api, 10),
        lambda api: head(api, len(body)) + body,
    ]
    opened: list[Any] = []

    async def work(api: Served) -> None:
        assert (await request(api, json.dumps(ASK).encode()))[0] == 200
        for part in parts:
            opened.append(connected(api))
            _, writer = await opened[-1].__aenter__()
            writer.transport.pause_reading()
            writer.write(part(api))
        await until(lambda: api.num_turns == 2)

    async with made_mesh(f"<|{'a' * 10_000}|>" * 299 + "<|end|>", steps=range(300)) as mesh:
        report = await run(mesh, work)
        assert report.outcome == COMPLETED, report.failure
        begun_s = time.monotonic()
        await mesh.server.close()
        assert time.monotonic() - begun_s < 5
        for context in opened:
            await context.__aexit__(None, None, None)


# Garbage --------------------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
TEXT = st.text(max_size=8) | st.sampled_from(["<|end|>", "</tool_call>", "\ud800", "\ue000rollmeshturn"])
CALL = st.fixed_dictionaries(
    {
        "id": TEXT,
        "type": st.just("function"),
        "function": st.fixed_dictionaries({"name": TEXT, "arguments": TEXT | JSON.map(json.dumps)}),
    }
)
MESSAGE = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user"]), "content": TEXT}, optional={"name": TEXT}),
    st.fixed_dictionaries({"role": st.just("assistant"), "content": TEXT, "tool_calls": st.lists(CALL, max_size=2)}),
    st.fixed_dictionaries(
        {
            "role": st.just("tool"),
            "tool_call_id": st.just("a"),
            "content": st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXT}), max_size=2),
        }
    ),
)
TOOL = st.fixed_dictionaries(
    {
        "type": st.just("function"),
        "function": st.fixed_dictionaries(
            {"name": st.text(min_size=1, max_size=8)},
            optional={
                "description": TEXT,
                "parameters": st.dictionaries(st.sampled_from(["required", "properties", "type"]), JSON),
            },
        ),
    }
)
SAMPLING = {
    "max_tokens": st.integers(1, 300),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.5, 1),
    "n": st.integers(1, 3),
    "stop": st.text(min_size=1, max_size=3),
    "stream": st.booleans(),
}
CHAT = st.fixed_dictionaries(
    {"model": st.just("policy"), "messages": st.lists(MESSAGE, min_size=1, max_size=3)},
    optional={**SAMPLING, "tools": st.lists(TOOL, max_size=2), "logprobs": st.booleans()},
)
COMPLETION = st.fixed_dictionaries(
    {"model": st.just("policy"), "prompt": TEXT | st.lists(st.integers(0, 2**20), max_size=4)},
    optional={**SAMPLING, "logprobs": st.just(0)},
)


@st.composite
def wrong(draw: st.DrawFn, bodies: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    """A good body with any JSON in the place of one of its values."""
    body: Any = draw(bodies)
    at: Any = body
    while True:
        key = draw(st.sampled_from(list(at) if isinstance(at, dict) else range(len(at))))
        if not isinstance(at[key], (dict, list)) or not at[key] or draw(st.booleans()):
            at[key] = draw(JSON)
            return dict(body)
        at = at[key]


def test_garbage_is_rejected_and_ends_neither_the_server_nor_the_episode() -> None:
    """The statuses are those of bad requests, never that of a bug or a failed episode."""
    statuses: list[int] = []

    async def work(api: Served) -> None:
        loop = asyncio.get_running_loop()

        def ask(body: Any, path: str) -> None:
            sent = body if isinstance(body, bytes) else json.dumps(body).encode()
            status, reply = asyncio.run_coroutine_threadsafe(request(api, sent, path), loop).result()
            statuses.append(status)
            assert status in (200, 400), (status, reply, sent)
            if status == 400:
                assert json.loads(reply)["error"]["message"]
            assert b"server_error" not in reply, (reply, sent)

        @_bounded
        @given(CHAT | wrong(CHAT))
        def chats(body: Any) -> None:
            ask(body, "chat/completions")

        @_bounded
        @given(COMPLETION | wrong(COMPLETION))
        def completions(body: Any) -> None:
            ask(body, "completions")

        @_bounded
        @given(st.binary(max_size=64) | JSON.map(json.dumps).map(str.encode))
        def bodies(body: bytes) -> None:
            ask(body, "chat/completions")

        @_bounded
        @given(st.binary(min_size=1, max_size=200))
        def connections(sent: bytes) -> None:
            asyncio.run_coroutine_threadsafe(garbled(api, sent), loop).result()

        for check in (chats, completions, bodies, connections):
            await asyncio.to_thread(check)
        assert (await request(api, json.dumps(ASK).encode()))[0] == 200

    async def main() -> None:
        async with made_mesh("<tool_call>1+2</tool_call><|end|>") as mesh:
            report = await run(mesh, work)
        assert report.outcome == COMPLETED, report.failure

    asyncio.run(main())
    assert statuses.count(200) > 10
    assert statuses.count(400) > 10


_bounded = settings(
    max_examples=60, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


async def garbled(api: Served, sent: bytes) -> None:
    """Send bytes that are not HTTP, and the beginning of a request that never ends."""
    async with connected(api) as (reader, writer), asyncio.timeout(20):
        writer.write(sent + b"\r\n\r\n")
        writer.write_eof()
        reply = await reader.read()
        assert not reply or reply.startswith(b"HTTP/1.1 4"), reply


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (["Content-Length: 5"], 400),  # two lengths, by which proxies and servers can disagree
        ([f"X-Long: {'a' * 200_000}"], 400),
        (["Expect: 100-continue"], 200),
    ],
)
async def test_heads_that_are_ambiguous_or_too_long_are_rejected(lines: list[str], status: int) -> None:
    body = json.dumps(ASK).encode()

    async def work(api: Served) -> None:
        async with connected(api) as (reader, writer), asyncio.timeout(20):
            writer.write(head(api, len(body), "Connection: close", *lines) + body)
            top = await reader.readline()
            while b" 100 " in top or top == b"\r\n":
                top = await reader.readline()
            assert int(top.split()[1]) == status
        assert (await request(api, body))[0] == 200

    async with made_mesh() as mesh:
        report = await run(mesh, work)
    assert report.outcome == COMPLETED, report.failure


async def test_a_body_above_the_limit_is_rejected() -> None:
    async def work(api: Served) -> None:
        status, reply = await request(api, b" " * (2 << 20), close=False)
        assert (status, json.loads(reply)["error"]["code"]) == (413, "payload_too_large")
        assert (await request(api, json.dumps(ASK).encode()))[0] == 200

    async with made_mesh() as mesh:
        report = await run(mesh, work)
    assert report.outcome == COMPLETED, report.failure
