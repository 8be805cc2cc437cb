"""Recovery: the newest usable snapshot, and the facts after it. Nothing is decided here."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from rollmesh.services.coordinator.core.apply import apply
from rollmesh.services.coordinator.core.state import State
from rollmesh.services.coordinator.ledger import read_ledger
from rollmesh.services.coordinator.snapshots import Snapshot, SnapshotStore
from rollmesh.shared.bus.bus import StreamLog, UnknownRecord
from rollmesh.shared.ledger_head import EMPTY, LedgerHead, record_hash

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """A run's state after the ledger record at `head`."""

    state: State
    head: LedgerHead
    snapshot_position: int
    """Where the snapshot stood that was used; 0 if none was."""


async def recover(log: StreamLog, store: SnapshotStore) -> Recovered:
    """The state that the ledger's facts make true. Raises DataLoss for a ledger that lacks a record or has a damaged one."""
    base = await _usable_snapshot(log, store)
    state = base.state if base is not None else State()
    head = start = base.head if base is not None else EMPTY
    async for record in read_ledger(log, after=start):
        for fact in record.facts:
            apply(state, fact)
        head = record.head
    _log.info(
        "%s: recovered at record %d, %d of them after the snapshot",
        log.name,
        head.position,
        head.position - start.position,
    )
    return Recovered(state=state, head=head, snapshot_position=start.position)


async def _usable_snapshot(log: StreamLog, store: SnapshotStore) -> Snapshot | None:
    for snapshot in store.load():
        try:
            if record_hash((await log.read(snapshot.head.position)).payload) == snapshot.head.hash:
                return snapshot
            what = "another record stands in its place"
        except UnknownRecord:
            what = "the ledger does not reach it"
        _log.warning("%s: the snapshot at record %d is passed by: %s", log.name, snapshot.head.position, what)
    return None
