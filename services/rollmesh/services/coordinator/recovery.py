"""Recovery: the newest usable snapshot, and the facts after it. Nothing is decided here."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from rollmesh.services.coordinator.core.apply import apply
from rollmesh.services.coordinator.core.state import State
from rollmesh.services.coordinator.ledger import read_ledger
from rollmesh.services.coordinator.snapshots import Snapshot, SnapshotStore
from rollmesh.shared.bus.bus import StreamLog, UnknownRecord

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """A run's state after the ledger record at `position`."""

    state: State
    position: int
    record_id: str
    snapshot_position: int
    """Where the snapshot stood that was used; 0 if none was."""


async def recover(log: StreamLog, store: SnapshotStore) -> Recovered:
    """The state that the ledger's facts make true. Raises DataLoss for a ledger with a hole or a record it cannot read."""
    base = await _usable_snapshot(log, store)
    state = base.state if base is not None else State()
    position = start = base.position if base is not None else 0
    record_id = base.record_id if base is not None else ""
    async for record in read_ledger(log, after=start):
        for fact in record.facts:
            apply(state, fact)
        position, record_id = record.position, record.record_id
    _log.info("%s: recovered at record %d, %d of them after the snapshot", log.name, position, position - start)
    return Recovered(state=state, position=position, record_id=record_id, snapshot_position=start)


async def _usable_snapshot(log: StreamLog, store: SnapshotStore) -> Snapshot | None:
    for snapshot in store.load():
        try:
            if (await log.read(snapshot.position)).msg_id == snapshot.record_id:
                return snapshot
            what = "another record stands in its place"
        except UnknownRecord:
            what = "the ledger does not reach it"
        _log.warning("%s: the snapshot at record %d is passed by: %s", log.name, snapshot.position, what)
    return None
