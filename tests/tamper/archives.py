"""Copies of ledgers whose older records are in archive segments, and changes to the files of these segments.

The facts ArchiveSealed follow the last record of the run, so that every stored head stays one of the copy.
"""

from __future__ import annotations

import hashlib
import io
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import msgspec

from rollmesh.services.coordinator.core.facts import ArchiveSealed, Fact
from rollmesh.services.coordinator.fact_codec import encode_record
from rollmesh.shared.bus.archive_bus import ArchiveBus, ArchivedLedger
from rollmesh.shared.bus.archive_files import ArchiveFiles, ArchiveSegment, file_sha256
from rollmesh.shared.bus.archive_segment import MAGIC, Index, SegmentReader, write_segment
from rollmesh.shared.bus.bus import StreamRecord
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.domain.ledger_head import CHECKSUM, EMPTY, LedgerHead, record_hash
from rollmesh.testing.memory_bus import MemoryBus
from rollmesh.v1 import events_pb2
from tests.tamper.ledger_copy import RawRecord, rechained, store

NUM_SEGMENTS = 3
Damage = Callable[[ArchiveFiles], None]


async def archived(run: str, records: list[RawRecord], folder: Path) -> ArchiveBus:
    """Return a bus with the records, of which three quarters are in segments below `folder`."""
    cuts = [len(records) * n // 4 for n in range(NUM_SEGMENTS + 1)]
    files, facts = ArchiveFiles(folder / run), list[Fact]()
    numbered = [
        StreamRecord(seq=seq, payload=raw.payload, msg_id=raw.msg_id, headers=raw.headers)
        for seq, raw in enumerate(records, start=1)
    ]
    for number, (begin, end) in enumerate(pairwise(cuts), start=1):
        before = LedgerHead(position=begin, hash=records[begin - 1].headers[CHECKSUM]) if begin else EMPTY
        segment = files.write(run, number, numbered[begin:end], before)
        sha256, size = file_sha256(segment.path), segment.path.stat().st_size
        facts.append(
            ArchiveSealed(number=number, first=segment.first, last=segment.last, sha256=sha256, size_bytes=size)
        )
    last = encode_record("d-sealed", 1e12, facts)
    server = await store(rechained([*records, RawRecord(payload=last, msg_id="d-sealed")]), run, MemoryBus())
    bus = ArchiveBus(server, folder, writes=False)
    log = await bus.open(run_streams(run).ledger.name)
    assert isinstance(log, ArchivedLedger)
    await log.purge_below(cuts[-1] + 1)
    return bus


def _one(rng: random.Random, files: ArchiveFiles) -> ArchiveSegment:
    return rng.choice(files.segments())


def removed(rng: random.Random) -> Damage:
    return lambda files: _one(rng, files).path.unlink()


def all_removed(_: random.Random) -> Damage:
    return ArchiveFiles.remove_all


def cut_off(rng: random.Random) -> Damage:
    def damage(files: ArchiveFiles) -> None:
        path = _one(rng, files).path
        content = path.read_bytes()
        path.write_bytes(content[: rng.randrange(len(content))])

    return damage


def byte_altered(rng: random.Random) -> Damage:
    def damage(files: ArchiveFiles) -> None:
        path = _one(rng, files).path
        content = bytearray(path.read_bytes())
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(content))

    return damage


def swapped(_: random.Random) -> Damage:
    def damage(files: ArchiveFiles) -> None:
        first, second = (segment.path for segment in files.segments()[:2])
        contents = first.read_bytes(), second.read_bytes()
        first.write_bytes(contents[1])
        second.write_bytes(contents[0])

    return damage


def renamed(rng: random.Random) -> Damage:
    def damage(files: ArchiveFiles) -> None:
        path = _one(rng, files).path
        path.rename(path.with_name(f"{path.name[:-24]}{rng.randbytes(8).hex()}.archive"))

    return damage


def rewritten(rng: random.Random) -> Damage:
    """Change a record of a segment, and recompute the hashes after it in the segment."""

    def damage(files: ArchiveFiles) -> None:
        segment = _one(rng, files)
        with segment.path.open("rb") as file:
            reader = SegmentReader(file, "segment")
            records = [record for block in reader.records() for record in block]
            begin = reader.index.begin
        at, head, forged = rng.randrange(len(records)), begin, list[StreamRecord]()
        for n, record in enumerate(records):
            message = events_pb2.LedgerRecord.FromString(record.payload)
            message.previous = bytes.fromhex(head.hash)
            message.time_unix_s += 1.0 if n == at else 0.0
            payload = message.SerializeToString()
            head = LedgerHead(position=record.seq, hash=record_hash(payload))
            forged.append(
                StreamRecord(seq=record.seq, payload=payload, msg_id=record.msg_id, headers={CHECKSUM: head.hash})
            )
        content = io.BytesIO()
        write_segment(content, "r", forged, begin)
        segment.path.write_bytes(content.getvalue())

    return damage


def packed_again(rng: random.Random) -> Damage:
    """Replace a segment by one with the same records and another name of the run."""

    def damage(files: ArchiveFiles) -> None:
        segment = _one(rng, files)
        with segment.path.open("rb") as file:
            reader = SegmentReader(file, "segment")
            records = [record for block in reader.records() for record in block]
        content = io.BytesIO()
        write_segment(content, "another", records, reader.index.begin)
        segment.path.write_bytes(content.getvalue())

    return damage


def without_blocks(rng: random.Random) -> Damage:
    """Replace the index of a segment by one that names no block, with its SHA-256."""

    def damage(files: ArchiveFiles) -> None:
        segment = _one(rng, files)
        index = Index(run="r", first=segment.first, last=segment.last, after="", blocks=())
        text = msgspec.msgpack.encode(index)
        end = len(text).to_bytes(4, "little") + hashlib.sha256(text).digest() + MAGIC
        segment.path.write_bytes(MAGIC + text + end)

    return damage


DAMAGES: dict[str, Callable[[random.Random], Damage]] = {
    "archive: segment removed": removed,
    "archive: all segments removed": all_removed,
    "archive: segment cut off": cut_off,
    "archive: byte altered": byte_altered,
    "archive: segments swapped": swapped,
    "archive: index without blocks": without_blocks,
    "archive: segment renamed": renamed,
    "archive: record rewritten, its segment rechained": rewritten,
    "archive: segment packed again": packed_again,
}
"""Kinds that are found without any stored head."""
