"""A deterministic bus in memory, without a server, for the simulator and for tests of users of the bus.

It gives the same guarantees as JetStream within one process, and stores nothing beyond it. Appends take effect at once,
in the order of the calls.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Unpack

from rollmesh.shared.bus.bus import (
    AppendOptions,
    BusUnavailable,
    Discard,
    StreamFull,
    StreamInfo,
    StreamRecord,
    StreamSpec,
    UnknownRecord,
    UnknownStream,
    WrongLastSequence,
    check_append,
)
from rollmesh.shared.clock import Clock, SystemClock
from rollmesh.shared.errors import InvalidInput, PayloadTooLarge
from rollmesh.shared.telemetry.tracing import trace_headers

RECORD_OVERHEAD_BYTES = 32
"""Overhead per record; about the same as in JetStream's file store."""


class MemoryBus:
    """Streams in memory. `clock` measures the dedup window."""

    def __init__(self, clock: Clock | None = None, *, payload_bytes_max: int = 8 * 1024 * 1024) -> None:
        self._clock = clock or SystemClock()
        self._payload_bytes_max = payload_bytes_max
        self._streams: dict[str, MemoryStream] = {}

    async def create(self, spec: StreamSpec) -> MemoryStream:
        stream = self._streams.get(spec.name)
        if stream is None:
            stream = self._streams[spec.name] = MemoryStream(spec, self._clock, self._payload_bytes_max)
        stream.spec = replace(spec, deny_purge=spec.deny_purge or stream.spec.deny_purge)
        return stream

    async def open(self, name: str) -> MemoryStream:
        if name not in self._streams:
            raise UnknownStream(f"there is no stream {name}", stream=name)
        return self._streams[name]

    async def names(self) -> list[str]:
        return sorted(self._streams)

    async def delete(self, name: str) -> None:
        if (stream := self._streams.pop(name, None)) is not None:
            stream.close()

    async def close(self) -> None:
        for stream in self._streams.values():
            stream.close()


class MemoryStream:
    """One stream in memory."""

    def __init__(self, spec: StreamSpec, clock: Clock, payload_bytes_max: int) -> None:
        self.spec = spec
        self._clock = clock
        self._payload_bytes_max = payload_bytes_max
        self._records: OrderedDict[int, StreamRecord] = OrderedDict()
        self._num_bytes = 0
        self._last_seq = 0
        self._seen: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._changed = asyncio.Event()
        self._closed = False

    @property
    def name(self) -> str:
        return self.spec.name

    async def append(self, payload: bytes, **options: Unpack[AppendOptions]) -> int:
        return await (await self.append_pipelined(payload, **options))

    async def append_pipelined(
        self,
        payload: bytes,
        *,
        msg_id: str,
        expected_last_seq: int | None = None,
        headers: Mapping[str, str] | None = None,
        deadline_s: float | None = None,
    ) -> asyncio.Future[int]:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        try:
            future.set_result(self._append(payload, msg_id, expected_last_seq, headers))
        except (WrongLastSequence, StreamFull) as err:
            future.set_exception(err)
        return future

    async def read(self, seq: int) -> StreamRecord:
        self._check_open()
        if seq not in self._records:
            raise UnknownRecord(
                f"{self.name} has no record {seq}: purged, or not yet written", stream=self.name, seq=seq
            )
        return self._records[seq]

    async def read_direct(self, seq: int) -> StreamRecord:
        return await self.read(seq)

    async def read_range(self, from_seq: int = 1) -> AsyncIterator[StreamRecord]:
        self._check_open()
        for seq in range(self._held_from(from_seq), self._last_seq + 1):
            if (record := self._records.get(seq)) is not None:  # it may be purged while the reader handles a record
                yield record

    async def follow(self, from_seq: int = 1) -> AsyncIterator[StreamRecord]:
        seq = from_seq
        while True:
            self._check_open()
            seq = self._held_from(seq)
            if (record := self._records.get(seq)) is not None:
                seq += 1
                yield record
            else:
                await self._changed.wait()

    async def last(self) -> StreamRecord | None:
        self._check_open()
        return next(reversed(self._records.values()), None)

    async def purge_below(self, seq: int) -> None:
        self._check_open()
        if self.spec.deny_purge:
            raise InvalidInput(
                f"{self.name} keeps its records until the run is deleted; it must not be purged", stream=self.name
            )
        while self._records and next(iter(self._records)) < seq:
            self._drop_oldest()

    async def info(self) -> StreamInfo:
        self._check_open()
        return StreamInfo(
            first_seq=self._held_from(1),
            last_seq=self._last_seq,
            num_records=len(self._records),
            num_bytes=self._num_bytes,
            bytes_max=self.spec.bytes_max,
            deny_purge=self.spec.deny_purge,
        )

    def close(self) -> None:
        """Close the stream. Followers raise `BusUnavailable`."""
        self._closed = True
        self._changed.set()

    def _append(
        self, payload: bytes, msg_id: str, expected_last_seq: int | None, headers: Mapping[str, str] | None
    ) -> int:
        check_append(msg_id, headers)
        self._check_open()
        if len(payload) > self._payload_bytes_max:
            raise PayloadTooLarge(
                f"{len(payload)} bytes exceed the bus's limit of {self._payload_bytes_max}; send less at once"
            )
        if (seq := self._seen_seq(msg_id)) is not None:
            return seq
        if expected_last_seq is not None and expected_last_seq != self._last_seq:
            return self._check_repeat(msg_id, expected_last_seq)
        record = StreamRecord(
            seq=self._last_seq + 1,
            payload=bytes(payload),
            msg_id=msg_id,
            headers={**(headers or {}), **trace_headers()},
        )
        self._make_room(_size(record))
        self._store(record)
        return record.seq

    def _check_repeat(self, msg_id: str, expected_last_seq: int) -> int:
        there = self._records.get(expected_last_seq + 1)
        if there is not None and there.msg_id == msg_id:
            return there.seq  # stored by an earlier attempt, and no longer in the dedup window
        raise WrongLastSequence(
            f"{self.name} is at {self._last_seq}, not {expected_last_seq}: another writer has taken over; stop this "
            "one",
            stream=self.name,
            last_seq=self._last_seq,
            expected_last_seq=expected_last_seq,
        )

    def _make_room(self, num_bytes: int) -> None:
        while self._num_bytes + num_bytes > self.spec.bytes_max:
            if self.spec.discard is Discard.NEW or not self._records:
                raise StreamFull(
                    f"{self.name} is full ({self._num_bytes} of {self.spec.bytes_max} bytes); purge or wait",
                    stream=self.name,
                )
            self._drop_oldest()

    def _store(self, record: StreamRecord) -> None:
        self._records[record.seq] = record
        self._num_bytes += _size(record)
        self._last_seq = record.seq
        self._seen[record.msg_id] = (record.seq, self._clock.monotonic_s() + self.spec.dedup_s)
        self._changed.set()
        self._changed = asyncio.Event()

    def _seen_seq(self, msg_id: str) -> int | None:
        now_s = self._clock.monotonic_s()
        while self._seen and next(iter(self._seen.values()))[1] <= now_s:
            self._seen.popitem(last=False)
        entry = self._seen.get(msg_id)
        return entry[0] if entry is not None else None

    def _drop_oldest(self) -> None:
        _, record = self._records.popitem(last=False)
        self._num_bytes -= _size(record)

    def _held_from(self, seq: int) -> int:
        """Return the sequence of the oldest record from `seq` on. Without one, return the sequence of the next one."""
        if seq in self._records or seq > self._last_seq:
            return seq
        return next((held for held in self._records if held >= seq), self._last_seq + 1)

    def _check_open(self) -> None:
        if self._closed:
            raise BusUnavailable(f"{self.name} is closed", stream=self.name)


def _size(record: StreamRecord) -> int:
    headers = sum(len(key) + len(value) + 4 for key, value in record.headers.items())
    return len(record.payload) + len(record.msg_id) + headers + RECORD_OVERHEAD_BYTES
