"""A server of the OpenAI chat protocol for tests: a real HTTP server whose answers are a function of the request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Respond = Callable[[dict[str, Any]], Any]


class ChatServer:
    """Counts the requests, and answers each with `respond(body)`: a text, a whole response, or an exception of
    aiohttp."""

    def __init__(self, respond: Respond) -> None:
        self.respond = respond
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.num_running = 0
        self.num_running_max = 0
        self.gate: asyncio.Event | asyncio.Barrier | None = None
        """While set, requests wait for it."""
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.keys.append(request.headers.get("Authorization", ""))
        self.num_running += 1
        self.num_running_max = max(self.num_running_max, self.num_running)
        try:
            if self.gate is not None:
                await self.gate.wait()
            answer = self.respond(body)
        finally:
            self.num_running -= 1
        if isinstance(answer, web.StreamResponse):
            return answer
        return web.json_response(completion(answer) if isinstance(answer, str) else answer)


def completion(
    text: str, *, prompt_tokens: int = 10, completion_tokens: int = 2, finish: str = "stop"
) -> dict[str, Any]:
    """Return a response of the protocol."""
    message = {"role": "assistant", "content": text}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": 0},
    }


def failure(status: int, text: str) -> web.Response:
    return web.Response(status=status, text=json.dumps({"error": {"message": text}}))


@asynccontextmanager
async def chat_server(respond: Respond = lambda body: "yes") -> AsyncIterator[ChatServer]:
    """Serve on a free port."""
    server = ChatServer(respond)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    server.url = f"http://{host}:{port}/v1"
    try:
        yield server
    finally:
        await runner.cleanup()
