"""The bus port: named append-only logs with sequence numbers.

A stream is a log, not a work queue: reading removes nothing. Sequences start at 1, grow by 1 per stored record and are
never reused. `append` is idempotent by `msg_id` within the stream's dedup window. With `expected_last_seq` it stores
only directly after that sequence: the ledger's single-writer rule.

Implementations: `jetstream_bus` (production) and `memory_bus` (simulator). One suite, tests/conformance/test_bus.py,
runs on both.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, Required, TypedDict, Unpack

from rollmesh.shared.errors import Aborted, InvalidInput, NotFound, ResourceExhausted, Unavailable


class WrongLastSequence(Aborted):
    """Another writer's record is at the position of this append, so this writer is fenced and must stop.

    A lost ack does not raise it: the bus reads the record and succeeds if it has the `msg_id` of this append.
    """

    reason = "WRONG_LAST_SEQUENCE"


class StreamFull(ResourceExhausted):
    """The stream is at its limit and rejects new records (back-pressure). Purge records or wait."""

    reason = "STREAM_FULL"
    retry_after_s_default = 1.0


class BusUnavailable(Unavailable):
    """The bus did not respond within the deadline. The record may or may not be stored; append it again with the same
    `msg_id`."""

    reason = "BUS_UNAVAILABLE"


class UnknownStream(NotFound):
    """The stream does not exist."""

    reason = "UNKNOWN_STREAM"


class UnknownRecord(NotFound):
    """The record with this sequence was purged or is not yet written."""

    reason = "UNKNOWN_RECORD"


class Discard(Enum):
    """How a full stream handles new records."""

    NEW = "new"
    """Reject new records with `StreamFull`."""
    OLD = "old"
    """Drop the oldest records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSpec:
    """Name and limits of a stream."""

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
    subject: str = ""
    """Subject under which records are appended, beside `name`. Empty: only `name`. Permissions of NATS name
    subjects."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,128}", self.name):
            raise ValueError(f"`name` must be 1-128 letters, digits, dashes or underscores, got {self.name!r}")
        if self.bytes_max < 1:
            raise ValueError(f"`bytes_max` must be >= 1, got {self.bytes_max}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRecord:
    """One stored record."""

    seq: int
    payload: bytes
    msg_id: str
    headers: Mapping[str, str] = field(default_factory=dict)
    """The headers of the writer and the W3C trace context, without headers of the bus."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamInfo:
    """The state of a stream. `first_seq` is the sequence of the oldest record, or `last_seq + 1` if there is none."""

    first_seq: int
    last_seq: int
    num_records: int
    num_bytes: int
    bytes_max: int
    """Limit of `num_bytes`."""
    deny_purge: bool = False
    """Whether records can never be removed, as `StreamSpec.deny_purge`."""


class AppendOptions(TypedDict, total=False):
    """The keywords of an append."""

    msg_id: Required[str]
    """Printable ASCII. The stream stores it once."""
    expected_last_seq: int | None
    """The append succeeds only directly after this sequence; 0 means that the stream is still empty. None: anywhere."""
    headers: Mapping[str, str] | None
    deadline_s: float | None
    """Until when it is retried, in seconds from now. None: the deadline of the bus."""


class StreamLog(Protocol):
    """One stream. Every call may also raise `BusUnavailable`."""

    @property
    def name(self) -> str:
        """The stream's name."""
        ...

    async def append(self, payload: bytes, **options: Unpack[AppendOptions]) -> int:
        """Store one record and return its sequence, or the earlier sequence if `msg_id` is stored already.

        Raises `WrongLastSequence`, `StreamFull`, `PayloadTooLarge`, `InvalidInput`, `BusUnavailable`.
        """
        ...

    async def append_pipelined(self, payload: bytes, **options: Unpack[AppendOptions]) -> asyncio.Future[int]:
        """As `append`, but return when the record has been sent. The future gives its sequence.

        Records of one `StreamLog` are stored in the order of the calls, also across reconnects; their futures resolve
        in that order. Waits while the bus's limit of records in flight is reached.
        """
        ...

    async def read(self, seq: int) -> StreamRecord:
        """Return the record with this sequence from the stream's leader. Raises `UnknownRecord`."""
        ...

    async def read_direct(self, seq: int) -> StreamRecord:
        """The same, for large records whose sequence is known. Any replica may respond, or the leader if the replica
        lacks the record."""
        ...

    def read_range(self, from_seq: int = 1) -> AsyncIterator[StreamRecord]:
        """Yield records from `from_seq` up to the newest one that was stored when the call began. It skips removed
        records, also those that are removed meanwhile.

        Raises `BusUnavailable` if the bus returns no record within its deadline although some exist, so the wait is
        bounded.
        """
        ...

    def follow(self, from_seq: int = 1) -> AsyncIterator[StreamRecord]:
        """Yield records from `from_seq` on, each once, in order, without end; purged ones are skipped. Survives
        reconnects."""
        ...

    async def last(self) -> StreamRecord | None:
        """Return the newest record; None if the stream is empty."""
        ...

    async def purge_below(self, seq: int) -> None:
        """Remove all records before `seq`. Raises `InvalidInput` if the stream forbids it."""
        ...

    async def info(self) -> StreamInfo:
        """Return the current state of the stream."""
        ...


class Bus(Protocol):
    """A set of streams."""

    async def create(self, spec: StreamSpec) -> StreamLog:
        """Open the stream. Create it, or adjust its limits, if necessary. Idempotent."""
        ...

    async def open(self, name: str) -> StreamLog:
        """Return an existing stream. Raises `UnknownStream`."""
        ...

    async def names(self) -> list[str]:
        """Return the names of all streams, sorted."""
        ...

    async def delete(self, name: str) -> None:
        """Remove a stream and its records. Idempotent."""
        ...

    async def close(self) -> None:
        """End the appends and followers of all streams, and the connection. Idempotent."""
        ...


def check_append(msg_id: str, headers: Mapping[str, str] | None) -> None:
    """Raise `InvalidInput` for a record that an implementation cannot store."""
    if not msg_id:
        raise InvalidInput("msg_id must not be empty; it is what makes an append idempotent")
    for text in (msg_id, *(part for item in (headers or {}).items() for part in item)):
        if not text.isascii() or any(ord(char) < 32 for char in text) or text != text.strip():
            raise InvalidInput(f"msg_id and headers must be printable ASCII without spaces at the ends, got {text!r}")
    for key in headers or {}:
        if not re.fullmatch(r"[A-Za-z0-9-]+", key) or key.lower().startswith("nats-"):
            raise InvalidInput(f"header names are letters, digits and dashes, and not Nats-*, got {key!r}")
