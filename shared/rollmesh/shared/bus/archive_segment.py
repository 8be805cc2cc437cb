"""One archive segment: consecutive records of a ledger in a compressed file, byte for byte.

    magic | blocks | index | length of the index | SHA-256 of the index | magic
    block  = frame with the records, then a frame with the evidence of their rewards, which a reader may skip

A record has the hash of the one before it, which the reader computes anyway, so a block does not store it. The evidence
of rewards is a separate column, because it may be longer than everything else. A record with evidence keeps its hash,
so that the next one can be returned without it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import BinaryIO

import msgspec
import zstandard
from google.protobuf.message import DecodeError

from rollmesh.shared.bus.bus import StreamRecord
from rollmesh.shared.domain.decoding import UNDECODABLE
from rollmesh.shared.domain.formats import check_format
from rollmesh.shared.domain.ledger_head import CHECKSUM, EMPTY, LedgerHead, record_hash
from rollmesh.shared.errors import DataLoss
from rollmesh.v1 import events_pb2, types_pb2

FORMAT = 1
MAGIC = b"RMLA"
BLOCK_BYTES = 1024 * 1024
"""Bytes of records of a block, before compression. A reader of one record reads one block."""
FRAME_BYTES_MAX = 64 * 1024 * 1024
"""Maximum size of a frame after decompression. A block has one record more than `BLOCK_BYTES` at most."""
LEVEL = 9
"""Level of zstd. Higher ones take several times as long for 2% less."""
_PREVIOUS = b"\x22\x20"
"""Tag and length of LedgerRecord.previous."""
_TAIL_BYTES = 4 + 32 + len(MAGIC)


class SegmentDamaged(DataLoss):
    """An archive segment is missing, or is not what was written."""

    reason = "SEGMENT_DAMAGED"


class Block(msgspec.Struct, frozen=True, array_like=True):
    """Where the frames of a block are in the file."""

    first: int
    """Sequence of its first record."""
    before: str
    """Hash of the record before it, hex; empty before the first record of the ledger."""
    at: int
    size: int
    evidence_size: int
    """The evidence frame follows the frame of the records; 0 if there is no evidence."""


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """The end of the file: its records and its blocks."""

    format: int = FORMAT
    run: str
    first: int
    last: int
    after: str
    """Hash of the last record, hex."""
    blocks: tuple[Block, ...]

    @property
    def begin(self) -> LedgerHead:
        """Head of the ledger before the first record."""
        return LedgerHead(position=self.first - 1, hash=self.blocks[0].before) if self.first > 1 else EMPTY

    @property
    def end(self) -> LedgerHead:
        """Head of the ledger after the last record."""
        return LedgerHead(position=self.last, hash=self.after)


class _Columns(msgspec.Struct, array_like=True):
    """The records of a block as columns."""

    ids: list[str]
    bodies: list[bytes]
    """LedgerRecords without `previous` and evidence."""
    cuts: list[int]
    """Number of bytes after `previous` in the record; -1 if the body is the whole record."""
    hashes: list[bytes]
    """Hash of a record with evidence; empty for the others."""


def write_segment(file: BinaryIO, run: str, records: Sequence[StreamRecord], before: LedgerHead) -> Index:
    """Write consecutive records after the head `before`. Raises DataLoss for a record that does not follow."""
    file.write(MAGIC)
    compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True)
    blocks: list[Block] = []
    head, waiting, num_bytes = before, list[StreamRecord](), 0
    for record in records:
        waiting.append(record)
        num_bytes += len(record.payload)
        if num_bytes >= BLOCK_BYTES or record is records[-1]:
            block, head = _write_block(file, compressor, waiting, head)
            blocks.append(block)
            waiting, num_bytes = [], 0
    index = Index(run=run, first=before.position + 1, last=head.position, after=head.hash, blocks=tuple(blocks))
    text = msgspec.msgpack.encode(index)
    file.write(text + len(text).to_bytes(4, "little") + hashlib.sha256(text).digest() + MAGIC)
    return index


def _write_block(
    file: BinaryIO, compressor: zstandard.ZstdCompressor, records: Sequence[StreamRecord], before: LedgerHead
) -> tuple[Block, LedgerHead]:
    rows, evidence, head = _Columns([], [], [], []), dict[int, list[str]](), before
    for at, record in enumerate(records):
        hashed = record_hash(record.payload)
        if record.seq != head.position + 1 or record.headers.get(CHECKSUM) != hashed:
            raise DataLoss(f"record {record.seq} does not follow record {head.position}, or is damaged; audit the run")
        body, cut = _without_previous(record.payload, head.hash)
        lean, texts = _without_evidence(body)
        if texts:
            evidence[at] = texts
        rows.ids.append(record.msg_id)
        rows.bodies.append(lean)
        rows.cuts.append(cut)
        rows.hashes.append(bytes.fromhex(hashed) if texts else b"")
        head = LedgerHead(position=record.seq, hash=hashed)
    frame = compressor.compress(msgspec.msgpack.encode(rows))
    more = compressor.compress(msgspec.msgpack.encode(evidence)) if evidence else b""
    block = Block(
        first=before.position + 1, before=before.hash, at=file.tell(), size=len(frame), evidence_size=len(more)
    )
    file.write(frame + more)
    return block, head


def _without_previous(payload: bytes, previous: str) -> tuple[bytes, int]:
    mark = _PREVIOUS + bytes.fromhex(previous) if previous else b""
    at = payload.rfind(mark) if mark else -1
    if at < 0:
        return payload, -1
    rest = payload[at + len(mark) :]
    return payload[:at] + rest, len(rest)


def _with_previous(body: bytes, cut: int, previous: str) -> bytes:
    if cut < 0:
        return body
    at = len(body) - cut
    return body[:at] + _PREVIOUS + bytes.fromhex(previous) + body[at:]


def _without_evidence(body: bytes) -> tuple[bytes, list[str]]:
    """Return a record without the evidence of its rewards, and that evidence; the body itself if it would not become
    the same bytes again."""
    record = events_pb2.LedgerRecord.FromString(body)
    texts = [reward.evidence for reward in _rewards(record)]
    if not any(texts):
        return body, []
    for reward in _rewards(record):
        reward.ClearField("evidence")
    lean = record.SerializeToString()
    return (lean, texts) if _with_evidence(lean, texts) == body else (body, [])


def _with_evidence(lean: bytes, texts: Sequence[str]) -> bytes:
    record = events_pb2.LedgerRecord.FromString(lean)
    for reward, text in zip(_rewards(record), texts, strict=True):
        if text:
            reward.evidence = text
    return record.SerializeToString()


def _rewards(record: events_pb2.LedgerRecord) -> Iterator[types_pb2.Reward]:
    for fact in record.facts:
        for sample in fact.episode_scored.samples if fact.HasField("episode_scored") else ():
            yield from sample.rewards


class SegmentReader:
    """Reads an open segment. Every call raises SegmentDamaged with the `name`, and NewerFormat."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self._name = name
        self.index = self._read_index()

    def records(self, from_seq: int = 1, *, evidence: bool = True) -> Iterator[list[StreamRecord]]:
        """Yield the records from `from_seq` on, block by block. Without `evidence` their payloads lack it, so that they
        do not have the hash in their header."""
        blocks = self.index.blocks
        for block, next_block in zip(blocks, (*blocks[1:], None), strict=True):
            end = next_block.first if next_block is not None else self.index.last + 1
            if end > from_seq:
                found, after = self._read_block(block, evidence=evidence)
                expected = next_block.before if next_block is not None else self.index.after
                if len(found) != end - block.first or after != expected:
                    raise self._damaged(f"the block of record {block.first} has other records than its index says")
                yield [record for record in found if record.seq >= from_seq]

    def _read_index(self) -> Index:
        try:
            size = self._file.seek(0, 2)
            self._file.seek(max(0, size - _TAIL_BYTES))
            tail = self._file.read(_TAIL_BYTES)
            length = int.from_bytes(tail[:4], "little")
            if tail[-len(MAGIC) :] != MAGIC or length > size - _TAIL_BYTES:
                raise self._damaged("it is cut off, or not an archive segment")
            self._file.seek(size - _TAIL_BYTES - length)
            text = self._file.read(length)
            if hashlib.sha256(text).digest() != tail[4 : -len(MAGIC)]:
                raise self._damaged("its index was altered")
            check_format(f"archive segment {self._name}", msgspec.msgpack.decode(text, type=_Format).format, FORMAT)
            index = msgspec.msgpack.decode(text, type=Index)
        except (OSError, *UNDECODABLE) as error:
            raise self._damaged(str(error)) from error
        firsts = [block.first for block in index.blocks]
        if firsts[:1] != [index.first] or any(a >= b for a, b in pairwise((*firsts, index.last + 1))):
            raise self._damaged("the blocks of its index do not have its records in order")
        return index

    def _read_block(self, block: Block, *, evidence: bool) -> tuple[list[StreamRecord], str]:
        """Return the records of a block, and the hash of the last one."""
        try:
            self._file.seek(block.at)
            rows = msgspec.msgpack.decode(_decompressed(self._file.read(block.size)), type=_Columns)
            more: dict[int, list[str]] = {}
            if evidence and block.evidence_size:
                frame = _decompressed(self._file.read(block.evidence_size))
                more = msgspec.msgpack.decode(frame, type=dict[int, list[str]])
            found, previous = [], block.before
            columns = zip(rows.ids, rows.bodies, rows.cuts, rows.hashes, strict=True)
            for at, (record_id, lean, cut, hashed) in enumerate(columns):
                body = _with_evidence(lean, more[at]) if at in more else lean
                payload = _with_previous(body, cut, previous)
                if cut < 0 and events_pb2.LedgerRecord.FromString(body).previous.hex() != previous:
                    raise self._damaged(f"record {block.first + at} does not follow the one before")
                is_lean = bool(hashed) and not evidence
                previous = hashed.hex() if is_lean else record_hash(payload)
                found.append(
                    StreamRecord(seq=block.first + at, payload=payload, msg_id=record_id, headers={CHECKSUM: previous})
                )
            return found, previous
        except (OSError, ValueError, zstandard.ZstdError, DecodeError, *UNDECODABLE) as error:
            raise self._damaged(f"the block of record {block.first} cannot be read: {error}") from error

    def _damaged(self, why: str) -> SegmentDamaged:
        return SegmentDamaged(
            f"archive segment {self._name} is damaged: {why}; copy it from a backup into its folder", path=self._name
        )


def check_segment(file: BinaryIO, name: str) -> Index:
    """Read a whole segment, and return its index. Raises SegmentDamaged, NewerFormat."""
    reader = SegmentReader(file, name)
    for _ in reader.records():
        pass
    return reader.index


class _Format(msgspec.Struct):
    """The part of an index that every release reads."""

    format: int


def _decompressed(frame: bytes) -> bytes:
    if not 0 <= zstandard.frame_content_size(frame) <= FRAME_BYTES_MAX:
        raise ValueError(f"a frame has no size, or more than {FRAME_BYTES_MAX} bytes")
    return zstandard.ZstdDecompressor().decompress(frame)
