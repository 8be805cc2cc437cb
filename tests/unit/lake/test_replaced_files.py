"""Exports after a file, a payload or the end of the ledger was lost, or an update was undone: the rows are those of one
export into an empty folder, with every payload that is in a file."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollmesh.app.lake.export import export_samples
from rollmesh.app.lake.files import FolderBusy, Partitions, owned
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.ledger import StoredRecord, read_ledger
from rollmesh.shared.bus.bus import StreamLog
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.testing.memory_bus import MemoryBus

from ..coordinator.core_run import CoreRun
from ..coordinator.test_audit import rolled_back
from .test_lake import Mixed, Rows, bus_of, mixed, rows_of, times_of


async def rows_of_one_export(bus: MemoryBus, folder: Path) -> Rows:
    await export_samples(bus, "r", folder)
    return rows_of(folder)


def next_update(run: CoreRun, update: int) -> None:
    run.generate(8, step=update - 1)
    run.checkpoint(update, run.commit(update, run.lease(update).lease_id))
    run.publish(update)


async def test_the_rows_of_a_removed_file_are_written_again_and_no_file_is_overwritten(tmp_path: Path) -> None:
    run, folder = mixed(), tmp_path / "parts"
    for update in (3, 4):
        next_update(run, update)
        await export_samples(await bus_of(run), "r", folder)
    (folder / "run=r/update=none/part-0.parquet").unlink()
    next_update(run, 5)
    bus = await bus_of(run)
    result = await export_samples(bus, "r", folder)
    assert rows_of(folder) == await rows_of_one_export(bus, tmp_path / "once")
    assert result.num_rows == len(rows_of(folder))
    before = times_of(folder)
    assert (await export_samples(bus, "r", folder)).num_new == 0
    assert times_of(folder) == before


class Forked(Mixed):
    """Filters other groups than `Mixed`."""

    def decide(self, group: str) -> Any:
        decided = super().decide(group)
        return replace(decided, decision=f.GroupDecision.FILTER, reason="OTHER") if int(group[1:]) % 3 == 1 else decided


async def test_rows_of_records_that_the_ledger_lost_are_replaced(tmp_path: Path) -> None:
    run, forked = mixed(), mixed()
    next_update(run, 3)
    forked.__class__ = Forked
    next_update(forked, 3)
    after_fork, folder = await bus_of(forked), tmp_path / "fork"
    await export_samples(await bus_of(run), "r", folder)
    shorter = await bus_of(run, len(mixed().records) - 3)
    await export_samples(shorter, "r", folder)
    assert rows_of(folder) == await rows_of_one_export(shorter, tmp_path / "shorter")
    await export_samples(await bus_of(run), "r", folder)
    await export_samples(after_fork, "r", folder)
    assert rows_of(folder) == await rows_of_one_export(after_fork, tmp_path / "once")


async def test_payloads_of_an_update_that_is_undone_after_the_purge_stay(tmp_path: Path) -> None:
    run, folder = rolled_back(), tmp_path / "purged"
    expected = await rows_of_one_export(await bus_of(run), tmp_path / "once")
    undone = next(n for n, record in enumerate(run.records) if any(isinstance(x, f.RolledBack) for x in record.facts))
    await export_samples(await bus_of(run, undone), "r", folder)
    exported = {row["sample_id"] for row in rows_of(folder)}
    bus = await bus_of(run)
    await (await bus.open(run_streams("r").samples.name)).purge_below(1000)
    result = await export_samples(bus, "r", folder)
    rows = rows_of(folder)
    assert [row for row in rows if row["stored"]] == [row for row in expected if row["sample_id"] in exported]
    assert result.num_stored == len(exported) > 0
    assert [row["ended_as"] for row in rows] == [row["ended_as"] for row in expected]


async def test_the_ledger_is_read_by_the_owner_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def read(log: StreamLog) -> AsyncIterator[StoredRecord]:
        with pytest.raises(FolderBusy), owned(Partitions(tmp_path, "r").folder):
            pass
        async for record in read_ledger(log):
            yield record

    monkeypatch.setattr("rollmesh.app.lake.export.read_ledger", read)
    await export_samples(await bus_of(mixed()), "r", tmp_path)
