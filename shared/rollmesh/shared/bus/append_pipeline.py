"""Many appends of one stream in flight, stored in order, across lost connections: go-back-N over JetStream's acks.

Entries wait in a queue in the order of submission; a task takes the ack of the head, resolves it, and continues. If an
ack does not arrive (the connection broke, the server was killed), every entry still in the queue is sent again, in
order, with its message id:

- stored, ack lost: within the dedup window JetStream answers with the first sequence; past it, an append with an
  expected sequence is refused, and the record at that position has the same id. Both count as success.
- never stored: it is stored now.
- a follower in the queue was refused because its predecessor was lost: its rejection is ignored, because it is sent
  again too.
- another server of a cluster leads the stream now: until it has applied what the one before had stored, it refuses the
  head, and has no record at its position. It is sent again for `_SETTLE_S_MAX`.

So a rejection of the *head* is final, and `WrongLastSequence` means that another writer's record is at that position.
Bounded by the number and the bytes of entries in the queue; each entry fails with `BusUnavailable` at its own deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import nats.errors
import nats.js.errors
from nats.js import api

from rollmesh.shared.bus.bus import BusUnavailable, StreamFull, StreamRecord, UnknownRecord, WrongLastSequence
from rollmesh.shared.bus.link import STORE_FAILED, WRONG_LAST_SEQUENCE, Link, is_transient
from rollmesh.shared.errors import InvalidInput, MeshError, PayloadTooLarge
from rollmesh.shared.telemetry.logs import apart

_RESEND_PAUSE_S = 0.05
_SETTLE_S_MAX = 5.0
"""Longest time for which the leader of a replicated stream may not have every record that was acknowledged, in
seconds."""


@dataclass(eq=False, slots=True)
class _Entry:
    payload: bytes
    headers: dict[str, str]
    msg_id: str
    expected_last_seq: int | None
    until_s: float
    result: asyncio.Future[int]
    ack: asyncio.Future[int] | None = None
    rejected_s: float | None = None
    """Loop time of the first rejection without a record at its position."""


class AppendPipeline:
    """The appends of one stream by one process."""

    def __init__(
        self,
        stream: str,
        link: Link,
        read: Callable[[int], Awaitable[StreamRecord]],
        *,
        inflight_max: int,
        inflight_bytes_max: int,
    ) -> None:
        self._stream = stream
        self.subject = stream
        """Subject to which records are published."""
        self._link = link
        self._read = read
        self._inflight_max = inflight_max
        self._inflight_bytes_max = inflight_bytes_max
        self._queue: deque[_Entry] = deque()
        self._num_bytes = 0
        self._changed = asyncio.Condition()
        # Held while waiting for space; the collector, which frees space, never holds it.
        self._admitting = asyncio.Lock()
        self._sending = asyncio.Lock()  # held while the order of sending is determined
        self._task: asyncio.Task[None] | None = None
        link.on_lost.add(self._connection_lost)

    async def submit(
        self, payload: bytes, msg_id: str, expected_last_seq: int | None, headers: Mapping[str, str], deadline_s: float
    ) -> asyncio.Future[int]:
        """Queue one append, send it if the connection is up, and return the future of its sequence."""
        loop = asyncio.get_running_loop()
        wire_headers = _headers(self._stream, msg_id, expected_last_seq, headers)
        num_bytes = len(payload) + sum(len(key) + len(value) + 4 for key, value in wire_headers.items()) + 16
        # Checked here with the headers: nats-py counts the payload only, and the server closes the connection for a
        # message that is too large.
        if num_bytes > (limit := self._link.client.max_payload):
            raise PayloadTooLarge(
                f"a record of {num_bytes} bytes exceeds NATS's max_payload of {limit}; send less at once"
            )
        entry = _Entry(
            payload=payload,
            headers=wire_headers,
            msg_id=msg_id,
            expected_last_seq=expected_last_seq,
            until_s=loop.time() + deadline_s,
            result=loop.create_future(),
        )
        entry.result.add_done_callback(_mark_retrieved)
        await self._admit(entry)
        return entry.result

    async def close(self) -> None:
        """Fail the appends in flight with `BusUnavailable`. They may or may not be stored."""
        self._link.on_lost.discard(self._connection_lost)
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        while self._queue:
            await self._finish(self._queue[0], BusUnavailable(f"{self._stream} was closed with appends in flight"))

    async def _admit(self, entry: _Entry) -> None:
        """Wait for space, then queue and send in one step, so that records are sent in the order of the queue."""
        try:
            async with asyncio.timeout_at(entry.until_s), self._admitting:
                async with self._changed:
                    await self._changed.wait_for(lambda: self._has_room(entry))
                async with self._sending:
                    self._queue.append(entry)
                    self._num_bytes += len(entry.payload)
                    self._ensure_collector()
                    await self._send(entry)
        except TimeoutError as err:
            if entry not in self._queue:
                raise BusUnavailable(
                    f"{self._stream}: no room among the appends in flight for the whole deadline"
                ) from err

    def _ensure_collector(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._collect(), name=f"append {self._stream}", context=apart())
            self._task.add_done_callback(self._collector_ended)

    def _collector_ended(self, task: asyncio.Task[None]) -> None:
        """Pass a bug in the collector to the callers that wait for it."""
        if not task.cancelled() and (err := task.exception()) is not None:
            for entry in self._queue:
                if not entry.result.done():
                    entry.result.set_exception(err)
            self._queue.clear()
            self._num_bytes = 0

    def _has_room(self, entry: _Entry) -> bool:
        # An empty queue accepts any payload, because a payload over the byte limit would otherwise wait forever.
        fits = self._num_bytes + len(entry.payload) <= self._inflight_bytes_max
        return not self._queue or (len(self._queue) < self._inflight_max and fits)

    async def _send(self, entry: _Entry) -> None:
        """Publish once. Without a connection the entry stays without ack, and the collector sends it after the
        reconnect."""
        if not self._link.up:
            return
        with contextlib.suppress(OSError, nats.errors.Error):
            entry.ack = await self._link.publish(self.subject, entry.payload, entry.headers)

    def _connection_lost(self) -> None:
        """Acks of records sent on the lost connection will not arrive."""
        for entry in self._queue:
            if entry.ack is not None and not entry.ack.done():
                entry.ack.set_exception(nats.errors.ConnectionClosedError())

    async def _collect(self) -> None:
        """Resolve entries from the head until the queue is empty."""
        while self._queue:
            head = self._queue[0]
            try:
                seq = await self._ack_of(head)
            except MeshError as err:
                await self._finish(head, err)
            except (TimeoutError, OSError, nats.errors.Error) as err:
                if is_transient(err):
                    self._link.timed_out(err)
                    await self._send_all_again(err)
                else:
                    await self._finish(head, InvalidInput(f"{self._stream} refuses the record: {err}"))
            else:
                await self._finish(head, seq)

    async def _ack_of(self, entry: _Entry) -> int:
        self._link.check_allowed(self.subject)
        if entry.ack is None:
            raise nats.errors.ConnectionClosedError
        try:
            async with asyncio.timeout_at(min(entry.until_s, asyncio.get_running_loop().time() + self._link.attempt_s)):
                return await entry.ack
        except nats.js.errors.APIError as err:
            if err.err_code == STORE_FAILED:
                raise StreamFull(
                    f"{self._stream} is full ({err.description}); purge or wait", stream=self._stream
                ) from err
            if err.err_code == WRONG_LAST_SEQUENCE:
                return await self._own_record(entry)
            raise

    async def _own_record(self, entry: _Entry) -> int:
        """Return the sequence of a rejected entry if the record at its position has its id; otherwise the writer is
        fenced."""
        assert entry.expected_last_seq is not None
        place = entry.expected_last_seq + 1
        try:
            if (await self._read(place)).msg_id == entry.msg_id:
                return place
        except BusUnavailable as err:
            raise TimeoutError(str(err)) from err
        except UnknownRecord as err:
            now_s = asyncio.get_running_loop().time()
            entry.rejected_s = entry.rejected_s or now_s
            if self._link.clustered and now_s - entry.rejected_s < _SETTLE_S_MAX:
                raise TimeoutError(f"the leader of {self._stream} has not all records yet") from err
        raise WrongLastSequence(
            f"{self._stream} has moved past {entry.expected_last_seq}: another writer has taken over; stop this one",
            stream=self._stream,
            expected_last_seq=entry.expected_last_seq,
        )

    async def _send_all_again(self, cause: BaseException) -> None:
        async with self._sending:
            await asyncio.sleep(_RESEND_PAUSE_S)
            while self._queue:
                try:
                    await self._link.wait_until_up(min(entry.until_s for entry in self._queue))
                    break
                except BusUnavailable as err:
                    await self._expire(err)
            await self._expire(cause)
            for entry in tuple(self._queue):
                if entry.ack is not None:
                    entry.ack.cancel()
                    entry.ack = None
                await self._send(entry)

    async def _expire(self, cause: BaseException) -> None:
        now_s = asyncio.get_running_loop().time()
        for entry in tuple(self._queue):
            if entry.until_s <= now_s or self._link.closed:
                await self._finish(
                    entry,
                    BusUnavailable(
                        f"{self._stream}: no ack for {entry.msg_id} within the deadline ({cause or 'no answer'}); "
                        "append it again with the same msg_id",
                        stream=self._stream,
                        msg_id=entry.msg_id,
                    ),
                )

    async def _finish(self, entry: _Entry, outcome: int | MeshError) -> None:
        self._queue.remove(entry)
        self._num_bytes -= len(entry.payload)
        if entry.ack is not None and not entry.ack.done():
            entry.ack.cancel()
        if not entry.result.done():  # its caller may have cancelled it
            entry.result.set_exception(outcome) if isinstance(outcome, MeshError) else entry.result.set_result(outcome)
        async with self._changed:
            self._changed.notify_all()


def _headers(stream: str, msg_id: str, expected_last_seq: int | None, headers: Mapping[str, str]) -> dict[str, str]:
    merged = {**headers, api.Header.MSG_ID.value: msg_id, api.Header.EXPECTED_STREAM.value: stream}
    if expected_last_seq is not None:
        merged[api.Header.EXPECTED_LAST_SEQUENCE.value] = str(expected_last_seq)
    return merged


def _mark_retrieved(future: asyncio.Future[Any]) -> None:
    """Read the exception, because asyncio reports exceptions of futures that callers have dropped."""
    if not future.cancelled():
        future.exception()
