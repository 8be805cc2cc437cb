"""Ask endpoints, within their limits. One client per process.

    endpoints = Endpoints(config.endpoints, base_dir=folder)
    answer = await endpoints.ask("judge", "Is 7 prime? Answer yes or no.")        # EndpointAnswer

A request passes these steps: recorded answer, or else a slot of `concurrency`, the limit of requests per second, the
price limit, the server; then the response is priced, recorded, and counted by the meter of its episode. Every failure
is an `EndpointFailed` that names the endpoint, except `PriceLimit` and `UnknownEndpoint`. So the episode that asked
fails as an infra failure, and is retried.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from rollmesh.shared.clock import Clock, SystemClock
from rollmesh.shared.domain.decoding import UNDECODABLE
from rollmesh.shared.domain.trajectory import Message
from rollmesh.shared.endpoints.answer import (
    AskedMessage,
    AskedPrompt,
    EndpointAnswer,
    Messages,
    ModelBackend,
    ModelReply,
)
from rollmesh.shared.endpoints.config import EndpointConfig, EndpointKind
from rollmesh.shared.endpoints.metering import EndpointMeter, current_meter
from rollmesh.shared.endpoints.metrics import CALLS, PRICE, SECONDS, TOKENS
from rollmesh.shared.endpoints.openai_backend import OpenAiBackend
from rollmesh.shared.endpoints.recording import AnswerStore, RecordedAnswer
from rollmesh.shared.endpoints.spending import EndpointSpending
from rollmesh.shared.errors import (
    ConfigError,
    EndpointFailed,
    Internal,
    InvalidInput,
    MeshError,
    PriceLimit,
    UnknownEndpoint,
)
from rollmesh.shared.net.retry import retry
from rollmesh.shared.telemetry.metrics import count, observe

OpenBackend = Callable[[str, EndpointConfig], Awaitable[ModelBackend]]
"""Opens the endpoint of a name. Raises ConfigError."""


class Endpoints:
    """The endpoints of a table. Each is opened by its first request. Used on one event loop."""

    def __init__(
        self,
        table: Mapping[str, EndpointConfig],
        *,
        base_dir: Path = Path(),
        spent_dir: Path | None = None,
        clock: Clock | None = None,
        open_weights: OpenBackend | None = None,
    ) -> None:
        """Folders and files of the table are relative to `base_dir`. `spent_dir` is the run's folder for the sums of
        prices. Without `open_weights`, only endpoints of kind `openai` can be asked."""
        self._table = dict(table)
        self._base_dir = base_dir
        self._spent_dir = spent_dir
        self._clock = clock or SystemClock()
        self._open_weights = open_weights or _no_weights
        self._opened: dict[str, asyncio.Task[_OpenEndpoint]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the configured endpoints."""
        return tuple(self._table)

    @property
    def kinds(self) -> Mapping[str, EndpointKind]:
        """Kinds of the configured endpoints by name."""
        return {name: config.kind for name, config in self._table.items()}

    async def ask(
        self,
        endpoint: str,
        messages: Messages,
        *,
        temperature: float | None = None,
        max_tokens: int | None = None,
        top_p: float | None = None,
        stop: Sequence[str] = (),
        json: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: Literal["auto", "none"] = "auto",
        meter: EndpointMeter | None = None,
    ) -> EndpointAnswer:
        """Return the answer of an endpoint. Omitted parameters come from its table entry. With `json` the text must be
        a JSON value.

        `tools`, in the form of the OpenAI protocol, are only for the kind `openai`. `meter` counts the answer; by
        default that of the context. Raise EndpointFailed, PriceLimit or UnknownEndpoint.
        """
        config = self._table.get(endpoint)
        if config is None:
            known = ", ".join(self._table) or "none"
            raise UnknownEndpoint(
                f"endpoint `{endpoint}` is not configured; known: {known}. Add it to `endpoints`", endpoint=endpoint
            )
        asked = AskedPrompt(
            messages=_asked_messages(messages),
            temperature=config.temperature if temperature is None else temperature,
            max_tokens=max_tokens or config.max_tokens,
            top_p=1.0 if top_p is None else top_p,
            stop=tuple(stop),
            json=json,
            tools=tuple(tools),
            tool_choice=tool_choice,
        )
        meter = meter or current_meter()
        try:
            answer = await (await self._open(endpoint, config)).ask(asked, meter)
        except asyncio.CancelledError:
            meter.cut, meter.cut_s = endpoint, asyncio.get_running_loop().time()
            raise
        except PriceLimit as err:
            count(CALLS, endpoint, "failed")
            raise PriceLimit(f"endpoint `{endpoint}`: {err}", endpoint=endpoint) from err
        except (MeshError, OSError) as err:
            count(CALLS, endpoint, "failed")
            raise EndpointFailed(f"endpoint `{endpoint}`: {err}", endpoint=endpoint) from err
        meter.add(endpoint, answer)
        _count_answer(endpoint, answer)
        return answer

    async def close(self) -> None:
        """Close the connections."""
        opened, self._opened = list(self._opened.values()), {}
        for task in opened:
            task.cancel()
        for result in await asyncio.gather(*opened, return_exceptions=True):
            if isinstance(result, _OpenEndpoint):
                await result.close()

    async def _open(self, name: str, config: EndpointConfig) -> _OpenEndpoint:
        """Return the open endpoint. Concurrent first requests share one task; a failure is tried again by the next
        request."""
        task = self._opened.get(name)
        if task is None:
            task = self._opened[name] = asyncio.create_task(self._opening(name, config))
        try:
            return await asyncio.shield(task)
        except (MeshError, OSError):
            if self._opened.get(name) is task:
                del self._opened[name]
            raise

    async def _opening(self, name: str, config: EndpointConfig) -> _OpenEndpoint:
        record = self._base_dir / config.record if config.record else None
        replay = self._base_dir / config.replay if config.replay else None
        answers = await asyncio.to_thread(lambda: AnswerStore(name, record=record, replay=replay))
        backend: ModelBackend | None = None
        if replay is None or record is not None:  # a replay needs neither key nor server
            if config.kind == "openai":
                backend = await OpenAiBackend.open(config, self._base_dir)
            else:
                backend = await self._open_weights(name, config)
        return _OpenEndpoint(name, config, backend, answers, EndpointSpending(name, self._spent_dir), self._clock)


class _OpenEndpoint:
    """One endpoint with its connections, recorded answers and limits."""

    def __init__(
        self,
        name: str,
        config: EndpointConfig,
        backend: ModelBackend | None,
        answers: AnswerStore,
        spending: EndpointSpending,
        clock: Clock,
    ) -> None:
        """Without a `backend`, only recorded answers are returned."""
        self._name = name
        self._config = config
        self._backend = backend
        self._answers = answers
        self._spending = spending
        self._clock = clock
        self._slots = asyncio.Semaphore(config.concurrency)
        self._free_at_s = 0.0

    async def ask(self, asked: AskedPrompt, meter: EndpointMeter) -> EndpointAnswer:
        config, begun_s = self._config, self._clock.monotonic_s()
        digest = asked.digest(self._name, config.model, _identity(config))
        number = meter.number(digest)
        try:
            found = self._answers.find(digest, number, meter.scope)
            reply = found or await self._sent(asked, digest, number, meter)
            value = _json_value(reply) if asked.json else None
            # An answer that fails the request is not recorded, because it would fail every repetition.
            if found is None:
                self._record(asked, reply, digest, number, meter.scope)
        except BaseException:
            meter.release(digest, number)
            raise
        prompt_tokens, completion_tokens = reply.prompt_tokens or 0, reply.completion_tokens or 0
        return EndpointAnswer(
            text=reply.text,
            finish=reply.finish,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            price=0.0 if found else config.price(prompt_tokens, completion_tokens),
            latency_s=self._clock.monotonic_s() - begun_s,
            replayed=found is not None,
            value=value,
            calls=reply.calls,
            model=reply.model,
        )

    async def close(self) -> None:
        self._answers.close()
        if self._backend is not None:
            await self._backend.close()

    async def _sent(self, asked: AskedPrompt, digest: str, number: int, meter: EndpointMeter) -> ModelReply:
        """Send the request, repeat it while that may help, and price every response."""
        config, backend = self._config, self._backend
        if backend is None:
            last = asked.messages[-1].content[-200:] if asked.messages else ""
            raise InvalidInput(
                f"no answer is recorded in `replay` = {config.replay!r} for this request, which ends with {last!r}; "
                "record it, or set `record` to the same folder, so that requests without a recorded answer are sent"
            )
        seed = int.from_bytes(hashlib.sha256(f"{meter.scope}/{digest}/{number}".encode()).digest()[:8], "big") >> 1
        return await retry(
            lambda: self._attempt(backend, asked, seed, meter), limit_s=config.retry_s, config=config, clock=self._clock
        )

    def _record(self, asked: AskedPrompt, reply: ModelReply, digest: str, number: int, scope: str) -> None:
        self._answers.add(
            RecordedAnswer(
                digest=digest,
                number=number,
                scope=scope,
                time_s=self._clock.wall_s(),
                model=self._config.model,
                asked=asked,
                reply=reply,
            )
        )

    async def _attempt(self, backend: ModelBackend, asked: AskedPrompt, seed: int, meter: EndpointMeter) -> ModelReply:
        config = self._config
        async with self._slots:
            await self._pace()
            self._spending.check(config.price_max)
            reply = await backend.ask(asked, seed=seed)
            if price := config.price(reply.prompt_tokens or 0, reply.completion_tokens or 0):
                meter.add_price(self._name, price)
                count(PRICE, self._name, amount=price)
                self._spending.add(price)
            if reply.problem:
                raise Internal(reply.problem)
            if config.has_price and reply.prompt_tokens is None:
                raise InvalidInput(
                    "the response has no `usage`, so its price is unknown; set price_prompt and price_completion to 0, "
                    "or use a server that reports it"
                )
            return reply

    async def _pace(self) -> None:
        """Wait until one more request may be sent."""
        if self._config.requests_per_s:
            now_s = self._clock.monotonic_s()
            due_s = max(self._free_at_s, now_s)
            self._free_at_s = due_s + 1 / self._config.requests_per_s
            if due_s > now_s:
                await self._clock.sleep(due_s - now_s)


def _asked_messages(messages: Messages) -> tuple[AskedMessage, ...]:
    if isinstance(messages, str):
        return (AskedMessage(role="user", content=messages),)
    return tuple(
        AskedMessage(role=message.role, content=message.content) if isinstance(message, Message) else message
        for message in messages
    )


def _identity(config: EndpointConfig) -> Mapping[str, Any]:
    """Return what decides about an answer besides the model's name and the request."""
    if config.kind == "policy_step":
        return {"step": config.step, "incarnation": config.incarnation}
    return config.request


def _json_value(reply: ModelReply) -> Any:
    try:
        return msgspec.json.decode(reply.text)
    except UNDECODABLE as err:
        raise InvalidInput(f"the answer is not a JSON value ({err}): {reply.text[:200]!r}") from err


def _count_answer(endpoint: str, answer: EndpointAnswer) -> None:
    count(CALLS, endpoint, "replayed" if answer.replayed else "ok")
    count(TOKENS, endpoint, "prompt", amount=answer.prompt_tokens)
    count(TOKENS, endpoint, "completion", amount=answer.completion_tokens)
    observe(SECONDS, answer.latency_s, endpoint)


async def _no_weights(name: str, config: EndpointConfig) -> ModelBackend:
    raise ConfigError(
        f"the kind {config.kind} needs the inference nodes of a mesh, which this process does not use; only the kind "
        "openai can be asked here"
    )
