"""Archive segments: a ledger with archived records is the same sequence, byte for byte, and damage is named."""

from __future__ import annotations

import asyncio
import hashlib
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from rollmesh.services.coordinator.core.facts import EpisodeScored, Fact, PayloadRef, Reward, SampleMeta, TimeCounted
from rollmesh.services.coordinator.fact_codec import encode_record
from rollmesh.shared.bus.archive_bus import ArchiveBus, ArchivedLedger, LostRecords
from rollmesh.shared.bus.archive_files import ArchiveFiles
from rollmesh.shared.bus.archive_segment import BLOCK_BYTES, MAGIC, Index, SegmentDamaged, SegmentReader
from rollmesh.shared.bus.bus import StreamRecord, UnknownRecord
from rollmesh.shared.bus.embedded_server import EmbeddedServer
from rollmesh.shared.bus.jetstream_bus import JetStreamBus
from rollmesh.shared.bus.login import BusLogin
from rollmesh.shared.bus.payload_bus import WrongHost
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.domain.formats import NewerFormat
from rollmesh.shared.domain.ledger_head import CHECKSUM, EMPTY, LedgerHead, record_hash
from rollmesh.shared.errors import DataLoss
from rollmesh.testing.memory_bus import MemoryBus
from rollmesh.v1 import events_pb2

EVIDENCE = "the output differs in line 3: "


def scored(number: int, evidence: str) -> EpisodeScored:
    reward = Reward(name="correct", value=1.0, segment=-1, scorer="exact@1", evidence=evidence)
    sample = SampleMeta(sample_id=f"g{number}.0-0", policy="main", rewards=(reward, Reward(name="format", value=0.5)))
    return EpisodeScored(group=f"g{number}", episode=f"g{number}.0", payload=PayloadRef(sequence=1), samples=(sample,))


def records(num: int, evidence_chars: int = 200) -> list[StreamRecord]:
    """Return a chain of records, of which every third has evidence."""
    rng, made, previous = random.Random(1), list[StreamRecord](), ""
    for number in range(1, num + 1):
        text = EVIDENCE + rng.randbytes(evidence_chars // 2).hex() if number % 3 == 0 else ""
        facts: list[Fact] = [TimeCounted(seconds=rng.random()), scored(number, text)]
        payload = encode_record(f"d-{rng.randbytes(10).hex()}", rng.random(), facts, previous)
        previous = record_hash(payload)
        record_id = events_pb2.LedgerRecord.FromString(payload).record_id
        made.append(StreamRecord(seq=number, payload=payload, msg_id=record_id, headers={CHECKSUM: previous}))
    return made


def head(record: StreamRecord) -> LedgerHead:
    return LedgerHead(position=record.seq, hash=record.headers[CHECKSUM])


async def ledger(folder: Path, written: list[StreamRecord], *segments: int) -> ArchivedLedger:
    """Return a ledger of which the records up to each of `segments` are in a segment and purged from the stream."""
    log = await ArchiveBus(MemoryBus(), folder, writes=True).create(run_streams("r").ledger)
    assert isinstance(log, ArchivedLedger)
    assert log.files is not None
    for record in written:
        await log.append(record.payload, msg_id=record.msg_id, headers=record.headers)
    first, before = 0, EMPTY
    for number, last in enumerate(segments, start=1):
        log.files.write("r", number, written[first:last], before)
        first, before = last, head(written[last - 1])
    await log.purge_below(first + 1)
    return log


def same(found: list[StreamRecord], expected: list[StreamRecord]) -> bool:
    return [(r.seq, r.payload, r.msg_id, r.headers) for r in found] == [
        (r.seq, r.payload, r.msg_id, r.headers) for r in expected
    ]


async def test_archived_records_and_those_of_the_stream_are_one_sequence_from_any_position(tmp_path: Path) -> None:
    written = records(60)
    log = await ledger(tmp_path, written, 20, 45)
    assert (await log.info()).first_seq == 46
    for begin in (1, 2, 20, 21, 45, 46, 60, 61):
        assert same([r async for r in log.read_range(begin)], written[begin - 1 :]), begin
    for seq in (1, 20, 21, 45, 46, 60):
        assert same([await log.read(seq)], [written[seq - 1]])
        assert same([await log.read_direct(seq)], [written[seq - 1]])
    for seq in (0, 61):
        with pytest.raises(UnknownRecord):
            await log.read(seq)
    followed = []
    async for record in log.follow(5):
        followed.append(record)
        if record.seq == 60:
            break
    assert same(followed, written[4:])


async def test_a_reader_continues_in_a_segment_when_its_records_are_purged_while_it_reads(tmp_path: Path) -> None:
    written = records(30)
    log = await ledger(tmp_path, written)
    assert log.files is not None
    found = []
    async for record in log.read_range():
        found.append(record)
        if record.seq == 4:
            log.files.write("r", 1, written[:20], EMPTY)
            await log.purge_below(21)
    assert same(found, written)


async def test_a_segment_of_several_blocks_is_read_from_the_middle(tmp_path: Path) -> None:
    written = records(120, evidence_chars=100_000)
    assert sum(len(r.payload) for r in written) > 3 * BLOCK_BYTES
    log = await ledger(tmp_path, written, 110)
    assert log.files is not None
    with log.files.segments()[0].path.open("rb") as file:
        assert len(SegmentReader(file, "s").index.blocks) > 3
    assert same([r async for r in log.read_range(77)], written[76:])
    assert same([await log.read(100)], [written[99]])


async def test_a_scan_reads_no_evidence_but_every_position_and_hash(tmp_path: Path) -> None:
    written = records(30)
    log = await ledger(tmp_path, written, 30)
    found = [r async for r in log.scan()]
    assert [(r.seq, r.headers) for r in found] == [(r.seq, r.headers) for r in written]
    assert EVIDENCE.encode() in written[2].payload
    assert not any(EVIDENCE.encode() in r.payload for r in found)
    for lean, whole in zip(found, written, strict=True):
        left = events_pb2.LedgerRecord.FromString(whole.payload)
        left.facts[1].episode_scored.samples[0].rewards[0].ClearField("evidence")
        assert events_pb2.LedgerRecord.FromString(lean.payload) == left


async def test_a_record_that_protobuf_would_encode_in_another_way_keeps_its_bytes(tmp_path: Path) -> None:
    """Its hash is that of its bytes: fields in another order, and one that this release does not know."""
    first = records(1)[0]
    parts = [
        events_pb2.LedgerRecord(facts=events_pb2.LedgerRecord.FromString(records(3)[2].payload).facts),
        events_pb2.LedgerRecord(record_id="d-2", previous=bytes.fromhex(first.headers[CHECKSUM])),
    ]
    payload = b"".join(part.SerializeToString() for part in parts) + b"\xfa\x7d\x03new"
    second = StreamRecord(seq=2, payload=payload, msg_id="d-2", headers={CHECKSUM: record_hash(payload)})
    log = await ledger(tmp_path, [first, second], 2)
    assert same([r async for r in log.read_range()], [first, second])


async def test_a_record_that_does_not_follow_or_is_damaged_is_not_archived(tmp_path: Path) -> None:
    written, files = records(4), ArchiveFiles(tmp_path)
    other = StreamRecord(seq=2, payload=written[1].payload + b"\x00", msg_id="x", headers=written[1].headers)
    for wrong in ([written[0], other], [written[0], written[2]], written[1:]):
        with pytest.raises(DataLoss, match="does not follow record"):
            files.write("r", 1, wrong, EMPTY)
    assert files.segments() == []


def without_blocks(path: Path) -> None:
    """Replace its index by one that has a valid SHA-256 and no blocks."""
    index = Index(run="r", first=21, last=40, after="", blocks=())
    text = msgspec.msgpack.encode(index)
    path.write_bytes(MAGIC + text + len(text).to_bytes(4, "little") + hashlib.sha256(text).digest() + MAGIC)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def altered(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(bytes(data))


def altered_index(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-60] ^= 1
    path.write_bytes(bytes(data))


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def moved(path: Path) -> None:
    """Give it the name of another range."""
    path.rename(path.with_name(path.name.replace("-000000000021-", "-000000000020-")))


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (Path.unlink, "the archive segment of records 21 to 40 is missing in"),
    (cut, "cut off"),
    (altered, "cannot be read"),
    (altered_index, "its index was altered"),
    (without_blocks, "do not have its records in order"),
    (emptied, "cut off"),
    (moved, "another range than its name"),
]


@pytest.mark.parametrize(("damage", "what"), DAMAGES, ids=lambda x: getattr(x, "__name__", ""))
async def test_a_missing_or_altered_segment_is_named(
    damage: Callable[[Path], object], what: str, tmp_path: Path
) -> None:
    written = records(60)
    log = await ledger(tmp_path, written, 20, 40)
    assert log.files is not None
    damage(log.files.segments()[1].path)
    found: list[StreamRecord] = []

    async def read() -> None:
        async for record in log.read_range():
            found.append(record)

    with pytest.raises(LostRecords, match=what) as caught:
        await read()
    assert same(found, written[:20])
    assert "from a backup" in str(caught.value)
    assert caught.value.last == 40
    with pytest.raises(LostRecords, match=what):
        await log.read(21)
    assert same([r async for r in log.read_range(caught.value.last + 1)], written[40:])


async def test_a_segment_of_a_later_release_is_not_taken_for_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = records(10)
    log = await ledger(tmp_path, written, 10)
    monkeypatch.setattr("rollmesh.shared.bus.archive_segment.FORMAT", 0)
    with pytest.raises(NewerFormat, match="format 1, and this release reads formats up to 0"):
        await log.read(1)


async def test_a_process_on_another_host_learns_where_the_records_are(tmp_path: Path) -> None:
    bus = MemoryBus()
    log = await ArchiveBus(bus, tmp_path, writes=True).create(run_streams("r").ledger)
    for record in records(5):
        await log.append(record.payload, msg_id=record.msg_id, headers=record.headers)
    await log.purge_below(4)
    elsewhere = await ArchiveBus(bus, None, writes=False).open(log.name)
    with pytest.raises(WrongHost, match="records 1 to 3 of RM_r_LEDGER are in archive segments of the run's host"):
        [r async for r in elsewhere.read_range()]
    assert [r.seq async for r in elsewhere.read_range(4)] == [4, 5]


async def test_a_process_on_another_host_does_not_skip_records_that_move_while_it_reads(tmp_path: Path) -> None:
    bus, found = MemoryBus(), list[int]()
    log = await ArchiveBus(bus, tmp_path, writes=True).create(run_streams("r").ledger)
    for record in records(5):
        await log.append(record.payload, msg_id=record.msg_id, headers=record.headers)
    elsewhere = await ArchiveBus(bus, None, writes=False).open(log.name)

    async def read() -> None:
        async for record in elsewhere.read_range():
            found.append(record.seq)
            if record.seq == 2:
                await log.purge_below(5)

    with pytest.raises(WrongHost, match="records 3 to 4 .* set `coordinator.archive.store: files`"):
        await read()
    assert found == [1, 2]


async def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    written = records(5)
    log = await ledger(tmp_path, written, 3)
    assert log.files is not None
    shutil.rmtree(log.files.folder)
    log.files.folder.write_bytes(b"")
    with pytest.raises(SegmentDamaged, match="cannot be listed: Not a directory"):
        await log.read(2)


async def test_only_the_owner_enters_the_folder_of_all_archives(tmp_path: Path) -> None:
    log = await ledger(tmp_path / "archive", records(3), 2)
    assert log.files is not None
    (segment,) = log.files.segments()
    modes = [path.stat().st_mode & 0o777 for path in (tmp_path / "archive", log.files.folder, segment.path)]
    assert modes == [0o700, 0o700, 0o600]


async def test_a_reader_of_jetstream_that_the_archiver_overtakes_gets_every_record(tmp_path: Path) -> None:
    """It reads in batches, and the last record of its range is moved before it gets the second batch."""
    login, written = BusLogin(user="u", password="p"), records(400, evidence_chars=0)
    async with EmbeddedServer(tmp_path / "nats", login=login) as server:
        bus = ArchiveBus(await JetStreamBus.connect(server.url, login=login), tmp_path / "archive", writes=True)
        try:
            log = await bus.create(run_streams("r").ledger)
            assert isinstance(log, ArchivedLedger)
            assert log.files is not None
            appended = [
                await log.append_pipelined(record.payload, msg_id=record.msg_id, headers=record.headers)
                for record in written[:350]
            ]
            await asyncio.gather(*appended)
            found = []
            async for record in log.read_range():
                found.append(record)
                if record.seq == 1:
                    for later in written[350:]:
                        await log.append_pipelined(later.payload, msg_id=later.msg_id, headers=later.headers)
                    await log.append(b"newest", msg_id="newest")
                    log.files.write("r", 1, written, EMPTY)
                    await log.purge_below(401)
            assert [record.seq for record in found] == list(range(1, 402))
            assert same(found[:400], written)
        finally:
            await bus.close()


async def test_the_segments_of_a_deleted_run_are_removed(tmp_path: Path) -> None:
    bus = ArchiveBus(MemoryBus(), tmp_path, writes=True)
    log = await bus.create(run_streams("r").ledger)
    assert isinstance(log, ArchivedLedger)
    assert log.files is not None
    log.files.write("r", 1, records(3), EMPTY)
    await log.append(records(1)[0].payload, msg_id="d-1")
    await bus.delete(log.name)
    assert log.files.segments() == []
    assert not log.files.folder.exists()


def test_sizes_of_archived_samples(tmp_path: Path) -> None:
    """The evidence is not part of the records: without it a segment is several times smaller, and a scan skips it."""
    with_evidence, without = (ArchiveFiles(tmp_path / name) for name in ("with", "without"))
    with_evidence.write("r", 1, records(300, evidence_chars=20_000), EMPTY)
    without.write("r", 1, records(300, evidence_chars=0), EMPTY)
    with with_evidence.segments()[0].path.open("rb") as file:
        blocks = SegmentReader(file, "s").index.blocks
    assert sum(block.evidence_size for block in blocks) > 10 * sum(block.size for block in blocks)
    assert without.size_bytes() < sum(block.size for block in blocks) * 2
