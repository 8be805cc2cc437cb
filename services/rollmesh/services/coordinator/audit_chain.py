"""The stored chain of records, compared with every head of it that was stored elsewhere.

The chain alone shows damage. It is not evidence against a process that can write the stream, because that process can
recompute every hash. A head stored elsewhere is evidence: a change at or before its position gives another hash there,
and records removed before it are missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollmesh.services.coordinator.audit_repeats import Repeats, key_of
from rollmesh.services.coordinator.audit_report import Complain, HeadLine
from rollmesh.services.coordinator.ledger import StoredRecord, check_record, missing
from rollmesh.shared.bus.bus import StreamRecord
from rollmesh.shared.domain.formats import NewerFormat
from rollmesh.shared.domain.ledger_head import EMPTY, LedgerHead, record_hash
from rollmesh.shared.errors import DataLoss

CLOCK_S = 5.0
"""Tolerated decrease of the time between two records, in seconds, because wall clocks are corrected."""


@dataclass(frozen=True, slots=True)
class StoredHead:
    """A head, and where it was stored."""

    where: str
    head: LedgerHead


class Chain:
    """Checks the records of one ledger in the order of the stream. `complain` receives violations, `warn` receives
    warnings."""

    def __init__(self, name: str, heads: Sequence[StoredHead], complain: Complain, warn: Complain) -> None:
        self.head = EMPTY
        """Head of the newest record, by its bytes."""
        self._name = name
        self._complain = complain
        self._warn = warn
        self._broken = False
        self._waiting = sorted(heads, key=lambda stored: stored.head.position, reverse=True)
        """Heads whose position is not reached yet, the lowest last."""
        self._compared: list[HeadLine] = []
        self._ids = Repeats()
        """Ids of all records."""
        self._time_unix_s = 0.0

    @property
    def heads(self) -> tuple[HeadLine, ...]:
        """Every compared head, by position."""
        return tuple(self._compared)

    def enter(self, record: StreamRecord) -> StoredRecord | None:
        """Return the decision in a record. Return None from the first break on: later records prove nothing, but are
        checked for further damage."""
        stored = None
        try:
            stored = check_record(self._name, record, self.head)
        except (DataLoss, NewerFormat) as error:
            self._broken = True
            self._complain("chain", error.message, record.seq)
        self._check_lost_heads(record.seq)
        self.head = LedgerHead(position=record.seq, hash=record_hash(record.payload))
        self._check_heads()
        if stored is not None:
            self._check_id_and_time(stored)
        return None if self._broken else stored

    def finish(self, last_seq: int) -> None:
        """Finish: there are no further records. `last_seq` is the last sequence by the stream's own count."""
        if self.head.position < last_seq:
            self._complain("chain", missing(self._name, self.head.position + 1, last_seq).message, last_seq)
        for repeat in self._ids.found():
            self._complain("ledger", f"its record id was used by record {repeat.first_position}", repeat.position)
        for stored in reversed(self._waiting):
            self._note(stored, holds=False)
            self._complain(
                "chain",
                f"{self._name} ends at record {self.head.position}, but {stored.where} holds the hash of record "
                f"{stored.head.position}: the records after {self.head.position} were removed",
                stored.head.position,
            )

    def _check_lost_heads(self, position: int) -> None:
        while self._waiting and self._waiting[-1].head.position < position:
            stored = self._waiting.pop()
            self._note(stored, holds=False)
            at = stored.head.position
            self._complain("chain", f"{self._name} lacks record {at}, whose hash {stored.where} holds", at)

    def _check_heads(self) -> None:
        while self._waiting and self._waiting[-1].head.position == self.head.position:
            stored = self._waiting.pop()
            holds = stored.head.hash == self.head.hash
            self._note(stored, holds=holds)
            if not holds:
                self._complain(
                    "chain",
                    f"record {self.head.position} has the hash {self.head.hash}, {stored.where} holds "
                    f"{stored.head.hash}: this record or one before it was altered, removed, inserted or moved, or the "
                    "head is of another run with this name",
                )

    def _note(self, stored: StoredHead, *, holds: bool) -> None:
        head = stored.head
        self._compared.append(HeadLine(where=stored.where, position=head.position, hash=head.hash, holds=holds))

    def _check_id_and_time(self, stored: StoredRecord) -> None:
        self._ids.add(key_of(stored.record_id), stored.position, stored.position)
        if stored.time_unix_s < self._time_unix_s - CLOCK_S:
            behind_s = self._time_unix_s - stored.time_unix_s
            self._warn(
                "ledger",
                f"its time is {behind_s:.1f} s before that of record {stored.position - 1}: a wall clock was set back, "
                "or the record was written by another host; its time proves nothing",
                stored.position,
            )
        self._time_unix_s = stored.time_unix_s
