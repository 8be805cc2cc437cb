"""Size of the ledger and time of recovery after 10^5 and 10^6 samples.

The facts of an ordinary run (`history`) are appended to a real nats-server through the ledger of the coordinator. Then
the recovery of the coordinator restores the state: from the newest snapshot, as a restart does, and from the whole
ledger, as after the loss of all snapshots. The baseline in the same run reads the same records without decoding them.

How to read it: recovery with a snapshot must not grow with the run; without one it is linear. `state` is the size of
the encoded snapshot, which must not grow with the number of ended samples.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.history import SAMPLES_PER_UPDATE, History
from benchmarks.report import Report
from rollmesh.services.coordinator.config import RunLimits
from rollmesh.services.coordinator.ledger import Ledger
from rollmesh.services.coordinator.recovery import recover
from rollmesh.services.coordinator.snapshots import SnapshotStore, encode_snapshot
from rollmesh.shared.bus.bus import Bus, StreamLog
from rollmesh.shared.bus.embedded_server import EmbeddedServer
from rollmesh.shared.bus.jetstream_bus import JetStreamBus
from rollmesh.shared.bus.login import BusLogin
from rollmesh.shared.bus.run_streams import StreamLimits, run_streams
from rollmesh.shared.clock import SystemClock
from rollmesh.shared.domain.ids import RandomIds
from rollmesh.shared.domain.ledger_head import EMPTY

NUM_SAMPLES = (100_000, 1_000_000)
LOGIN = BusLogin(user="rollmesh", password="bench")
APPEND_S_MAX = 60.0


def run(quick: bool) -> Report:
    report = Report(
        "ledger", f"groups of 16, batches of 16 groups, snapshot every {RunLimits().snapshot_records:,} records"
    )
    for num in (10_000,) if quick else NUM_SAMPLES:
        with TemporaryDirectory(prefix="rollmesh-bench-") as folder:
            report.rows.append(asyncio.run(_measure(Path(folder), num)))
    return report


async def _measure(folder: Path, num_samples: int) -> dict[str, Any]:
    async with EmbeddedServer(folder / "nats", login=LOGIN) as server:
        bus = await JetStreamBus.connect(server.url, login=LOGIN)
        try:
            return await _written_and_recovered(folder, bus, num_samples)
        finally:
            await bus.close()


async def _written_and_recovered(folder: Path, bus: Bus, num_samples: int) -> dict[str, Any]:
    log = await bus.create(run_streams("bench", StreamLimits(ledger_bytes_max=8 << 30)).ledger)
    history, snapshots = History(), SnapshotStore(folder / "snapshots")
    write_s, snapshot_bytes = await _write(log, history, snapshots, num_samples)
    samples = history.core.state.counters.reserved
    num_records, num_bytes, read_s = await _read(log)
    newest_s = await _recover(log, snapshots)
    whole_s = await _recover(log, SnapshotStore(folder / "none"))
    return {
        "samples": f"{samples:,}",
        "records": f"{num_records:,}",
        "ledger MB": num_bytes / 1e6,
        "bytes/sample": num_bytes / samples,
        "decided and written, s": write_s,
        "state KB": snapshot_bytes / 1e3,
        "recovery from snapshot, s": newest_s,
        "from all records, s": whole_s,
        "bare read, s": read_s,
    }


async def _write(log: StreamLog, history: History, snapshots: SnapshotStore, num_samples: int) -> tuple[float, int]:
    begin_s = time.perf_counter()
    ledger = Ledger(log, ids=RandomIds(), clock=SystemClock(), append_s_max=APPEND_S_MAX)
    await ledger.begin(EMPTY)
    snapshot_at = every = RunLimits().snapshot_records
    size = 0
    newest: asyncio.Future[int] | None = None
    for decisions in history.updates(-(-num_samples // SAMPLES_PER_UPDATE)):
        for facts in decisions:
            newest = await ledger.append(facts)
        if ledger.head.position >= snapshot_at:
            snapshot_at += every
            body = encode_snapshot(history.core.state, ledger.head)
            snapshots.save(body, ledger.head.position)
            size = len(body)
    assert newest is not None
    await newest
    return time.perf_counter() - begin_s, size


async def _read(log: StreamLog) -> tuple[int, int, float]:
    begin_s, num, num_bytes = time.perf_counter(), 0, 0
    async for record in log.read_range(1):
        num, num_bytes = num + 1, num_bytes + len(record.payload)
    return num, num_bytes, time.perf_counter() - begin_s


async def _recover(log: StreamLog, snapshots: SnapshotStore) -> float:
    begin_s = time.perf_counter()
    await recover(log, snapshots)
    return time.perf_counter() - begin_s
