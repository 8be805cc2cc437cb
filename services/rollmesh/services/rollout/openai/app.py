"""The HTTP application: routes, keys, streams and errors of the OpenAI protocol.

    POST /v1/chat/completions    POST /v1/completions    GET /v1/models

A request runs in a task of its episode. A reply that is streamed begins when the first tokens arrive, so that an error
before them has its HTTP status. If the client disconnects, the turn is cancelled. Collaborators: `protocol`, `replies`,
`chains`, `served`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from rollmesh.services.rollout.agent_types import MODEL, LimitReached, Turn
from rollmesh.services.rollout.conversation import ChatMessage, RequestedCall
from rollmesh.services.rollout.environment import Environment
from rollmesh.services.rollout.failures import EpisodeFailed
from rollmesh.services.rollout.metrics import OPENAI_REQUESTS
from rollmesh.services.rollout.openai.chains import ChainPrompt
from rollmesh.services.rollout.openai.choices import ChoiceText, Part
from rollmesh.services.rollout.openai.openai_errors import MethodNotAllowed, UnknownModel
from rollmesh.services.rollout.openai.protocol import (
    ChatRequest,
    CompletionRequest,
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
    chat_reply,
    completion_chunk,
    completion_logprobs,
    completion_reply,
    completion_usage,
    error_reply,
    finish_of,
    model_reply,
    models_reply,
    token_logprobs,
)
from rollmesh.services.rollout.openai.served import Served
from rollmesh.services.rollout.tokenizer import Tokenizer
from rollmesh.services.rollout.tool_calls.parsing import ToolCallParser
from rollmesh.shared.clock import Clock
from rollmesh.shared.domain.trajectory import Segment
from rollmesh.shared.endpoints.answer import AskedMessage, EndpointCall
from rollmesh.shared.endpoints.config import EndpointKind
from rollmesh.shared.errors import (
    DeadlineExceeded,
    InfraFailure,
    Internal,
    MeshError,
    NotFound,
    PayloadTooLarge,
    Phrase,
    field_error,
)
from rollmesh.shared.telemetry.metrics import count

BODY_S_MAX = 45.0
"""Time in which the body of a request must arrive, in seconds. It is below that of `AsgiServer`, so that the client
gets a reply."""

T = TypeVar("T")
Emit = Callable[[bytes], None]
_log = logging.getLogger(__name__)


class OpenAiApp:
    """Answer requests for the episodes that `find` returns by their key."""

    def __init__(
        self,
        find: Callable[[str], Served],
        *,
        tokenizer: Tokenizer,
        parser: ToolCallParser,
        unread: str,
        opens_calls: bool,
        request_bytes_max: int,
        clock: Clock,
    ) -> None:
        """`find` raises `Unauthenticated` for a key that is not the key of a running episode. `unread` is why the
        parser does not read the calls of the chat template; empty if it does. `opens_calls`: whether it reads calls in
        the words of the chat format."""
        self._find = find
        self._tokenizer = tokenizer
        self._parser = parser
        self._unread = unread
        self._opening = tokenizer.format.call_opening if opens_calls else ""
        self._request_bytes_max = request_bytes_max
        self._clock = clock

    def asgi(self) -> Starlette:
        """Return the application."""
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
                Route("/v1/completions", self._guarded(self._complete), methods=["POST"]),
                Route("/v1/models", self._guarded(self._models), methods=["GET"]),
                Route("/v1/models/{model}", self._guarded(self._model), methods=["GET"]),
            ],
            exception_handlers={404: self._unknown_path, 405: self._wrong_method},
        )

    # Requests ---------------------------------------------------------------------------------------------------------

    def _guarded(
        self, handle: Callable[[Request, Served], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return a handler that finds the episode by the key, and turns errors into replies."""

        async def guarded(request: Request) -> Response:
            try:
                kind, _, key = request.headers.get("authorization", "").partition(" ")
                response = await handle(request, self._find(key.strip() if kind.lower() == "bearer" else ""))
            except ClientDisconnect:
                response = Response(status_code=499)  # not sent, because the client is gone
            except Exception as err:  # noqa: BLE001 - the recording point of requests: the client gets each error as a reply
                response = _response(_error(err))
            count(OPENAI_REQUESTS, str(response.status_code))
            return response

        return guarded

    async def _unknown_path(self, request: Request, error: Exception) -> Response:
        return _not_served(request, NotFound, {})

    async def _wrong_method(self, request: Request, error: Exception) -> Response:
        return _not_served(request, MethodNotAllowed, getattr(error, "headers", None) or {})

    async def _models(self, request: Request, served: Served) -> Response:
        return _json(models_reply([MODEL, *served.env.endpoints], int(self._clock.wall_s())))

    async def _model(self, request: Request, served: Served) -> Response:
        name = request.path_params["model"]
        _check_model(name, served.env.endpoints)
        return _json(model_reply(name, int(self._clock.wall_s())))

    async def _chat(self, request: Request, served: Served) -> Response:
        asked = chat_request(await self._body(request))
        _check_model(asked.model, served.env.endpoints)
        reply = self._reply(served, "chatcmpl", asked.model)
        if asked.model != MODEL:
            return await self._ask(request, served, asked, reply)
        if asked.parse_calls and self._unread:
            must = f"be absent, because they cannot be served: {self._unread}"
            remedy = "name a parser in rollout.openai.tool_calls"
            raise field_error("tools", must, len(asked.tools), remedy)
        if asked.begin_call and not self._opening:
            must = "be auto or none, because the opening of a call is not known for this parser"
            raise field_error("tool_choice", must, "required")
        if not asked.sampling.stream:
            return _json(await self._attended(request, served, self._chat_reply(served, asked, reply)))
        return await self._streamed(request, served, lambda emit: self._chat_stream(served, asked, reply, emit))

    async def _complete(self, request: Request, served: Served) -> Response:
        asked = completion_request(await self._body(request))
        _check_model(asked.model, ())
        if not isinstance(asked.prompt, str) and max(asked.prompt) >= self._tokenizer.num_ids:
            raise field_error("prompt", f"have token ids in [0, {self._tokenizer.num_ids})", max(asked.prompt))
        reply = self._reply(served, "cmpl", asked.model)
        if not asked.sampling.stream:
            return _json(await self._attended(request, served, self._completion_reply(served, asked, reply)))
        return await self._streamed(request, served, lambda emit: self._completion_stream(served, asked, reply, emit))

    async def _body(self, request: Request) -> bytes:
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_S_MAX):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > self._request_bytes_max:
                        raise PayloadTooLarge(
                            f"the body must have at most {self._request_bytes_max} bytes; send less, or raise "
                            "rollout.openai.request_mb_max"
                        )
        except TimeoutError as err:
            raise DeadlineExceeded(
                f"the body must arrive within {BODY_S_MAX:g} s, got {len(body)} bytes of it"
            ) from err
        return bytes(body)

    def _reply(self, served: Served, prefix: str, model: str) -> ReplyHead:
        served.num_requests += 1
        key = served.env.key
        id_ = f"{prefix}-{key.episode}-{key.attempt}-{served.num_requests}"
        return ReplyHead(id=id_, created=int(self._clock.wall_s()), model=model)

    # Chat completions -------------------------------------------------------------------------------------------------

    async def _chat_reply(self, served: Served, asked: ChatRequest, reply: ReplyHead) -> bytes:
        prompt, turns = await self._chat_turns(served, asked, reply, lambda index, piece, parts: None)
        choices = [
            Choice(
                message=text.message,
                finish=finish_of(turn.finish, bool(text.calls)),
                logprobs=token_logprobs(self._tokenizer, turn.token_ids, turn.logprobs)
                if asked.sampling.logprobs
                else None,
            )
            for turn, text in turns
        ]
        return chat_reply(reply, choices, _usage(prompt, [turn for turn, _ in turns]))

    async def _chat_stream(self, served: Served, asked: ChatRequest, reply: ReplyHead, emit: Emit) -> None:
        chunks = ChatStream(reply, include_usage=asked.sampling.include_usage)
        num_calls = [0] * asked.sampling.n
        begun: set[int] = set()

        def on_part(index: int, piece: Segment | None, parts: Sequence[Part]) -> None:
            if index not in begun:
                begun.add(index)
                emit(chunks.begin(index))
            logprobs = self._piece_logprobs(piece) if asked.sampling.logprobs else None
            if logprobs and not any(isinstance(part, str) for part in parts):
                emit(chunks.content("", index, logprobs))
            for part in parts:
                if isinstance(part, RequestedCall):
                    emit(chunks.call(part, num_calls[index], index))
                    num_calls[index] += 1
                else:
                    emit(chunks.content(part, index, logprobs))
                    logprobs = None if logprobs is None else ()

        prompt, turns = await self._chat_turns(served, asked, reply, on_part)
        for index, (turn, text) in enumerate(turns):
            emit(chunks.end(finish_of(turn.finish, bool(text.calls)), index))
        if asked.sampling.include_usage:
            emit(chunks.usage(_usage(prompt, [turn for turn, _ in turns])))

    async def _ask(self, request: Request, served: Served, asked: ChatRequest, reply: ReplyHead) -> Response:
        """Return the answer of an endpoint. It is metered as by `env.ask`, and is not recorded as a turn.

        A stream has its text as one chunk, and each call as one.
        """
        sampling = asked.sampling
        _check_asked(asked, served.env.endpoint_kinds[asked.model])

        async def answer() -> bytes:
            said = await served.env.ask(
                asked.model,
                [_asked_message(message) for message in asked.messages],
                temperature=sampling.temperature,
                max_tokens=sampling.max_tokens,
                top_p=sampling.top_p,
                stop=sampling.stop,
                tools=asked.tools,
                tool_choice="auto" if asked.parse_calls else "none",
            )
            usage = Usage(prompt_tokens=said.prompt_tokens, completion_tokens=said.completion_tokens)
            calls = tuple(RequestedCall(id=call.id, name=call.name, arguments=call.arguments) for call in said.calls)
            message = ChatMessage(role="assistant", content=said.text, calls=calls)
            finish = finish_of(said.finish, bool(calls))
            if not sampling.stream:
                return chat_reply(reply, [Choice(message=message, finish=finish)], usage)
            chunks = ChatStream(reply, include_usage=sampling.include_usage)
            text = [chunks.content(said.text)] if said.text or not calls else []
            parts = [chunks.begin(), *text, *map(chunks.call, calls, range(len(calls))), chunks.end(finish)]
            return b"".join([*parts, *([chunks.usage(usage)] if sampling.include_usage else []), DONE])

        body = await self._attended(request, served, answer())
        return Response(body, media_type="text/event-stream") if sampling.stream else _json(body)

    def _piece_logprobs(self, piece: Segment | None) -> Sequence[dict[str, Any]] | None:
        if piece is None or piece.logprobs is None:
            return None
        return token_logprobs(self._tokenizer, piece.token_ids, piece.logprobs)

    async def _chat_turns(
        self,
        served: Served,
        asked: ChatRequest,
        reply: ReplyHead,
        on_part: Callable[[int, Segment | None, Sequence[Part]], None],
    ) -> tuple[ChainPrompt, list[tuple[Turn, ChoiceText]]]:
        """Sample the choices of a request; return its prompt, and per choice the turn and its text."""
        chains = served.chains
        prompt = chains.prompt(asked.messages, asked.tools)

        async def choice(index: int) -> tuple[Turn, ChoiceText]:
            text = ChoiceText(
                self._tokenizer,
                stop=asked.sampling.stop,
                parser=self._parser if asked.parse_calls else None,
                tools=asked.tools,
                turn=_turn_id(served.env, prompt),
                on_part=lambda piece, parts: on_part(index, piece, parts),
            )
            begin = None
            if asked.begin_call:
                text.begin(self._opening)
                begin = self._tokenizer.encode_markup(self._opening)
            env, turn = await chains.generate(prompt, asked.sampling, self._stops(asked.sampling), text.feed, begin)
            text.finish()
            chains.answered(prompt, env, turn, text.message, asked.messages)
            served.answered(reply.id, index, env)
            return turn, text

        return prompt, await _all(served, [choice(index) for index in range(asked.sampling.n)])

    # Completions ------------------------------------------------------------------------------------------------------

    async def _completion_reply(self, served: Served, asked: CompletionRequest, reply: ReplyHead) -> bytes:
        prompt, turns = await self._completion_turns(served, asked, reply, lambda index, piece, parts: None)
        written = [
            (
                text.content,
                finish_of(turn.finish, False),
                completion_logprobs(self._tokenizer, turn) if asked.sampling.logprobs else None,
            )
            for turn, text in turns
        ]
        return completion_reply(reply, written, _usage(prompt, [turn for turn, _ in turns]))

    async def _completion_stream(self, served: Served, asked: CompletionRequest, reply: ReplyHead, emit: Emit) -> None:
        def on_part(index: int, piece: Segment | None, parts: Sequence[Part]) -> None:
            said = "".join(part for part in parts if isinstance(part, str))
            if said:
                emit(completion_chunk(reply, said, None, index))

        prompt, turns = await self._completion_turns(served, asked, reply, on_part)
        for index, (turn, _) in enumerate(turns):
            logprobs = completion_logprobs(self._tokenizer, turn) if asked.sampling.logprobs else None
            emit(completion_chunk(reply, "", finish_of(turn.finish, False), index, logprobs))
        if asked.sampling.include_usage:
            emit(completion_usage(reply, _usage(prompt, [turn for turn, _ in turns])))

    async def _completion_turns(
        self,
        served: Served,
        asked: CompletionRequest,
        reply: ReplyHead,
        on_part: Callable[[int, Segment | None, Sequence[Part]], None],
    ) -> tuple[ChainPrompt, list[tuple[Turn, ChoiceText]]]:
        chains = served.chains
        prompt = chains.raw_prompt(asked.prompt)

        async def choice(index: int) -> tuple[Turn, ChoiceText]:
            text = ChoiceText(
                self._tokenizer,
                stop=asked.sampling.stop,
                on_part=lambda piece, parts: on_part(index, piece, parts),
            )
            env, turn = await chains.generate(prompt, asked.sampling, self._stops(asked.sampling), text.feed)
            text.finish()
            chains.completed(prompt, env, turn, text.content)
            served.answered(reply.id, index, env)
            return turn, text

        return prompt, await _all(served, [choice(index) for index in range(asked.sampling.n)])

    def _stops(self, sampling: SamplingRequest) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self._tokenizer.format.turn_ends, *sampling.stop)))

    # Tasks ------------------------------------------------------------------------------------------------------------

    async def _attended(self, request: Request, served: Served, work: Coroutine[Any, Any, bytes]) -> bytes:
        """Return the body of a reply; cancel its work if the client disconnects."""
        task = served.start(work)
        try:
            return await _while_connected(request, task)
        finally:
            served.abandon(task)

    async def _streamed(
        self, request: Request, served: Served, work: Callable[[Emit], Coroutine[Any, Any, None]]
    ) -> StreamingResponse:
        """Return a response with the events that `work` emits. Raise its error if it fails before the first event."""
        events: asyncio.Queue[bytes | None] = asyncio.Queue()  # bounded by the tokens of the turns
        task = served.start(work(events.put_nowait))
        task.add_done_callback(lambda _: events.put_nowait(None))
        first: asyncio.Future[bytes | None] = asyncio.ensure_future(events.get())
        try:
            begun = await _while_connected(request, first)
            if begun is None:
                task.result()
        except BaseException:
            first.cancel()
            served.abandon(task)
            raise
        return EventStream(_events(begun, events, task), lambda: served.abandon(task))


class EventStream(StreamingResponse):
    """A response of events. `end` is called in every case, also if the client disconnects while an event waits to be
    sent."""

    def __init__(self, events: AsyncIterator[bytes], end: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()


async def _events(
    event: bytes | None, events: asyncio.Queue[bytes | None], task: asyncio.Task[None]
) -> AsyncIterator[bytes]:
    while event is not None:
        yield event
        event = await events.get()
    err = task.exception()
    yield DONE if err is None else _error(err).event


async def _all(served: Served, turns: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run the choices of a request together. If one fails, abandon the others and raise its error."""
    tasks = [asyncio.ensure_future(turn) for turn in turns]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            served.abandon(task)
        await asyncio.gather(*tasks, return_exceptions=True)


async def _while_connected(request: Request, waiting: asyncio.Future[T]) -> T:
    """Return the result of a future. Raise `ClientDisconnect` if the client disconnects before."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    left = asyncio.ensure_future(disconnected())
    either: set[asyncio.Future[Any]] = {waiting, left}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            raise ClientDisconnect
        return waiting.result()
    finally:
        left.cancel()


def _turn_id(env: Environment, prompt: ChainPrompt) -> str:
    prompt.num_turns += 1
    return f"{env.key.episode}/{prompt.digest.hex()}/{prompt.num_turns}"


def _usage(prompt: ChainPrompt, turns: Sequence[Turn]) -> Usage:
    return Usage(prompt_tokens=prompt.num_tokens, completion_tokens=sum(int(turn.token_ids.size) for turn in turns))


def _check_model(model: str, endpoints: Sequence[str]) -> None:
    if model != MODEL and model not in endpoints:
        known = ", ".join((MODEL, *endpoints))
        raise field_error("model", f"be {'one of ' if endpoints else ''}{known}", model, of=UnknownModel)


def _check_asked(asked: ChatRequest, kind: EndpointKind) -> None:
    """Reject what the endpoint cannot do."""
    sampling = asked.sampling
    for field, value, neutral in (
        ("n", sampling.n, 1),
        ("logprobs", sampling.logprobs, False),
        ("tool_choice", "required" if asked.begin_call else "auto", "auto"),
    ):
        if value != neutral:
            must = f"be absent, because {asked.model} is an endpoint and not the model {MODEL}"
            raise field_error(field, must, value, "remove it")
    called = any(message.calls or message.role == "tool" for message in asked.messages)
    for field, value in (("tools", bool(asked.tools)), ("messages", called)):
        if value and kind != "openai":
            must = f"ask for text without tools, because {asked.model} is an endpoint of kind {kind}"
            raise field_error(field, must, Phrase("tools"), "use an endpoint of kind openai")


def _asked_message(message: ChatMessage) -> AskedMessage:
    return AskedMessage(
        role=message.role,
        content=message.content,
        name=message.name,
        calls=tuple(EndpointCall(id=call.id, name=call.name, arguments=call.arguments) for call in message.calls),
        call_id=message.call_id,
    )


def _error(err: BaseException) -> ErrorReply:
    """Return the reply for an error. An infra failure is status 503 with its reason, whatever its cause."""
    if isinstance(err, EpisodeFailed):
        return error_reply(InfraFailure(f"the episode failed and is retried by the mesh: {err}"))
    if isinstance(err, (LimitReached, MeshError)):
        return error_reply(err)
    _log.error("request failed: %s", err, exc_info=err)
    return error_reply(Internal("the server has a bug; the log of the rollout worker has the traceback"))


def _not_served(request: Request, kind: type[NotFound], headers: Mapping[str, str]) -> Response:
    error = error_reply(
        kind(
            f"{request.method} {request.url.path[:200]} is not served; use POST /v1/chat/completions, POST "
            "/v1/completions, GET /v1/models or GET /v1/models/MODEL"
        )
    )
    count(OPENAI_REQUESTS, str(error.status))
    return Response(error.body, status_code=error.status, headers={**error.headers, **headers})


def _response(error: ErrorReply) -> Response:
    closing = {"connection": "close"} if error.status == 408 else {}  # the rest of the body may still arrive
    return Response(error.body, status_code=error.status, headers={**error.headers, **closing})


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
