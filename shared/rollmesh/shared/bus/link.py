"""The connection to NATS as the streams see it: up or down, and requests that are tried again until their deadline."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from rollmesh.shared.bus.bus import BusUnavailable

_T = TypeVar("_T")

_RETRY_S = 0.05
STORE_FAILED = 10077
INSUFFICIENT_STORAGE = 10047
STREAM_NOT_FOUND = 10059
WRONG_LAST_SEQUENCE = 10071

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
    if isinstance(err, nats.js.errors.APIError) and err.err_code in (STORE_FAILED, INSUFFICIENT_STORAGE):
        return False  # 503, but an answer: the stream or the store is full
    return isinstance(err, _TRANSIENT)


class Link:
    """One NATS client and whether it is connected. `on_lost` callbacks run whenever the connection breaks or is closed.

    Acks of published records arrive on a separate inbox: `publish_async` of nats-py 2.16 loses every ack that is an error, for its
    callback raises what it should have set.
    """

    def __init__(self, client: Client, attempt_s: float) -> None:
        self.client = client
        self.js = client.jetstream(timeout=attempt_s)
        self.attempt_s = attempt_s
        self.on_lost: set[Callable[[], None]] = set()
        self._up = asyncio.Event()
        self._up.set()
        self._ack_prefix = ""
        self._acks: dict[str, asyncio.Future[int]] = {}
        self._num_sent = 0

    async def listen_for_acks(self) -> None:
        """Once, after the client has connected; nats-py subscribes again after each reconnect."""
        self._ack_prefix = self.client.new_inbox()
        await self.client.subscribe(f"{self._ack_prefix}.*", cb=self._ack)

    async def publish(self, subject: str, payload: bytes, headers: dict[str, str]) -> asyncio.Future[int]:
        """Sends one record; the future gives its sequence, or the error that JetStream answers with. Cancel it to forget the ack."""
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
        answer = json.loads(message.data)
        if "error" in answer:
            ack.set_exception(_api_error(answer["error"]))
        else:
            ack.set_result(answer["seq"])

    async def disconnected(self) -> None:
        """For the client's disconnected and closed callbacks."""
        self._up.clear()
        if self.client.is_closed:
            self._up.set()  # release the tasks that wait for it
        for callback in tuple(self.on_lost):
            callback()

    async def reconnected(self) -> None:
        """For the client's reconnected callback."""
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
        """Does `verb`, again after transient failures, until it answers. Raises `BusUnavailable` after `deadline_s`."""
        until_s = asyncio.get_running_loop().time() + deadline_s
        while True:
            await self.wait_until_up(until_s)
            try:
                async with asyncio.timeout_at(until_s):
                    answer = await verb()
                raise_if_cancelled()
                return answer
            except (TimeoutError, OSError, nats.errors.Error) as err:
                raise_if_cancelled()
                if not is_transient(err):
                    raise
                if asyncio.get_running_loop().time() + _RETRY_S >= until_s:
                    raise BusUnavailable(f"NATS did not {what} within {deadline_s} s ({err})") from err
            await asyncio.sleep(_RETRY_S)


def raise_if_cancelled() -> None:
    """nats-py waits with `asyncio.wait_for`, which before Python 3.12 loses a cancellation that comes with the answer or error."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _api_error(answer: dict[str, Any]) -> nats.js.errors.APIError:
    try:
        nats.js.errors.APIError.from_error(answer)
    except nats.js.errors.APIError as err:
        return err
    raise AssertionError("from_error returned")
