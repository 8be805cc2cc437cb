"""The chain of ledger records: damage, and differences from heads stored elsewhere, are found at their record by
recovery and audit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rollmesh.services.coordinator.audit import audit_run
from rollmesh.services.coordinator.audit_chain import StoredHead
from rollmesh.services.coordinator.audit_report import AuditReport
from rollmesh.services.coordinator.fact_codec import decode_record, encode_record
from rollmesh.services.coordinator.ledger import read_ledger
from rollmesh.services.coordinator.recovery import recover
from rollmesh.services.coordinator.snapshots import SnapshotStore, encode_snapshot
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.domain.ledger_head import LedgerHead, record_hash
from rollmesh.shared.errors import DataLoss, InvalidInput
from rollmesh.testing.memory_bus import MemoryBus
from tests.tamper.ledger_copy import RawRecord, made, rechained, sealed, store

from .core_run import CoreRun

LEDGER = run_streams("r").ledger.name
Tamper = Callable[[list[RawRecord]], list[RawRecord]]


def whole() -> list[RawRecord]:
    run = CoreRun()
    run.begin()
    run.checkpoint(1, run.train(1))
    run.publish(1)
    run.train(2)
    return made(record.facts for record in run.records)


def head(records: list[RawRecord], position: int) -> LedgerHead:
    return LedgerHead(position=position, hash=record_hash(records[position - 1].payload))


def newest(records: list[RawRecord]) -> StoredHead:
    return StoredHead("a checkpoint", head(records, len(records)))


def flip(records: list[RawRecord]) -> list[RawRecord]:
    damaged = bytearray(records[2].payload)
    damaged[-1] ^= 1
    return [*records[:2], replace(records[2], payload=bytes(damaged)), *records[3:]]


def at_another_time(raw: RawRecord) -> RawRecord:
    """Return a change that violates no claim except the chain's."""
    old = decode_record(raw.payload)
    return sealed(replace(raw, payload=encode_record(old.record_id, old.time_unix_s + 1, old.facts, old.previous)))


DAMAGES: dict[str, tuple[Tamper, str]] = {
    "a flipped bit": (flip, "record 3 is damaged"),
    "garbage": (lambda r: [*r[:2], sealed(replace(r[2], payload=b"\xff\xff")), *r[3:]], "record 3 cannot be read"),
    "no checksum": (lambda r: [*r[:2], replace(r[2], headers={}), *r[3:]], "record 3 has no Sha256 header"),
    "dropped": (lambda r: [*r[:2], *r[3:]], "record 3 does not follow record 2"),
    "swapped": (lambda r: [*r[:2], r[3], r[2], *r[4:]], "record 3 does not follow record 2"),
    "duplicated": (lambda r: [*r[:3], replace(r[2], msg_id="again"), *r[3:]], "record 4 does not follow record 3"),
    "altered and sealed": (lambda r: [*r[:2], at_another_time(r[2]), *r[3:]], "record 4 does not follow record 3"),
    "another message id": (lambda r: [*r[:2], replace(r[2], msg_id="x"), *r[3:]], "record 3 has the message id 'x'"),
    "the first dropped": (lambda r: r[1:], "record 1 does not follow record 0"),
}


@pytest.mark.parametrize("kind", DAMAGES)
async def test_damage_is_found_at_its_record_by_audit_and_recovery(kind: str, tmp_path: Path) -> None:
    tamper, message = DAMAGES[kind]
    bus = await store(tamper(whole()))
    report = await audit_run(bus, "r")
    assert not report.holds
    first = report.findings[0]
    assert (first.check, message in first.message, bool(first.remedy)) == ("chain", True, True), report.to_text()
    with pytest.raises(DataLoss, match=message):
        await recover(await bus.open(LEDGER), SnapshotStore(tmp_path))


async def test_every_damaged_record_is_reported() -> None:
    records = whole()
    for at in (2, 5):
        records[at] = replace(records[at], headers={})
    report = await audit_run(await store(records), "r")
    assert [finding.position for finding in report.findings] == [3, 6]


async def audited(records: list[RawRecord], *heads: StoredHead) -> AuditReport:
    return await audit_run(await store(records), "r", heads=heads)


async def test_an_untouched_ledger_contains_every_head_of_it() -> None:
    records = whole()
    heads = [StoredHead(f"head {n}", head(records, n)) for n in (1, 4, len(records), 4)]
    report = await audited(records, *heads)
    assert report.holds, report.to_text()
    assert [line.position for line in report.heads] == [1, 4, 4, len(records)]
    assert f"4 stored heads, up to record {len(records)}" in report.to_text()
    assert report.head == str(newest(records).head)


@pytest.mark.parametrize("num_cut", [1, 2, 7])
async def test_a_cut_tail_is_found_up_to_the_newest_stored_head(num_cut: int) -> None:
    records = whole()
    cut = records[:-num_cut]
    assert (await audited(cut)).holds, "nothing in the ledger itself says how long it was"
    assert (await audited(cut, StoredHead("older", head(records, len(cut))))).holds
    report = await audited(cut, newest(records))
    assert [finding.check for finding in report.findings] == ["chain"]
    assert f"ends at record {len(cut)}, but a checkpoint holds the hash of record {len(records)}" in report.to_text()


REWRITES: dict[str, Tamper] = {
    "times": lambda r: [at_another_time(raw) for raw in r],
    "one time": lambda r: [at_another_time(r[0]), *r[1:]],
    "a record more": lambda r: [*r[:-1], at_another_time(replace(r[-1])), r[-1]],
    "the last replaced": lambda r: [*r[:-1], at_another_time(r[-1])],
}


@pytest.mark.parametrize("kind", REWRITES)
async def test_a_rewritten_ledger_with_a_recomputed_chain_differs_from_a_stored_head(kind: str) -> None:
    records = whole()
    report = await audited(rechained(REWRITES[kind](records)), newest(records))
    assert any(f.check == "chain" and "altered, removed, inserted or moved" in f.message for f in report.findings)


async def test_a_repeated_record_id_is_found() -> None:
    records = whole()
    first, last = decode_record(records[0].payload), decode_record(records[-1].payload)
    again = encode_record(first.record_id, last.time_unix_s, last.facts, last.previous)
    bus = MemoryBus()
    log = await bus.create(run_streams("r").ledger)
    await store(records[:-1], bus=bus)
    log._seen.clear()
    await log.append(again, msg_id=first.record_id, headers=sealed(RawRecord(payload=again, msg_id="")).headers)
    report = await audit_run(bus, "r")
    assert [(f.check, f.position) for f in report.findings] == [("ledger", len(records))], report.to_text()


async def test_a_time_that_goes_back_is_a_warning() -> None:
    records = whole()
    late = decode_record(records[3].payload)
    records[3] = replace(
        records[3], payload=encode_record(late.record_id, late.time_unix_s + 60.0, late.facts, late.previous)
    )
    report = await audited(rechained(records))
    assert report.holds
    assert [warning.position for warning in report.warnings] == [5]
    assert "wall clock was set back" in report.to_text()


@pytest.mark.parametrize("removed", [{1, 2}, {4}, {4, 5, 9}], ids=str)
async def test_records_removed_from_the_stream_are_named(removed: set[int]) -> None:
    records = whole()
    bus = await store(records)
    log = await bus.create(run_streams("r").ledger)
    removed = {len(records) if seq == 9 else seq for seq in removed}
    for seq in removed:
        del log._records[seq]
    stored = [StoredHead("a gateway", head(records, min(removed)))]
    report = await audit_run(bus, "r", heads=stored)
    assert f"{LEDGER} lacks record" in report.findings[0].message
    assert any("whose hash a gateway holds" in finding.message for finding in report.findings)
    with pytest.raises(DataLoss, match=f"lacks records? {min(removed)}"):
        [record async for record in read_ledger(log)]


async def test_the_last_record_removed_is_found_by_audit_and_recovery(tmp_path: Path) -> None:
    records = whole()
    bus = await store(records)
    log = await bus.create(run_streams("r").ledger)
    del log._records[len(records)]
    report = await audit_run(bus, "r")
    assert [finding.position for finding in report.findings] == [len(records)]
    with pytest.raises(DataLoss, match=f"lacks record {len(records)}"):
        await recover(log, SnapshotStore(tmp_path))


async def test_recovery_from_a_snapshot_continues_the_chain(tmp_path: Path) -> None:
    records = whole()
    bus = await store(records)
    log = await bus.open(LEDGER)
    folded = await recover(log, SnapshotStore(tmp_path))
    assert folded.head == head(records, len(records))
    at = 4
    part = await recover(await (await store(records[:at])).open(LEDGER), SnapshotStore(tmp_path))
    SnapshotStore(tmp_path).save(encode_snapshot(part.state, part.head), at)
    again = await recover(log, SnapshotStore(tmp_path))
    assert (again.snapshot_position, again.head, again.state) == (at, folded.head, folded.state)
    forged = replace(records[at], payload=at_another_time(records[at]).payload)
    broken = await store([*records[:at], sealed(forged), *records[at + 1 :]])
    with pytest.raises(DataLoss, match=f"record {at + 2} does not follow"):
        await recover(await broken.open(LEDGER), SnapshotStore(tmp_path))


@pytest.mark.parametrize(
    "text", ["", "17", "17:", "0:" + "a" * 64, "17:" + "A" * 64, "x:" + "a" * 64, "-1:" + "a" * 64]
)
def test_a_head_is_a_position_and_a_hash(text: str) -> None:
    with pytest.raises(InvalidInput, match="`head` must be POSITION:HASH"):
        LedgerHead.parse(text)
    known = LedgerHead(position=17, hash="ab" * 32)
    assert LedgerHead.parse(str(known)) == known
