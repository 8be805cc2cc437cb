"""Following one JetStream stream: an ephemeral pull consumer, made again at the next sequence whenever it is lost.

One request for a batch is outstanding at a time, so what waits in this process is bounded by the batch. Nothing is
acknowledged: the stream is a log, and the position is this reader's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.js import api

from rollmesh.shared.bus.bus import BusUnavailable, StreamRecord, UnknownStream
from rollmesh.shared.bus.link import STREAM_NOT_FOUND, Link

_EXPIRES_S = 30.0
_HEARTBEAT_S = 5.0
_LOST_S = 3 * _HEARTBEAT_S
"""Seconds without any message after which a consumer is lost."""
_BATCH_BYTES_MAX = 64 * 1024 * 1024
_INACTIVE_S = 60.0
_PAUSE_S = 0.1
"""Pause after a consumer that was lost before it gave a record, in seconds, so that a server in trouble does not get
new ones at once."""
_BUS_HEADERS = "nats-"


class StreamReader:
    """Reads one stream for one follower."""

    def __init__(self, stream: str, link: Link, *, batch: int, deadline_s: float) -> None:
        self._stream = stream
        self._link = link
        self._batch = batch
        self._deadline_s = deadline_s

    async def follow(self, from_seq: int) -> AsyncGenerator[StreamRecord, None]:
        """Records from `from_seq` on, without end. Raises `UnknownStream`; `BusUnavailable` if an outage outlasts the
        deadline."""
        async with aclosing(self.watch(from_seq, _LOST_S)) as records:
            async for record in records:
                if record is not None:
                    yield record

    async def watch(self, from_seq: int, quiet_s: float) -> AsyncGenerator[StreamRecord | None, None]:
        """Yield as `follow`, and None after each `quiet_s` seconds without a record, and for a consumer that was lost
        before it gave one."""
        next_seq = max(1, from_seq)
        while True:
            begin_seq = next_seq
            async with aclosing(self._through_one_consumer(next_seq, quiet_s)) as records:
                async for record in records:
                    if record is None:
                        yield None
                    elif record.seq >= next_seq:
                        next_seq = record.seq + 1
                        yield record
            if self._link.closed:
                raise BusUnavailable(f"{self._stream}: the connection to NATS was closed")
            if next_seq == begin_seq:
                yield None
                await asyncio.sleep(_PAUSE_S)

    async def _through_one_consumer(self, from_seq: int, quiet_s: float) -> AsyncGenerator[StreamRecord | None, None]:
        """Yield records, and None after each `quiet_s` seconds without a message, until the consumer is lost."""
        consumer = await self._new_consumer(from_seq)
        arrived: asyncio.Queue[Msg | None] = asyncio.Queue()  # bounded by the one request outstanding

        async def arrive(message: Msg) -> None:
            arrived.put_nowait(message)

        def lost() -> None:
            arrived.put_nowait(None)

        inbox = self._link.client.new_inbox()
        try:
            subscription = await self._link.client.subscribe(inbox, cb=arrive)
        except nats.errors.Error:
            return  # the connection has broken since
        self._link.on_lost.add(lost)
        remaining, silent_s = 0, 0.0
        try:
            while remaining or await self._request(consumer, inbox):
                remaining = remaining or self._batch
                if arrived.empty():  # a timeout for each of many records that have arrived costs more than the record
                    try:
                        async with asyncio.timeout(quiet_s):
                            message = await arrived.get()
                    except TimeoutError:
                        silent_s += quiet_s
                        if silent_s >= _LOST_S:
                            return
                        yield None
                        continue
                else:
                    message = arrived.get_nowait()
                silent_s = 0.0
                status = _status(message)
                if message is None or status == "lost":
                    return
                if status == "end":
                    remaining = 0
                elif status == "":
                    remaining -= 1
                    yield record_of(message)
        finally:
            self._link.on_lost.discard(lost)
            await self._discard(consumer, subscription)

    async def _new_consumer(self, from_seq: int) -> str:
        config = api.ConsumerConfig(
            ack_policy=api.AckPolicy.NONE,
            deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=from_seq,
            inactive_threshold=_INACTIVE_S,
            mem_storage=True,
        )
        try:
            info = await self._link.call(
                lambda: self._link.js.add_consumer(self._stream, config), self._deadline_s, f"read {self._stream}"
            )
        except nats.js.errors.NotFoundError as err:
            if err.err_code != STREAM_NOT_FOUND:
                raise
            raise UnknownStream(f"there is no stream {self._stream}", stream=self._stream) from err
        return info.name

    async def _request(self, consumer: str, inbox: str) -> bool:
        """Asks for a batch; False if there is no connection to ask on."""
        if not self._link.client.is_connected:
            return False
        ask = {
            "batch": self._batch,
            "max_bytes": _BATCH_BYTES_MAX,
            "expires": int(_EXPIRES_S * 1e9),
            "idle_heartbeat": int(_HEARTBEAT_S * 1e9),
        }
        subject = f"{api.DEFAULT_PREFIX}.CONSUMER.MSG.NEXT.{self._stream}.{consumer}"
        try:
            await self._link.client.publish(subject, json.dumps(ask).encode(), reply=inbox)
        except nats.errors.Error:
            return False
        return True

    async def _discard(self, consumer: str, subscription: Any) -> None:
        """Best effort: a consumer that stays behind is removed by the server after `_INACTIVE_S`."""
        with contextlib.suppress(nats.errors.Error):
            await subscription.unsubscribe()
            if self._link.client.is_connected:
                await self._link.client.publish(f"{api.DEFAULT_PREFIX}.CONSUMER.DELETE.{self._stream}.{consumer}", b"")


def record_of(message: Msg) -> StreamRecord:
    """The record that a consumer's message carries."""
    return make_record(message.metadata.sequence.stream, message.data, message.headers)


def make_record(seq: int, payload: bytes | None, headers: dict[str, str] | None) -> StreamRecord:
    """A record from what NATS stores; the bus's own headers stay with the bus."""
    headers = headers or {}
    return StreamRecord(
        seq=seq,
        payload=payload or b"",
        msg_id=headers.get(api.Header.MSG_ID.value, ""),
        headers={key: value for key, value in headers.items() if not key.lower().startswith(_BUS_HEADERS)},
    )


def _status(message: Msg | None) -> str:
    """What a message on the inbox is: "" a record, "alive" a heartbeat, "end" of the request, "lost" for the
    consumer."""
    if message is None or not message.headers or api.Header.STATUS.value not in message.headers or message.reply:
        return ""
    status = message.headers[api.Header.STATUS.value]
    if status == "100":
        return "alive"
    exceeds = "Exceeds MaxBytes" in message.headers.get(api.Header.DESCRIPTION.value, "")
    return "end" if status in ("404", "408") or exceeds else "lost"
