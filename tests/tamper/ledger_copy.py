"""Copies of ledgers for tests: records written to another stream, with a chain that is right or deliberately wrong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from rollmesh.services.coordinator.core.facts import Fact
from rollmesh.services.coordinator.fact_codec import decode_record, encode_record
from rollmesh.services.coordinator.ledger import CHECKSUM
from rollmesh.shared.bus.bus import StreamLog
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.ledger_head import record_hash
from rollmesh.testing.memory_bus import MemoryBus
from rollmesh.v1 import events_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRecord:
    """A record as the stream holds it."""

    payload: bytes
    msg_id: str
    headers: dict[str, str] = field(default_factory=dict)


async def read_raw(log: StreamLog) -> list[RawRecord]:
    """Every record of a ledger, unchanged but for trace headers."""
    return [
        RawRecord(payload=record.payload, msg_id=record.msg_id, headers={CHECKSUM: record.headers[CHECKSUM]})
        async for record in log.read_range()
    ]


def with_facts(raw: RawRecord, facts: Sequence[Fact]) -> RawRecord:
    """The record with other facts, and the same hash before it; its own hash is right."""
    old = decode_record(raw.payload)
    return sealed(replace(raw, payload=encode_record(old.record_id, old.time_unix_s, facts, old.previous)))


def sealed(raw: RawRecord) -> RawRecord:
    """The record with the header that its bytes ask for."""
    return replace(raw, headers={CHECKSUM: record_hash(raw.payload)})


def rechained(records: Iterable[RawRecord]) -> list[RawRecord]:
    """The records with every hash recomputed: a forger who can write the stream does the same."""
    chained: list[RawRecord] = []
    previous = ""
    for raw in records:
        record = events_pb2.LedgerRecord.FromString(raw.payload)  # its facts need not make sense
        record.previous = bytes.fromhex(previous)
        chained.append(sealed(RawRecord(payload=record.SerializeToString(), msg_id=record.record_id)))
        previous = record_hash(chained[-1].payload)
    return chained


def made(facts: Iterable[Sequence[Fact]]) -> list[RawRecord]:
    """A ledger of these decisions."""
    records = (
        RawRecord(payload=encode_record(f"d{number}", float(number), each), msg_id=f"d{number}")
        for number, each in enumerate(facts, start=1)
    )
    return rechained(records)


async def store(records: Iterable[RawRecord], run: str = "r", bus: MemoryBus | None = None) -> MemoryBus:
    """A bus whose ledger of `run` holds the records."""
    bus = bus or MemoryBus()
    log = await bus.create(run_streams(run).ledger)
    for number, raw in enumerate(records, start=1):
        log._seen.clear()  # a message id may come again
        await log.append(raw.payload, msg_id=raw.msg_id, expected_last_seq=number - 1, headers=raw.headers)
    return bus
