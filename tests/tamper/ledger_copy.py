"""Copies of ledgers for tests: records that are written to another stream, with a chain that is right or deliberately
wrong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from rollmesh.services.coordinator.core.facts import Fact
from rollmesh.services.coordinator.fact_codec import decode_record, encode_record
from rollmesh.shared.bus.bus import StreamLog
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.domain.ledger_head import CHECKSUM, record_hash
from rollmesh.testing.memory_bus import MemoryBus
from rollmesh.v1 import events_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRecord:
    """A record as it is stored in the stream."""

    payload: bytes
    msg_id: str
    headers: dict[str, str] = field(default_factory=dict)


async def read_raw(log: StreamLog) -> list[RawRecord]:
    """Return every record of a ledger, unchanged except for trace headers."""
    return [
        RawRecord(payload=record.payload, msg_id=record.msg_id, headers={CHECKSUM: record.headers[CHECKSUM]})
        async for record in log.read_range()
    ]


def with_facts(raw: RawRecord, facts: Sequence[Fact]) -> RawRecord:
    """Return the record with other facts and the same previous hash. Its own hash is right."""
    old = decode_record(raw.payload)
    return sealed(
        replace(raw, payload=encode_record(old.record_id, old.time_unix_s, facts, old.previous, old.protocol))
    )


def sealed(raw: RawRecord) -> RawRecord:
    """Return the record with the header that fits its bytes."""
    return replace(raw, headers={CHECKSUM: record_hash(raw.payload)})


def rechained(records: Iterable[RawRecord]) -> list[RawRecord]:
    """Return the records with every hash recomputed, as a forger with write access to the stream would do."""
    chained: list[RawRecord] = []
    previous = ""
    for raw in records:
        record = events_pb2.LedgerRecord.FromString(raw.payload)  # its facts need not be consistent
        payload = raw.payload
        if record.previous != bytes.fromhex(previous):  # else the bytes stay: the order of a map is not that of before
            record.previous = bytes.fromhex(previous)
            payload = record.SerializeToString()
        chained.append(sealed(RawRecord(payload=payload, msg_id=record.record_id)))
        previous = record_hash(chained[-1].payload)
    return chained


def made(facts: Iterable[Sequence[Fact]]) -> list[RawRecord]:
    """Return a ledger of these decisions."""
    records = (
        RawRecord(payload=encode_record(f"d{number}", float(number), each), msg_id=f"d{number}")
        for number, each in enumerate(facts, start=1)
    )
    return rechained(records)


async def store(records: Iterable[RawRecord], run: str = "r", bus: MemoryBus | None = None) -> MemoryBus:
    """Return a bus with the records as the ledger of `run`."""
    bus = bus or MemoryBus()
    log = await bus.create(run_streams(run).ledger)
    for number, raw in enumerate(records, start=1):
        log._seen.clear()  # a message id may be repeated
        await log.append(raw.payload, msg_id=raw.msg_id, expected_last_seq=number - 1, headers=raw.headers)
    return bus
