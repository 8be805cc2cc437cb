"""Recovery: load the newest usable snapshot and apply the later facts. It decides nothing."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from rollmesh.services.coordinator.core.apply import apply
from rollmesh.services.coordinator.core.state import State
from rollmesh.services.coordinator.ledger import read_ledger
from rollmesh.services.coordinator.snapshots import Snapshot, SnapshotStore
from rollmesh.shared.bus.bus import StreamLog, UnknownRecord
from rollmesh.shared.domain.ledger_head import EMPTY, LedgerHead, record_hash

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """State of a run after the ledger record at `head`."""

    state: State
    head: LedgerHead
    snapshot_position: int
    """Position of the snapshot that was used; 0 if none was."""


async def recover(log: StreamLog, store: SnapshotStore) -> Recovered:
    """Return the state that follows from the ledger. Raises DataLoss for a missing or damaged record, NewerFormat for
    one of a later release."""
    base = await _usable_snapshot(log, store)
    state = base.state if base is not None else State()
    head = start = base.head if base is not None else EMPTY
    async for record in read_ledger(log, after=start):
        for fact in record.facts:
            apply(state, fact)
        head = record.head
    _log.info(
        "recovered: ledger=%s record=%d records_after_snapshot=%d",
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
            what = "the ledger has another record at its position"
        except UnknownRecord:
            what = "the ledger does not reach it"
        _log.warning("snapshot skipped: ledger=%s record=%d: %s", log.name, snapshot.head.position, what)
    return None
