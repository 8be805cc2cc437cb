"""The connection to NATS as the streams see it: up or down, and requests that are tried again until their deadline.

With several servers the client leaves one that does not respond: a server that is stopped or cut off keeps its
connections, and one that is cut off from the other servers accepts requests that it cannot perform.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import nats.errors
import nats.js.errors
from nats.aio.client import Client, Server
from nats.aio.msg import Msg

from rollmesh.shared.bus.bus import BusUnavailable
from rollmesh.shared.errors import PermissionDenied

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

_RETRY_S = 0.05
_PING_S = 1.0
"""Time between two pings, in seconds, if there are several servers."""
_PONG_S_MAX = 4.0
"""Longest wait for the answer to a ping, in seconds. Then the client leaves the server."""
_NO_ANSWER_S_MAX = 8.0
"""Time without an answer of JetStream, in seconds, after which the client leaves a server that answers pings. It
exceeds the election of a leader."""
_LOG_AFTER_S = 3.0
"""Time without an answer of JetStream that is logged, in seconds."""
STORE_FAILED = 10077
INSUFFICIENT_STORAGE = 10047
STREAM_NOT_FOUND = 10059
WRONG_LAST_SEQUENCE = 10071
MESSAGE_IN_PROCESS = 10158
NO_PEERS = 10005
NO_REPLICAS = 10074
NO_JETSTREAM = (10039, 10076)
_ANSWERS = (STORE_FAILED, INSUFFICIENT_STORAGE, *NO_JETSTREAM)
"""Errors with code 503 that a repeated request would get again."""


class NoJetStream(PermissionDenied):
    """The server has no JetStream, or the account of this user has none."""

    reason = "NO_JETSTREAM"


class BusPermission(PermissionDenied):
    """The user of this process may not use a subject."""

    reason = "BUS_PERMISSION"


_TRANSIENT = (
    TimeoutError,  # nats.errors.TimeoutError is one too
    OSError,
    nats.errors.NoRespondersError,
    nats.errors.ConnectionClosedError,
    nats.errors.ConnectionReconnectingError,
    nats.errors.StaleConnectionError,
    nats.errors.OutboundBufferLimitError,
    nats.js.errors.NoStreamResponseError,
    nats.js.errors.ServiceUnavailableError,
)


def is_transient(err: BaseException) -> bool:
    """Whether the same request may succeed once the server is back."""
    if isinstance(err, nats.js.errors.APIError) and err.err_code in _ANSWERS:
        return False
    if isinstance(err, nats.js.errors.APIError) and err.err_code == MESSAGE_IN_PROCESS:
        return True  # an earlier copy of the record waits for its replicas
    return isinstance(err, _TRANSIENT)


class Link:
    """One NATS client and whether it is connected. `on_lost` callbacks run whenever the connection breaks or is closed.

    Acks of published records arrive on a separate inbox: `publish_async` of nats-py 2.16 loses every ack that is an
    error, for its callback raises what it should have set.
    """

    def __init__(self, client: Client, attempt_s: float, reconnect_wait_s: float) -> None:
        self.client = client
        self.js = client.jetstream(timeout=attempt_s)
        self.attempt_s = attempt_s
        self.on_lost: set[Callable[[], None]] = set()
        self._up = asyncio.Event()
        self._up.set()
        self._reconnect_wait_s = reconnect_wait_s
        self.cluster = ""
        """Name of the cluster of the first server; empty if it is a single one."""
        self._left = ""
        """host:port of the server that the client left last."""
        self._silent_since_s: float | None = None
        """Loop time of the first request without answer since the last answer of JetStream."""
        self._logged = False
        self._denied: set[str] = set()
        """Subjects that this user may not publish to, in lower case."""
        self._num_denials, self._last_denied = 0, ""
        self._watch: asyncio.Task[None] | None = None
        self._ack_prefix = ""
        self._acks: dict[str, asyncio.Future[int]] = {}
        self._num_sent = 0

    async def begin(self, *, several: bool) -> None:
        """Once, after the client has connected; nats-py subscribes again after each reconnect. `several`: there are
        other servers."""
        self.cluster = cluster_of(self.client)
        self._ack_prefix = self.client.new_inbox()
        await self.client.subscribe(f"{self._ack_prefix}.*", cb=self._ack)
        if several:
            self._watch = asyncio.create_task(self._leave_silent_servers(), name="nats servers")

    @property
    def clustered(self) -> bool:
        """Whether the server is one of a cluster."""
        return bool(self.cluster)

    @property
    def up(self) -> bool:
        """Whether records can be sent."""
        return self._up.is_set() and self.client.is_connected

    async def _leave_silent_servers(self) -> None:
        while not self.client.is_closed:
            await asyncio.sleep(_PING_S)
            if not self.client.is_connected:
                if self._up.is_set():
                    self._abort()  # nats-py waits until what it has sent is acknowledged, which may be never
                continue
            try:
                async with asyncio.timeout(_PONG_S_MAX):
                    await self.client.flush(timeout=int(_PONG_S_MAX) + 1)
            except (TimeoutError, OSError, nats.errors.Error) as err:
                raise_if_cancelled()
                if self.client.is_connected and isinstance(err, TimeoutError):
                    self._leave(f"does not answer a ping within {_PONG_S_MAX:g} s")
                continue
            now_s = asyncio.get_running_loop().time()
            if self._silent_since_s is not None and now_s - self._silent_since_s > _NO_ANSWER_S_MAX:
                self._silent_since_s = now_s
                self._leave(f"has not answered a JetStream request for {_NO_ANSWER_S_MAX:g} s")

    @property
    def server(self) -> str:
        """host:port of the connected server."""
        url = self.client.connected_url
        return str(url.netloc).rpartition("@")[2] if url is not None else "(none)"

    def choose_server(self, servers: list[Server], _: dict[str, Any]) -> tuple[Server | None, float]:
        """For the client's reconnects: return another server than the one that was left, and the pause before. Servers
        that failed come last."""
        best = min(
            servers, key=lambda one: (one.uri.netloc == self._left, one.reconnects, random.random()), default=None
        )
        return best, self._reconnect_wait_s

    def _leave(self, why: str) -> None:
        url = self.client.connected_url
        self._left = url.netloc if url is not None else ""
        _log.warning("NATS at %s %s; another server is tried", self.server, why)
        self._abort()

    def _abort(self) -> None:
        """Break the connection without waiting for what was sent. The client then connects to another server."""
        writer = getattr(self.client._transport, "_io_writer", None)  # `force_reconnect` waits for what was sent
        if writer is not None:
            writer.transport.abort()

    def answered(self) -> None:
        """Note an answer of JetStream."""
        if self._logged and self._silent_since_s is not None:
            _log.warning("NATS answers again")
        self._silent_since_s, self._logged = None, False

    def timed_out(self, cause: BaseException) -> None:
        """Note a request that JetStream did not answer. The first of many is logged."""
        now_s = asyncio.get_running_loop().time()
        if self._silent_since_s is None:
            self._silent_since_s = now_s
        if now_s - self._silent_since_s > _LOG_AFTER_S and not self._logged:
            self._logged = True
            of_cluster = "; less than a majority of the servers stores nothing" if self.cluster else ""
            _log.warning(
                "NATS has not answered for %.0f s (%s); calls wait%s", now_s - self._silent_since_s, cause, of_cluster
            )

    def refused(self, err: Exception) -> None:
        """Note a subject that this user may not publish to. The server does not answer the request. nats-py reports it
        in lower case."""
        if found := re.search(r'permissions violation for publish to "([^"]+)"', str(err), re.IGNORECASE):
            subject = found[1].lower()
            if subject not in self._denied:
                _log.error("%s", self._denial(subject))
            self._denied.add(subject)
            self._num_denials += 1
            self._last_denied = subject
            for callback in tuple(self.on_lost):
                callback()

    def check_allowed(self, subject: str) -> None:
        """Raise `BusPermission` if the server has rejected this subject."""
        if subject.lower() in self._denied:
            raise BusPermission(self._denial(subject), subject=subject)

    def _denial(self, subject: str) -> str:
        return (
            f"the NATS user {self.client.options.get('user')} may not publish to {subject}; `bus.login_file` must name "
            "the login of this kind of service (docs/security.md)"
        )

    async def publish(self, subject: str, payload: bytes, headers: dict[str, str]) -> asyncio.Future[int]:
        """Sends one record; the future gives its sequence, or the error that JetStream answers with. Cancel it to
        forget the ack."""
        self._num_sent += 1
        token = str(self._num_sent)
        ack: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._acks[token] = ack
        ack.add_done_callback(lambda done: self._forget(token, done))
        try:
            await self.client.publish(subject, payload, reply=f"{self._ack_prefix}.{token}", headers=headers)
        except BaseException:
            ack.cancel()
            raise
        return ack

    def _forget(self, token: str, ack: asyncio.Future[int]) -> None:
        self._acks.pop(token, None)
        if not ack.cancelled():
            ack.exception()  # marks it as seen: a writer may be gone when its ack comes

    async def _ack(self, message: Msg) -> None:
        ack = self._acks.get(message.subject.rpartition(".")[2])
        if ack is None or ack.done():
            return
        if message.headers and message.headers.get("Status") == "503":
            ack.set_exception(nats.js.errors.NoStreamResponseError())
            return
        self.answered()
        answer = json.loads(message.data)
        if "error" in answer:
            ack.set_exception(_api_error(answer["error"]))
        else:
            ack.set_result(answer["seq"])

    async def end(self) -> None:
        """Stop leaving servers. Call it before the client is closed."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)

    async def disconnected(self) -> None:
        """For the client's disconnected and closed callbacks."""
        self._up.clear()
        if self.client.is_closed:
            self._up.set()  # release the tasks that wait for it
        for callback in tuple(self.on_lost):
            callback()

    async def reconnected(self) -> None:
        """For the client's reconnected callback."""
        if (cluster := cluster_of(self.client)) != self.cluster:
            self._leave(
                f"is of cluster {cluster or '(none)'}, expected {self.cluster or '(none)'}: remove it from `bus.url`"
            )
            return
        self._up.set()

    @property
    def closed(self) -> bool:
        """Return whether the client was closed permanently."""
        return self.client.is_closed

    async def wait_until_up(self, until_s: float) -> None:
        """Returns once connected. Raises `BusUnavailable` at loop time `until_s`, or if the client is closed."""
        try:
            async with asyncio.timeout_at(until_s):
                await self._up.wait()
        except TimeoutError as err:
            raise BusUnavailable("NATS cannot be reached; it is tried again all the time") from err
        if self.closed:
            raise BusUnavailable("the connection to NATS was closed")

    async def call(self, verb: Callable[[], Awaitable[_T]], deadline_s: float, what: str) -> _T:
        """Does `verb`, again after transient failures, until it answers.

        Raises `BusUnavailable` after `deadline_s`; `NoJetStream`; `BusPermission`.
        """
        num_denials = self._num_denials
        until_s = asyncio.get_running_loop().time() + deadline_s
        while True:
            await self.wait_until_up(until_s)
            try:
                async with asyncio.timeout_at(until_s):
                    answer = await verb()
                raise_if_cancelled()
                self.answered()
                return answer
            except (TimeoutError, OSError, nats.errors.Error) as err:
                raise_if_cancelled()
                if isinstance(err, nats.js.errors.APIError) and err.err_code in NO_JETSTREAM:
                    raise NoJetStream(f"NATS has no JetStream here ({err.description}); {ENABLE_JETSTREAM}") from err
                if not is_transient(err):
                    self.answered()
                    raise
                if self._num_denials > num_denials:
                    self.check_allowed(self._last_denied)
                self.timed_out(err)
                if asyncio.get_running_loop().time() + _RETRY_S >= until_s:
                    raise BusUnavailable(f"NATS did not {what} within {deadline_s} s ({err})") from err
            await asyncio.sleep(_RETRY_S)


ENABLE_JETSTREAM = "configure `jetstream` for the server and its account, as `rollmesh nats-config` does"


def cluster_of(client: Client) -> str:
    """Return the name of the cluster of the connected server; empty if it is a single server."""
    return str(client._server_info.get("cluster") or "")


def raise_if_cancelled() -> None:
    """nats-py waits with `asyncio.wait_for`, which before Python 3.12 loses a cancellation that comes with the answer
    or error."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _api_error(answer: dict[str, Any]) -> nats.js.errors.APIError:
    try:
        nats.js.errors.APIError.from_error(answer)
    except nats.js.errors.APIError as err:
        return err
    raise AssertionError("from_error returned")
