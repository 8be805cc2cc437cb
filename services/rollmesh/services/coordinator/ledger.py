"""The ledger of one run: decisions as records, appended by one writer, in order, pipelined.

Each append carries the sequence expected before it, so of two coordinators only one gets on; the bus recognises a lost acknowledgement
by the record id and sends again what a killed server has not stored. An append that fails for good means that the state in memory
is ahead of what is true: the coordinator must stop and recover.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from rollmesh.services.coordinator.core.facts import Fact
from rollmesh.services.coordinator.fact_codec import decode_record, encode_record
from rollmesh.shared.bus.bus import StreamLog, WrongLastSequence
from rollmesh.shared.clock import Clock
from rollmesh.shared.errors import DataLoss, Fenced, InvalidInput, MeshError
from rollmesh.shared.ids import IdSource

CHECKSUM = "Crc32"
"""Header with the CRC-32 of a record's bytes: a flipped bit may decode to another decision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRecord:
    """One decision as stored."""

    position: int
    record_id: str
    time_unix_s: float
    facts: tuple[Fact, ...]


class Ledger:
    """Appends to and reads from RM_<run>_LEDGER. `position` is the sequence of the newest record, stored or on its way."""

    def __init__(
        self, log: StreamLog, *, position: int, record_id: str, ids: IdSource, clock: Clock, append_s_max: float
    ) -> None:
        self._log = log
        self._ids = ids
        self._clock = clock
        self._append_s_max = append_s_max
        self.position = position
        self.record_id = record_id
        """Of the record at `position`; empty for an empty ledger."""

    async def append(self, facts: Sequence[Fact]) -> asyncio.Future[int]:
        """Send one decision; the future gives its sequence once it is stored. Waits while too many are in flight."""
        record_id = self._ids.new("d")
        payload = encode_record(record_id, self._clock.wall_s(), facts)
        stored = await self._log.append_pipelined(
            payload,
            msg_id=record_id,
            expected_last_seq=self.position,
            headers={CHECKSUM: checksum(payload)},
            deadline_s=self._append_s_max,
        )
        self.position += 1
        self.record_id = record_id
        return stored

    def failure(self, error: MeshError) -> MeshError:
        """What a failed append means to the operator."""
        if isinstance(error, WrongLastSequence):
            return Fenced(
                f"another coordinator has taken over {self._log.name}: this one is fenced and stops; run one coordinator per run",
                ledger=self._log.name,
                position=self.position,
            )
        return DataLoss(
            f"{self._log.name} took no record ({error}); the coordinator stops and recovers from what is stored when it is "
            "started again: see that NATS runs, that its disk has room, and that ledger_bytes_max is not reached",
            ledger=self._log.name,
        )


def checksum(payload: bytes) -> str:
    """The CRC-32 of a record's bytes, as its header holds it."""
    return f"{zlib.crc32(payload):08x}"


async def read_ledger(log: StreamLog, after: int = 0) -> AsyncIterator[StoredRecord]:
    """The records after sequence `after`, in order. Raises DataLoss if one is missing or cannot be read."""
    expected = after + 1
    async for record in log.read_range(after + 1):
        if record.seq != expected:
            raise DataLoss(
                f"{log.name} lacks record {expected}: the run cannot be recovered without it", ledger=log.name
            )
        expected += 1
        if record.headers.get(CHECKSUM, checksum(record.payload)) != checksum(record.payload):
            raise DataLoss(
                f"{log.name}: record {record.seq} is damaged: its bytes do not have the checksum they were stored with; restore the "
                "stream from a replica or a backup, the run cannot be recovered without it",
                ledger=log.name,
                position=record.seq,
            )
        try:
            record_id, time_unix_s, facts = decode_record(record.payload)
        except (InvalidInput, ValueError) as error:
            raise DataLoss(f"{log.name}: record {record.seq} cannot be read: {error}", ledger=log.name) from error
        yield StoredRecord(position=record.seq, record_id=record_id, time_unix_s=time_unix_s, facts=facts)
