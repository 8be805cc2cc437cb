"""The archiver: a crash between any two of its steps loses no record, and archives none twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollmesh.app.backup.backup import BackupSource, write_backup
from rollmesh.app.backup.backup_file import FORMAT, BackupAbout, FilePart, StreamPart, read_backup
from rollmesh.services.coordinator.archiver import ArchiveFaultPoint, Archiver
from rollmesh.services.coordinator.callers import QueuedInput
from rollmesh.services.coordinator.config import ArchiveConfig, CoordinatorConfig
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core import messages as m
from rollmesh.services.coordinator.core.fleet import Fleet, FleetConfig
from rollmesh.services.coordinator.fact_codec import decode_record
from rollmesh.services.coordinator.housekeeping import Housekeeper
from rollmesh.services.coordinator.ledger import StoredRecord, read_ledger
from rollmesh.services.coordinator.recovery import Recovered, recover
from rollmesh.services.coordinator.run_storage import RunStorage
from rollmesh.services.coordinator.runs import Runs
from rollmesh.services.coordinator.snapshots import SnapshotStore, encode_snapshot, encode_state
from rollmesh.shared.bus import archive_segment
from rollmesh.shared.bus.archive_bus import ArchiveBus, ArchivedLedger
from rollmesh.shared.bus.archive_segment import SegmentDamaged
from rollmesh.shared.bus.bus import StreamRecord, StreamSpec
from rollmesh.shared.bus.run_streams import StreamLimits, run_streams
from rollmesh.shared.domain.ledger_head import EMPTY, record_hash
from rollmesh.shared.errors import DiskFull, FailedPrecondition, PayloadTooLarge
from rollmesh.shared.process.fault_points import Hook, noop
from rollmesh.testing.memory_bus import MemoryBus, MemoryStream
from rollmesh.v1 import events_pb2

from .driver_bench import LIMITS, NAMES, SPEC, Bench

KIB = 1024
LIMIT = 64 * KIB
CONFIG = ArchiveConfig(from_share=0.25, segment_bytes=4 * KIB)


class Crash(Exception):
    """The coordinator exits here."""


def crash_at(point: ArchiveFaultPoint) -> Hook:
    async def at(reached: ArchiveFaultPoint) -> None:
        if reached is point:
            raise Crash

    return at


class World:
    """What outlives a coordinator: the streams and the segments."""

    def __init__(self, folder: Path) -> None:
        self.server = MemoryBus()
        self.bus = ArchiveBus(self.server, folder, writes=True)
        self.num_coordinators = 0

    async def open(self) -> ArchivedLedger:
        log = await self.bus.create(run_streams("r", StreamLimits(ledger_bytes_max=LIMIT)).ledger)
        assert isinstance(log, ArchivedLedger)
        return log

    @asynccontextmanager
    async def coordinator(self) -> AsyncIterator[tuple[Bench, ArchivedLedger]]:
        log: Any = await self.open()
        bench = Bench(log, await self.bus.create(run_streams("r").dead), LIMITS)
        self.num_coordinators += 1
        bench.ids._random.seed(self.num_coordinators)  # ids are never repeated
        await bench.driver.start()
        await bench.driver.read(lambda *_: None)
        try:
            yield bench, log
        finally:
            await bench.driver.close()

    async def records(self) -> list[StoredRecord]:
        """Return the whole ledger, whose chain is verified."""
        return [record async for record in read_ledger(await self.open())]


async def fill(bench: Bench, num: int = 80) -> int:
    """Append records, and return the position of the last one."""
    for _ in range(num):
        await bench.ask(i.AttachTrainer, **NAMES, last_update=0, digest="", holder="x" * 200)
    return bench.driver._ledger.head.position


async def sealed(world: World) -> list[f.ArchiveSealed]:
    return [fact for record in await world.records() for fact in record.facts if isinstance(fact, f.ArchiveSealed)]


async def archive(bench: Bench, log: ArchivedLedger, position: int, at: Hook = noop) -> int:
    """Archive what is due, and return the number of segments."""
    archiver, num = Archiver(bench.driver, log, CONFIG, at=at), 0
    while await archiver.step(position) is not None:
        num += 1
    return num


async def test_the_oldest_records_move_until_the_stream_holds_its_share(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with world.coordinator() as (bench, log):
        await bench.ask(m.CreateRun, spec=SPEC)
        position = await fill(bench)
        before = await world.records()
        assert bench.driver.ledger_used > 0.25
        num = await archive(bench, log, position)
        info = await log.info()
        assert info.num_bytes <= 0.25 * LIMIT
        assert bench.driver.ledger_used <= 0.25
        facts = await sealed(world)
        assert [fact.number for fact in facts] == list(range(1, num + 1))
        assert num > 1
        assert [fact.first for fact in facts] == [1, *(fact.last + 1 for fact in facts[:-1])]
        assert info.first_seq == facts[-1].last + 1
        assert (await world.records())[: len(before)] == before
        assert log.files is not None
        for fact, segment in zip(facts, log.files.segments(), strict=True):
            assert (segment.number, segment.first, segment.last) == (fact.number, fact.first, fact.last)
            assert fact.sha256.startswith(segment.digest)
            assert fact.size_bytes == segment.path.stat().st_size


async def test_records_beyond_the_snapshot_stay_in_the_stream(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with world.coordinator() as (bench, log):
        await bench.ask(m.CreateRun, spec=SPEC)
        await fill(bench)
        assert await archive(bench, log, 20) == 1
        assert (await log.info()).first_seq <= 21
        assert await archive(bench, log, 20) == 0


@pytest.mark.parametrize("point", ArchiveFaultPoint)
async def test_after_a_crash_between_two_steps_no_record_is_lost_or_archived_twice(
    point: ArchiveFaultPoint, tmp_path: Path
) -> None:
    world = World(tmp_path)
    async with world.coordinator() as (bench, log):
        await bench.ask(m.CreateRun, spec=SPEC)
        position = await fill(bench)
        before = await world.records()
        with pytest.raises(Crash):
            await archive(bench, log, position, crash_at(point))
        state = encode_state(bench.core.state)
    assert (await world.records())[: len(before)] == before, "also for a reader before the restart"
    async with world.coordinator() as (bench, log):
        assert encode_state(bench.core.state) == state
        assert log.files is not None
        is_sealed = point in (ArchiveFaultPoint.SEALED, ArchiveFaultPoint.PURGED)
        assert len(await sealed(world)) == int(is_sealed)
        await archive(bench, log, bench.driver._ledger.head.position)
        assert (await log.info()).num_bytes <= 0.25 * LIMIT
        facts = await sealed(world)
        assert [fact.first for fact in facts] == [1, *(fact.last + 1 for fact in facts[:-1])]
        assert [(s.first, s.last) for s in log.files.segments()] == [(fact.first, fact.last) for fact in facts]
        assert (await world.records())[: len(before)] == before


async def test_what_a_crash_left_of_a_segment_is_removed_once_another_one_has_its_number(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with world.coordinator() as (bench, log):
        await bench.ask(m.CreateRun, spec=SPEC)
        await fill(bench)
        assert log.files is not None
        raw = [record async for record in log.read_range()]
        left = log.files.write("r", 1, raw[:5], EMPTY)
        for number in (1, 99):
            (log.files.folder / f"{number:08d}-{'0' * 16}.partial").write_bytes(b"RMLA")
    async with world.coordinator() as (bench, log):
        assert log.files is not None
        assert left in log.files.segments(), "another coordinator may be about to seal it"
        await archive(bench, log, bench.driver._ledger.head.position)
        facts = await sealed(world)
        assert [(s.first, s.last) for s in log.files.segments()] == [(fact.first, fact.last) for fact in facts]
        assert [path.name[:8] for path in log.files.folder.glob("*.partial")] == ["00000099"]


async def test_a_file_that_a_crash_after_the_seal_left_is_removed_at_the_next_start(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with world.coordinator() as (bench, log):
        await bench.ask(m.CreateRun, spec=SPEC)
        position = await fill(bench)
        before = await world.records()
        assert log.files is not None
        raw = [record async for record in log.read_range()]
        shorter, longer = log.files.write("r", 1, raw[:3], EMPTY), log.files.write("r", 1, raw[:20], EMPTY)
        assert log.files.find(1) == shorter, "a reader takes it in place of the sealed one"
        with pytest.raises(Crash):
            await archive(bench, log, position, crash_at(ArchiveFaultPoint.SEALED))
        assert {shorter, longer} < set(log.files.segments())
    async with world.coordinator() as (bench, log):
        assert log.files is not None
        await Archiver(bench.driver, log, CONFIG).step(0)
        (fact,) = await sealed(world)
        assert [s.digest for s in log.files.segments()] == [fact.sha256[:16]]
        assert (await log.info()).first_seq == fact.last + 1
        assert (await world.records())[: len(before)] == before


async def test_an_old_leftover_is_removed_and_one_with_records_of_its_own_stays(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with world.coordinator() as (bench, log):
        await bench.ask(m.CreateRun, spec=SPEC)
        position = await fill(bench)
        assert log.files is not None
        raw = [record async for record in log.read_range()]
        await archive(bench, log, position)
        facts = await sealed(world)
        assert len(facts) > 2
        left = log.files.write("r", 1, raw[: facts[0].last + 2], EMPTY)
        (second,) = (s for s in log.files.segments() if s.number == 2)
        content = second.path.read_bytes()
        second.path.unlink()
        await Archiver(bench.driver, log, CONFIG).step(0)
        assert left in log.files.segments(), "no other file has its last two records"
        second.path.write_bytes(content)
        await Archiver(bench.driver, log, CONFIG).step(0)
        assert [s.digest for s in log.files.segments()] == [fact.sha256[:16] for fact in facts]


async def test_a_recovery_while_a_segment_is_verified_leaves_it(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with world.coordinator() as (bench, log):
        await bench.ask(m.CreateRun, spec=SPEC)
        position = await fill(bench)
        before = await world.records()
        restored = asyncio.Event()
        storage = RunStorage(world.bus, tmp_path / "runs", StreamLimits(ledger_bytes_max=LIMIT))
        await storage.make("r")
        outside: Any = None
        runs = Runs(
            storage,
            outside,
            Fleet(FleetConfig()),
            clock=bench.clock,
            ids=bench.ids,
            config=CoordinatorConfig(),
            on_failure=lambda *_: None,
        )
        plain = runs._make_driver("r", await storage.open("r"), SnapshotStore(tmp_path / "none"))._restore

        async def restore(ends: bool) -> Recovered:
            recovered = await plain(ends)
            restored.set()
            return recovered

        async def fail(point: ArchiveFaultPoint) -> None:
            if point is ArchiveFaultPoint.VERIFIED:
                bench.driver._restore = restore
                bench.driver._go_back(PayloadTooLarge("too large"), QueuedInput(i.Tick(), 10**6))
                await restored.wait()

        segment = await Archiver(bench.driver, log, CONFIG, at=fail).step(position)
        assert segment is not None
        assert (await log.info()).first_seq == segment.last + 1
        assert (await world.records())[: len(before)] == before


async def test_a_lost_segment_is_written_again_while_the_stream_has_its_records(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path)
    async with world.coordinator() as (bench, log):
        await bench.ask(m.CreateRun, spec=SPEC)
        position = await fill(bench)
        before = await world.records()
        with pytest.raises(Crash):
            await archive(bench, log, position, crash_at(ArchiveFaultPoint.SEALED))
    assert log.files is not None
    (segment,) = log.files.segments()
    content = segment.path.read_bytes()
    segment.path.unlink()
    async with world.coordinator() as (bench, log):
        assert await Archiver(bench.driver, log, CONFIG).step(0) is None
        assert segment.path.read_bytes() == content
        assert "was lost, and is written again" in caplog.text
        assert (await log.info()).first_seq == segment.last + 1
        assert (await world.records())[: len(before)] == before


async def test_records_whose_sealed_segment_is_missing_stay_in_the_stream(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file with another content, as of another release of zstd, would not be the one that the ledger names."""
    monkeypatch.setattr(archive_segment, "LEVEL", 1)
    world = World(tmp_path)
    async with world.coordinator() as (bench, log):
        await bench.ask(m.CreateRun, spec=SPEC)
        position = await fill(bench)
        before = await world.records()
        with pytest.raises(Crash):
            await archive(bench, log, position, crash_at(ArchiveFaultPoint.SEALED))
    assert log.files is not None
    (segment,) = log.files.segments()
    content = segment.path.read_bytes()
    segment.path.unlink()
    monkeypatch.undo()
    async with world.coordinator() as (bench, log):
        archiver = Archiver(bench.driver, log, CONFIG)
        for _ in range(2):
            assert await archiver.step(position) is None
        assert caplog.text.count("is missing in") == 1
        assert log.files is not None
        assert log.files.segments() == []
        assert (await log.info()).first_seq == 1
        assert (await world.records())[: len(before)] == before
        segment.path.write_bytes(content)
        assert await archiver.step(position) is not None
        assert (await log.info()).first_seq > segment.last
        assert (await world.records())[: len(before)] == before


async def test_the_archive_of_another_ledger_is_kept_and_nothing_is_archived_beside_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The coordinator was started with the address of another NATS."""
    world = World(tmp_path)
    async with world.coordinator() as (bench, log):
        await bench.ask(m.CreateRun, spec=SPEC)
        await archive(bench, log, await fill(bench))
        assert log.files is not None
        kept = log.files.segments()
        assert kept
    world.server = MemoryBus()
    world.bus = ArchiveBus(world.server, tmp_path, writes=True)
    async with world.coordinator() as (bench, log):
        await bench.ask(m.CreateRun, spec=SPEC)
        assert await archive(bench, log, await fill(bench)) == 0
        assert "is not a segment of RM_r_LEDGER" in caplog.text
        assert log.files is not None
        assert log.files.segments() == kept


async def test_a_run_that_cannot_be_made_removes_no_archive_of_another_ledger(tmp_path: Path) -> None:
    world = World(tmp_path / "archive")
    async with world.coordinator() as (bench, log):
        await bench.ask(m.CreateRun, spec=SPEC)
        await archive(bench, log, await fill(bench))
        assert log.files is not None
        kept = log.files.segments()

    class FullBus(MemoryBus):
        def __init__(self, full: str) -> None:
            super().__init__()
            self.full = full

        async def create(self, spec: StreamSpec) -> MemoryStream:
            if spec.name == self.full:
                raise DiskFull("no room")
            return await super().create(spec)

    names = run_streams("r")
    for full in (names.ledger.name, names.dead.name):
        bus = ArchiveBus(FullBus(full), tmp_path / "archive", writes=True)
        with pytest.raises(DiskFull):
            await RunStorage(bus, tmp_path / "runs", StreamLimits()).make("r")
        assert await bus.names() == []
        assert log.files.segments() == kept
    storage = RunStorage(world.bus, tmp_path / "runs", StreamLimits())
    assert await storage.delete("r")
    assert log.files.segments() == []


async def test_a_snapshot_is_written_when_too_little_of_a_full_stream_is_behind_the_last_one(tmp_path: Path) -> None:
    world = World(tmp_path / "archive")
    async with world.coordinator() as (bench, log):
        await bench.ask(m.CreateRun, spec=SPEC)
        await fill(bench)
        archiver = Archiver(bench.driver, log, CONFIG)
        keeper = Housekeeper(
            bench.driver,
            SnapshotStore(tmp_path / "snapshots"),
            await world.bus.create(run_streams("r").samples),
            clock=bench.clock,
            limits=LIMITS,
            position=0,
            archiver=archiver,
        )
        assert not await keeper.snapshot_if_due(), "there are fewer records than `snapshot_records`"
        for _ in range(20):
            await keeper.archive()
        assert (await log.info()).num_bytes <= 0.25 * LIMIT
        assert len(list((tmp_path / "snapshots").iterdir())) == 1


async def test_a_segment_whose_fact_a_power_loss_took_from_the_stream_is_kept_and_sealed_again(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with world.coordinator() as (bench, log):
        await bench.ask(m.CreateRun, spec=SPEC)
        await fill(bench)
        before = await world.records()
        assert log.files is not None
        raw = [record async for record in log.read_range()]
        kept = log.files.write("r", 1, raw[:10], EMPTY)
        await log.purge_below(11)  # and no ArchiveSealed
    async with world.coordinator() as (bench, log):
        assert log.files is not None
        assert log.files.segments() == [kept]
        assert await world.records() == before
        await archive(bench, log, bench.driver._ledger.head.position)
        assert (await sealed(world))[0].first == 1
        assert (await world.records())[: len(before)] == before


async def test_a_segment_that_the_disk_altered_is_not_sealed(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with world.coordinator() as (bench, log):
        await bench.ask(m.CreateRun, spec=SPEC)
        position = await fill(bench)
        assert log.files is not None
        files = log.files

        async def alter(point: ArchiveFaultPoint) -> None:
            if point is ArchiveFaultPoint.WRITTEN:
                path = files.segments()[0].path
                data = bytearray(path.read_bytes())
                data[100] ^= 1
                path.write_bytes(bytes(data))

        with pytest.raises(SegmentDamaged):
            await Archiver(bench.driver, log, CONFIG, at=alter).step(position)
        assert await sealed(world) == []
        assert (await log.info()).first_seq == 1
        assert files.segments() == [], "a reader would find it in place of the next one"
        segment = await Archiver(bench.driver, log, CONFIG).step(position)
        assert segment is not None
        assert (await log.info()).first_seq == segment.last + 1


async def test_only_the_next_segment_is_sealed(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with world.coordinator() as (bench, _):
        await bench.ask(m.CreateRun, spec=SPEC)
        await fill(bench, 5)
        for wrong in ((2, 1, 3), (1, 2, 3), (1, 1, 0)):
            segment = f.ArchiveSealed(number=wrong[0], first=wrong[1], last=wrong[2])
            with pytest.raises(FailedPrecondition, match="expected segment 1 from record 1 on"):
                await bench.ask(i.SealArchive, segment=segment)


async def test_nothing_is_archived_while_a_node_of_the_release_before_may_read_the_ledger(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with world.coordinator() as (bench, log):
        await bench.ask(m.CreateRun, spec=SPEC)
        position, old_node = await fill(bench), True
        archiver = Archiver(bench.driver, log, CONFIG, lambda: not old_node)
        assert await archiver.step(position) is None
        old_node = False
        assert await archiver.step(position) is not None


async def test_a_ledger_of_an_earlier_release_stays_in_its_stream(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path)
    async with world.coordinator() as (bench, log):
        await bench.ask(m.CreateRun, spec=SPEC)
        position = await fill(bench)
        stream = await world.server.open(log.name)
        stream.spec = type(stream.spec)(
            name=log.name, bytes_max=LIMIT, discard=stream.spec.discard, deny_purge=True, subject=stream.spec.subject
        )
        archiver = Archiver(bench.driver, log, CONFIG)
        assert await archiver.step(position) is None
        assert await archiver.step(position) is None
        assert caplog.text.count("was created by a release without archives") == 1


async def test_recovery_from_a_snapshot_and_from_all_records_is_the_same_with_an_archive(tmp_path: Path) -> None:
    world, store = World(tmp_path / "archive"), SnapshotStore(tmp_path / "snapshots")
    async with world.coordinator() as (bench, log):
        await bench.ask(m.CreateRun, spec=SPEC)
        position = await fill(bench, 20)
        head = bench.driver._ledger.head
        store.save(encode_snapshot(bench.core.state, head), position)
        await archive(bench, log, await fill(bench))
        assert (await log.info()).first_seq > position, "the record of the snapshot is archived"
        state = encode_state(bench.core.state)
    found = [await recover(await world.open(), one) for one in (store, SnapshotStore(tmp_path / "none"))]
    assert [one.snapshot_position for one in found] == [position, 0]
    assert [encode_state(one.state) for one in found] == [state, state]


async def test_a_record_with_a_sealed_segment_has_the_format_that_older_readers_reject(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with world.coordinator() as (bench, log):
        await bench.ask(m.CreateRun, spec=SPEC)
        await archive(bench, log, await fill(bench))
        found: dict[bool, set[int]] = {True: set(), False: set()}
        async for record in log.read_range():
            assert record.headers["Sha256"] == record_hash(record.payload)
            message = events_pb2.LedgerRecord.FromString(record.payload)
            found[any(fact.HasField("archive_sealed") for fact in message.facts)].add(message.format)
        assert found == {True: {2}, False: {0}}


async def test_a_backup_during_archiving_has_the_segments_that_its_records_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path / "archive")
    about = BackupAbout(format=FORMAT, run="r", created_unix_s=0.0, config_yaml="", origin_json="", base_dir="")
    async with world.coordinator() as (bench, log):
        await bench.ask(m.CreateRun, spec=SPEC)
        position = await fill(bench)
        await world.bus.create(run_streams("r").samples)
        read_range = ArchivedLedger.read_range

        async def overtaken(ledger: ArchivedLedger, from_seq: int = 1) -> AsyncIterator[StreamRecord]:
            async for record in read_range(ledger, from_seq):
                yield record
                if record.seq == 3:
                    monkeypatch.setattr(ArchivedLedger, "read_range", read_range)
                    await archive(bench, log, position)

        monkeypatch.setattr(ArchivedLedger, "read_range", overtaken)
        summary = await write_backup(BackupSource(bus=world.bus, about=about, root=tmp_path), tmp_path / "file")
    files = {part.path for part in read_backup(tmp_path / "file") if isinstance(part, FilePart)}
    named = [
        fact
        for part in read_backup(tmp_path / "file")
        if isinstance(part, StreamPart)
        for record in part.records
        for fact in decode_record(record.payload).facts
        if isinstance(fact, f.ArchiveSealed)
    ]
    assert named
    assert {fact.sha256[:16] for fact in named} == {path[-24:-8] for path in files}
    assert summary.first_position == 1
    assert summary.num_records["ledger"] == summary.position
