"""The ledger of one run: decisions as records, appended by one writer, in order, pipelined.

Each append carries the expected previous sequence, so only one of two coordinators succeeds. The bus recognizes a lost
acknowledgement by the record id, and resends what a killed server has not stored. If an append fails permanently, the
state in memory is ahead of the ledger: the coordinator must stop and recover.

The ledger counts its bytes, and rejects a record before it is sent if the stream has no room for it. So the server
never rejects one in the middle of the pipeline.

Every record contains the hash of the previous record, and is stored with its own hash in a header
(`shared.ledger_head`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from rollmesh.services.coordinator.core.facts import Fact
from rollmesh.services.coordinator.fact_codec import decode_record, encode_record
from rollmesh.shared.bus.bus import (
    BusUnavailable,
    StreamFull,
    StreamLog,
    StreamRecord,
    UnknownStream,
    WrongLastSequence,
)
from rollmesh.shared.clock import Clock
from rollmesh.shared.domain.formats import NewerFormat
from rollmesh.shared.domain.ids import IdSource
from rollmesh.shared.domain.ledger_head import CHECKSUM, EMPTY, LedgerHead, record_hash
from rollmesh.shared.domain.protocol import PROTOCOL, ProtocolVersion
from rollmesh.shared.errors import DataLoss, Fenced, InvalidInput, LedgerFull, MeshError, PayloadTooLarge

_OVERHEAD_BYTES = 300
"""Upper limit of the bytes that a stored record has besides its payload, its id, and twice the name of the stream."""
RESTORE = "restore the stream from a replica or a backup"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRecord:
    """One stored decision."""

    position: int
    record_id: str
    time_unix_s: float
    facts: tuple[Fact, ...]
    hash: str = ""
    protocol: ProtocolVersion = PROTOCOL
    """Protocol of the coordinator that wrote it."""

    @property
    def head(self) -> LedgerHead:
        """Head of the ledger after this record."""
        return LedgerHead(position=self.position, hash=self.hash)


class Ledger:
    """Appends to RM_<run>_LEDGER, after `begin`."""

    def __init__(self, log: StreamLog, *, ids: IdSource, clock: Clock, append_s_max: float) -> None:
        self._log = log
        self._ids = ids
        self._clock = clock
        self._append_s_max = append_s_max
        self.head = EMPTY
        """Head of the newest record, stored or being appended."""
        self._num_bytes = 0
        self._bytes_max = 1
        self._sent_bytes = self._stored_bytes = 0
        """Bytes of all records that were sent, and of those that are stored."""

    async def begin(self, head: LedgerHead) -> None:
        """Append after `head`. Call this when no append is in progress."""
        self.head = head
        await self.measure()

    async def measure(self) -> None:
        """Use the size and the limit that the stream has now. Records that are being appended may count twice."""
        stored_bytes = self._stored_bytes
        info = await self._log.info()
        self._num_bytes, self._bytes_max = info.num_bytes + self._sent_bytes - stored_bytes, info.bytes_max

    @property
    def used(self) -> float:
        """Share of the limit of the stream that the records use, including those that are being appended."""
        return self._num_bytes / self._bytes_max

    def left(self, share: float) -> float:
        """Return the number of bytes until the records use `share` of the limit."""
        return share * self._bytes_max - self._num_bytes

    @property
    def full(self) -> str:
        """What a ledger without room for a record means for its run."""
        return (
            f"{self._log.name} holds {self._num_bytes} of {self._bytes_max} bytes, and the next record does not fit; "
            "raise `coordinator.streams.ledger_bytes_max` and resume the run"
        )

    async def append(self, facts: Sequence[Fact]) -> asyncio.Future[int]:
        """Append one decision. The future returns its sequence once it is stored. Waits while too many appends are in
        progress. Raises LedgerFull and PayloadTooLarge for a record that was not sent."""
        record_id = self._ids.new("d")
        payload = encode_record(record_id, self._clock.wall_s(), facts, self.head.hash)
        hashed = record_hash(payload)
        num_bytes = stored_bytes(self._log.name, payload, record_id)
        if self._num_bytes + num_bytes > self._bytes_max:
            raise LedgerFull(self.full, ledger=self._log.name)
        stored = await self._log.append_pipelined(
            payload,
            msg_id=record_id,
            expected_last_seq=self.head.position,
            headers={CHECKSUM: hashed},
            deadline_s=self._append_s_max,
        )
        self._num_bytes += num_bytes
        self._sent_bytes += num_bytes
        stored.add_done_callback(lambda _: self._count_stored(num_bytes))
        self.head = LedgerHead(position=self.head.position + 1, hash=hashed)
        return stored

    def _count_stored(self, num_bytes: int) -> None:
        self._stored_bytes += num_bytes

    async def is_gone(self) -> bool:
        """Return whether the stream was deleted."""
        try:
            await self._log.info()
        except UnknownStream:
            return True
        except BusUnavailable:
            pass
        return False

    def failure(self, error: MeshError) -> MeshError:
        """Return the error for the operator after a failed append."""
        if isinstance(error, WrongLastSequence):
            return Fenced(
                f"another coordinator has taken over {self._log.name}: this one is fenced and stops; run one "
                "coordinator per run",
                ledger=self._log.name,
                position=self.head.position,
            )
        if isinstance(error, PayloadTooLarge):
            return DataLoss(
                f"a decision is too large for one record of {self._log.name} ({error}); raise "
                "`bus.embedded.payload_bytes_max` (of a cluster: max_payload), then start the coordinator again",
                ledger=self._log.name,
            )
        if isinstance(error, (LedgerFull, StreamFull)):
            return LedgerFull(self.full, ledger=self._log.name)
        return DataLoss(
            f"{self._log.name} stored no record ({error}); the coordinator stops and recovers from what is stored when "
            "it is started again: check that NATS runs, and that its disk has room",
            ledger=self._log.name,
        )


def stored_bytes(name: str, payload: bytes, record_id: str) -> int:
    """Return an upper limit of the bytes that a record uses in the stream `name`."""
    return len(payload) + len(record_id) + 2 * len(name) + _OVERHEAD_BYTES


async def read_ledger(log: StreamLog, after: LedgerHead = EMPTY) -> AsyncIterator[StoredRecord]:
    """Yield the records after the head `after`, in order. Raises DataLoss if one is missing, damaged or does not follow
    its predecessor, NewerFormat if a later release wrote one."""
    last_seq = (await log.info()).last_seq
    head = after
    async for record in log.read_range(after.position + 1):
        stored = check_record(log.name, record, head)
        head = stored.head
        yield stored
    if head.position < last_seq:
        raise missing(log.name, head.position + 1, last_seq)


def check_record(name: str, record: StreamRecord, before: LedgerHead) -> StoredRecord:
    """Return the decision in `record`. Raises DataLoss with the cause if it is damaged or does not follow the head
    `before`, NewerFormat if a later release wrote it."""

    def lost(what: str) -> DataLoss:
        return DataLoss(f"{name}: record {record.seq} {what}; {RESTORE}", ledger=name, position=record.seq)

    if record.seq != before.position + 1:
        raise missing(name, before.position + 1, record.seq - 1)
    hashed = record_hash(record.payload)
    if CHECKSUM not in record.headers:
        raise lost(f"has no {CHECKSUM} header: it was not written by a coordinator of this version")
    if record.headers[CHECKSUM] != hashed:
        raise lost("is damaged: the hash of its bytes is not the stored one")
    try:
        decoded = decode_record(record.payload)
    except NewerFormat as error:
        raise NewerFormat(f"{name}: record {record.seq}: {error}", ledger=name, position=record.seq) from error
    except (InvalidInput, ValueError) as error:
        raise lost(f"cannot be read: {error}") from error
    if decoded.previous != before.hash:
        raise lost(
            f"does not follow record {before.position}: it has {decoded.previous or '(none)'} as the previous hash, "
            f"expected {before.hash or '(none)'}"
        )
    if record.msg_id != decoded.record_id:
        raise lost(f"has the message id {record.msg_id[:80]!r}, expected its record id {decoded.record_id[:80]!r}")
    return StoredRecord(
        position=record.seq,
        record_id=decoded.record_id,
        time_unix_s=decoded.time_unix_s,
        facts=decoded.facts,
        hash=hashed,
        protocol=decoded.protocol,
    )


def missing(name: str, first: int, last: int) -> DataLoss:
    """Return the error for missing records `first` to `last`."""
    which = f"record {first}" if first >= last else f"records {first} to {last}"
    return DataLoss(
        f"{name} lacks {which}: the run cannot be recovered without them; {RESTORE}", ledger=name, position=first
    )
