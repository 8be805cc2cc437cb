"""The HTTP application of the live page: the static files, and read-only answers in JSON.

    GET  /  /static/NAME                          the page itself, without data and without a login
    POST /api/login  /api/logout                  {"token": ...} or {"ticket": ...} opens a session, kept in a cookie
    GET  /api/events?run=RUN                      server-sent events: mesh, run, moved
    GET  /api/mesh                                nodes and runs
    GET  /api/runs/RUN                            the state of a run
    GET  /api/runs/RUN/history                    updates and evaluations
    GET  /api/runs/RUN/metrics                    metrics of the learner, where the gateway can read them
    GET  /api/runs/RUN/samples                    the newest samples
    GET  /api/runs/RUN/samples/SAMPLE             a sample with its tokens
    GET  /api/runs/RUN/audit                      the newest verdict; POST starts an audit

Every path below /api/ but the login needs the token as `Authorization: Bearer`, or the cookie.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollmesh.services.gateway.metrics import PAGE_REQUESTS
from rollmesh.services.gateway.page.audits import Audits
from rollmesh.services.gateway.page.config import PageConfig
from rollmesh.services.gateway.page.events import PageEvents
from rollmesh.services.gateway.page.feed import Feed, RunFeed
from rollmesh.services.gateway.page.history import RECENT_MAX
from rollmesh.services.gateway.page.learner_metrics import LearnerMetrics
from rollmesh.services.gateway.page.login import PageLogin
from rollmesh.services.gateway.page.parts import PageParts
from rollmesh.services.gateway.page.plain import plain
from rollmesh.services.gateway.page.transcripts import Transcripts
from rollmesh.shared.domain.decoding import UNDECODABLE
from rollmesh.shared.errors import (
    Code,
    MeshError,
    NotFound,
    Overloaded,
    PayloadTooLarge,
    Phrase,
    Unauthenticated,
    field_error,
)
from rollmesh.shared.telemetry.metrics import count

BODY_BYTES_MAX = 4096
BODY_S_MAX = 10.0
AUDIT_POLL_S = 10.0
"""While a page is open, it is checked this often whether an audit is due, in seconds."""
CATCH_UP_S = 5.0
"""An answer about the history waits for the ledger to be read for at most this time, and then has what was read."""
HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "object-src 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_STATUS = {
    Code.INVALID_ARGUMENT: 400,
    Code.UNAUTHENTICATED: 401,
    Code.NOT_FOUND: 404,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.UNAVAILABLE: 503,
    Code.DEADLINE_EXCEEDED: 504,
}
_log = logging.getLogger(__name__)
Handler = Callable[[Request], Awaitable[Any]]


class LoginBody(msgspec.Struct, frozen=True):
    """The body of a login: one of both."""

    token: str = ""
    ticket: str = ""


class PageApp:
    """Answers the requests of browsers."""

    def __init__(
        self,
        config: PageConfig,
        login: PageLogin,
        feed: Feed,
        transcripts: Transcripts,
        audits: Audits,
        parts: PageParts,
        *,
        secure: bool,
    ) -> None:
        """`secure`: the page is served over HTTPS."""
        self._config = config
        self._login = login
        self._feed = feed
        self._transcripts = transcripts
        self._audits = audits
        self._parts = parts
        self._metrics = LearnerMetrics(parts)
        self._secure = secure
        self._num_streams = 0
        self._files = _static_files()
        self.closing = asyncio.Event()
        """Ends the streams when it is set."""

    def asgi(self) -> ASGIApp:
        """Return the application."""
        run = "/api/runs/{run}"
        routes = [
            Route("/", self._recorded(self._file)),
            Route("/static/{name}", self._recorded(self._file)),
            Route("/api/login", self._recorded(self._open_session), methods=["POST"]),
            Route("/api/logout", self._recorded(self._close_session), methods=["POST"]),
            Route("/api/events", self._guarded(self._events)),
            Route("/api/mesh", self._guarded(self._mesh)),
            Route(run, self._guarded(self._state)),
            Route(f"{run}/history", self._guarded(self._history)),
            Route(f"{run}/metrics", self._guarded(self._learner_metrics)),
            Route(f"{run}/samples", self._guarded(self._samples)),
            Route(run + "/samples/{sample:path}", self._guarded(self._sample)),
            Route(f"{run}/audit", self._guarded(self._audit), methods=["GET", "POST"]),
        ]
        app = Starlette(routes=routes, exception_handlers={404: self._unknown_path, 405: self._unknown_path})

        async def with_headers(scope: Scope, receive: Receive, send: Send) -> None:
            async def send_with_headers(message: Message) -> None:
                if message["type"] == "http.response.start":
                    extra = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                    message = {**message, "headers": [*message.get("headers", []), *extra]}
                    count(PAGE_REQUESTS, str(message["status"]))
                await send(message)

            await app(scope, receive, send_with_headers)

        return with_headers

    # Requests ---------------------------------------------------------------------------------------------------------

    def _guarded(self, handle: Handler) -> Callable[[Request], Awaitable[Response]]:
        """Return a handler for requests with the token or a session."""

        async def checked(request: Request) -> Any:
            authorization = request.headers.get("authorization", "")
            if not self._login.admits(authorization, request.cookies.get(self._login.cookie, "")):
                raise Unauthenticated(
                    "log in with the token of the run, which its run folder holds, or with `rollmesh page RUN`"
                )
            return await handle(request)

        return self._recorded(checked)

    def _recorded(self, handle: Handler) -> Callable[[Request], Awaitable[Response]]:
        """Return a handler that answers with JSON, or with the error as JSON."""

        async def recorded(request: Request) -> Response:
            try:
                if request.method == "POST":
                    _check_origin(request)
                found = await handle(request)
                return found if isinstance(found, Response) or callable(found) else _json(found)
            except ClientDisconnect:
                return Response(status_code=499)  # not sent, because the client is gone
            except MeshError as error:
                return _error(error)
            except Exception:  # noqa: BLE001 - the recording point of requests: a bug must not end the gateway
                _log.exception("request of the page failed: path=%s", request.url.path[:200])
                return _json({"error": {"reason": "INTERNAL", "message": "a bug; the log of the gateway has it"}}, 500)

        return recorded

    async def _unknown_path(self, request: Request, error: Exception) -> Response:
        return _error(NotFound(f"{request.method} {request.url.path[:200]} is not served"))

    async def _file(self, request: Request) -> Response:
        found = self._files.get(request.path_params.get("name", "index.html"))
        if found is None:
            raise NotFound("no such file")
        content, kind, tag = found
        headers = {"etag": tag, "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=kind, headers=headers)

    # Login ------------------------------------------------------------------------------------------------------------

    async def _open_session(self, request: Request) -> Response:
        try:
            given = msgspec.json.decode(await _body(request), type=LoginBody)
        except UNDECODABLE as error:
            raise field_error("body", 'be {"token": ...} or {"ticket": ...}', error) from error
        if given.ticket:
            session = self._login.open_with_ticket(given.ticket)
            wrong = (
                "this login link was used, or has expired; get a new one with `rollmesh page RUN`, or enter the token"
            )
        else:
            session = self._login.open_with_token(given.token)
            wrong = (
                "this is not the token of the mesh; it is in the file `token` of the run folder, or in "
                "`security.token_file`"
            )
        if session is None:
            raise Unauthenticated(wrong)
        response = _json({"ok": True})
        self._set_cookie(response, session, int(self._login.session_s))
        return response

    async def _close_session(self, request: Request) -> Response:
        response = _json({"ok": True})
        self._set_cookie(response, "", 0)
        return response

    def _set_cookie(self, response: Response, value: str, age_s: int) -> None:
        response.set_cookie(
            self._login.cookie, value, max_age=age_s, path="/", secure=self._secure, httponly=True, samesite="strict"
        )

    # Answers ----------------------------------------------------------------------------------------------------------

    async def _events(self, request: Request) -> Any:
        run = request.query_params.get("run", "")
        if run:
            await self._feed.run_feed(run)  # so that an unknown run is an error and not a stream
        if self._num_streams >= self._config.streams_max:  # checked last: nothing else runs until the stream is counted
            raise Overloaded(
                f"{self._config.streams_max} pages are open; close one, or raise `gateway.page.streams_max`",
                retry_after_s=5.0,
            )
        by_token = bool(request.headers.get("authorization"))
        left_s = None if by_token else self._login.left_s(request.cookies.get(self._login.cookie, ""))

        async def stream(scope: Scope, receive: Receive, send: Send) -> None:
            self._num_streams += 1
            audits = asyncio.create_task(self._audit_again(run), name=f"audits of {run}") if run else None
            try:
                async with self._feed.page(run) as sections:
                    config = self._config
                    events = PageEvents(
                        sections,
                        send_s_max=config.send_s_max,
                        interval_s=config.refresh_s / 2,
                        closing=self.closing,
                        limit_s=left_s,
                    )
                    await events(scope, receive, send)
            finally:
                self._num_streams -= 1
                if audits is not None:
                    audits.cancel()
                    await asyncio.gather(audits, return_exceptions=True)

        return stream

    async def _audit_again(self, run: str) -> None:
        """Request audits of a run while a page of it is open. All pages together cause at most one per interval."""
        feed = await self._feed.run_feed(run)
        await feed.caught_up.wait()
        while self._audits.every_s > 0:
            self._audits.request(run, feed.history.position)
            await asyncio.sleep(min(self._audits.every_s, AUDIT_POLL_S))

    async def _mesh(self, request: Request) -> Any:
        return await self._feed.read_mesh()

    async def _run(self, request: Request) -> RunFeed:
        """Return the feed of the run that the path names. Its history is read, or as far as CATCH_UP_S allows."""
        feed = await self._feed.run_feed(request.path_params["run"])
        try:
            async with asyncio.timeout(CATCH_UP_S):
                await feed.caught_up.wait()
        except TimeoutError:
            pass
        return feed

    async def _state(self, request: Request) -> Any:
        return plain(await self._feed.run_state(request.path_params["run"]))

    async def _history(self, request: Request) -> Any:
        feed = await self._run(request)
        history = feed.history
        state = feed.state if feed.state.run else await self._feed.run_state(feed.run)
        times = {key: found.time_unix_s for key, found in history.evals.items()}
        evals = [{**plain(one), "time_unix_s": times.get((one.step, one.incarnation))} for one in state.evals]
        return {
            "problem": feed.problem,
            "position": history.position,
            "began_unix_s": history.began_unix_s,
            "spec": plain(history.spec),
            "updates": history.points(),
            "evals": evals,
        }

    async def _learner_metrics(self, request: Request) -> Any:
        return await self._metrics.read((await self._feed.run_feed(request.path_params["run"])).run)

    async def _samples(self, request: Request) -> Any:
        feed = await self._run(request)
        return {"problem": feed.problem, "samples": list(reversed(feed.history.recent)), "num_max": RECENT_MAX}

    async def _sample(self, request: Request) -> Any:
        feed = await self._run(request)
        name = request.path_params["sample"]
        if not 0 < len(name) <= 256 or not name.isprintable():
            raise field_error("sample", "be the id of a sample or episode, of 1 to 256 characters", name)
        return await self._transcripts.read(feed.run, name, feed.history)

    async def _audit(self, request: Request) -> Any:
        run = (await self._feed.run_feed(request.path_params["run"])).run
        return self._audits.request(run) if request.method == "POST" else self._audits.verdict(run)


def _static_files() -> dict[str, tuple[bytes, str, str]]:
    """Return content, type and tag of each file of the page, by name."""
    found = {}
    for entry in resources.files(__package__).joinpath("static").iterdir():
        content = entry.read_bytes()
        kind = _TYPES.get(entry.name.rpartition(".")[2])
        if kind is not None:
            found[entry.name] = (content, kind, f'"{hashlib.sha256(content).hexdigest()[:16]}"')
    return found


def _check_origin(request: Request) -> None:
    """Reject a POST that another site sends: its content type, or the browser's statement about its origin, is
    different."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip()
    if kind != "application/json":
        raise field_error("content-type", "be application/json", kind)
    site = request.headers.get("sec-fetch-site", "same-origin")
    if site not in ("same-origin", "none"):
        raise field_error("sec-fetch-site", "be same-origin, because the page accepts no requests of other sites", site)


async def _body(request: Request) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S_MAX):
            async for chunk in request.stream():
                body += chunk
                if len(body) > BODY_BYTES_MAX:
                    raise PayloadTooLarge(f"the body must have at most {BODY_BYTES_MAX} bytes")
    except TimeoutError as error:
        raise field_error("body", f"arrive within {BODY_S_MAX:.0f} s", Phrase(f"{len(body)} bytes")) from error
    return bytes(body)


def _json(value: Any, status: int = 200) -> Response:
    return Response(
        msgspec.json.encode(value), status, media_type="application/json", headers={"cache-control": "no-store"}
    )


def _error(error: MeshError) -> Response:
    status = 413 if isinstance(error, PayloadTooLarge) else _STATUS.get(error.code, 500)
    response = _json({"error": {"reason": error.reason, "message": error.message}}, status)
    if error.retry_after_s is not None:
        response.headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    return response
