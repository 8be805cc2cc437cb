"""The bus port: named append-only logs with sequence numbers.

A stream is a log, not a work queue: reading removes nothing. Sequences start at 1, grow by 1 per stored record and are never reused.
`append` is idempotent by `msg_id` within the stream's dedup window. With `expected_last_seq` it stores only directly after that
sequence: the ledger's single-writer rule.

Implementations: `jetstream_bus` (production) and `memory_bus` (simulator). One suite, tests/conformance/test_bus.py, runs on both.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from rollmesh.shared.errors import Aborted, InvalidInput, NotFound, ResourceExhausted, Unavailable


class WrongLastSequence(Aborted):
    """Another writer's record stands where this append belonged: this writer is fenced and must stop.

    A lost ack never looks like this: the bus reads the record in question and, if it carries this append's own `msg_id`, succeeds.
    """

    reason = "WRONG_LAST_SEQUENCE"


class StreamFull(ResourceExhausted):
    """The stream is at its limit and refuses new records: back-pressure. Purge what is dead, or wait."""

    reason = "STREAM_FULL"
    retry_after_s_default = 1.0


class BusUnavailable(Unavailable):
    """No answer from the bus within the deadline. The record may or may not be stored; append it again with the same `msg_id`."""

    reason = "BUS_UNAVAILABLE"


class UnknownStream(NotFound):
    """No such stream."""

    reason = "UNKNOWN_STREAM"


class UnknownRecord(NotFound):
    """No record with this sequence: purged, or not yet written."""

    reason = "UNKNOWN_RECORD"


class Discard(Enum):
    """What a full stream does."""

    NEW = "new"
    """Refuse new records with `StreamFull`."""
    OLD = "old"
    """Drop the oldest ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSpec:
    """What a stream is called and what it may hold."""

    name: str
    """Letters, digits, dash and underscore."""
    bytes_max: int
    """Limit of stored bytes, headers and framing included. JetStream reserves it on disk."""
    discard: Discard
    dedup_s: float = 120.0
    """How long a `msg_id` is remembered. Must exceed the longest append deadline."""
    deny_purge: bool = False
    """Whether records can never be removed, except with the whole stream."""
    num_replicas: int = 1

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,128}", self.name):
            raise ValueError(f"name must be 1-128 letters, digits, dashes or underscores, got {self.name!r}")
        if self.bytes_max < 1:
            raise ValueError(f"bytes_max must be positive, got {self.bytes_max}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRecord:
    """One stored record."""

    seq: int
    payload: bytes
    msg_id: str
    headers: Mapping[str, str] = field(default_factory=dict)
    """The writer's own headers and the W3C trace context; none of the bus's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamInfo:
    """The state of a stream. `first_seq` is the sequence of the oldest record, or `last_seq + 1` if there is none."""

    first_seq: int
    last_seq: int
    num_records: int
    num_bytes: int


class StreamLog(Protocol):
    """One stream. Every call may also raise `BusUnavailable`."""

    @property
    def name(self) -> str:
        """The stream's name."""
        ...

    async def append(
        self,
        payload: bytes,
        *,
        msg_id: str,
        expected_last_seq: int | None = None,
        headers: Mapping[str, str] | None = None,
        deadline_s: float | None = None,
    ) -> int:
        """Stores one record and returns its sequence; the earlier one if `msg_id` is stored already.

        Tries again until `deadline_s` (default: the bus's own) is over. `expected_last_seq=0` means "the stream is still empty".
        Raises `WrongLastSequence`, `StreamFull`, `PayloadTooLarge`, `InvalidInput`, `BusUnavailable`.
        """
        ...

    async def append_pipelined(
        self,
        payload: bytes,
        *,
        msg_id: str,
        expected_last_seq: int | None = None,
        headers: Mapping[str, str] | None = None,
        deadline_s: float | None = None,
    ) -> asyncio.Future[int]:
        """As `append`, but returns once the record is on its way; the future gives its sequence.

        Records of one `StreamLog` are stored in the order of the calls, also across reconnects; their futures resolve in that order.
        Waits while the bus's limit of records in flight is reached.
        """
        ...

    async def read(self, seq: int) -> StreamRecord:
        """The record with this sequence, as the stream's leader knows it. Raises `UnknownRecord`."""
        ...

    async def read_direct(self, seq: int) -> StreamRecord:
        """The same, for large records whose sequence is known: any replica may answer, the leader if that one lacks it."""
        ...

    def read_range(self, from_seq: int = 1) -> AsyncIterator[StreamRecord]:
        """Records from `from_seq` up to the newest one that was stored when the call began; removed ones are skipped.

        Raises `BusUnavailable` if the bus gives no record within its deadline although there are some: the wait is bounded.
        """
        ...

    def follow(self, from_seq: int = 1) -> AsyncIterator[StreamRecord]:
        """Records from `from_seq` on, each once, in order, without end; purged ones are skipped. Survives reconnects."""
        ...

    async def last(self) -> StreamRecord | None:
        """The newest record; None if the stream holds none."""
        ...

    async def purge_below(self, seq: int) -> None:
        """Removes all records before `seq`. Raises `InvalidInput` if the stream forbids it."""
        ...

    async def info(self) -> StreamInfo:
        """The stream's state now."""
        ...


class Bus(Protocol):
    """A set of streams."""

    async def create(self, spec: StreamSpec) -> StreamLog:
        """Opens the stream, creating it or adjusting its limits if need be. Idempotent."""
        ...

    async def open(self, name: str) -> StreamLog:
        """An existing stream. Raises `UnknownStream`."""
        ...

    async def names(self) -> list[str]:
        """The names of all streams, sorted."""
        ...

    async def delete(self, name: str) -> None:
        """Removes a stream and all it holds. Idempotent."""
        ...

    async def close(self) -> None:
        """Ends all streams' appends and followers, and the connection. Idempotent."""
        ...


def check_append(msg_id: str, headers: Mapping[str, str] | None) -> None:
    """Raises `InvalidInput` for what no implementation can store."""
    if not msg_id:
        raise InvalidInput("msg_id must not be empty; it is what makes an append idempotent")
    for text in (msg_id, *(part for item in (headers or {}).items() for part in item)):
        if not text.isascii() or any(ord(char) < 32 for char in text) or text != text.strip():
            raise InvalidInput(f"msg_id and headers must be printable ASCII without spaces at the ends, got {text!r}")
    for key in headers or {}:
        if not re.fullmatch(r"[A-Za-z0-9-]+", key) or key.lower().startswith("nats-"):
            raise InvalidInput(f"header names are letters, digits and dashes, and not Nats-*, got {key!r}")
