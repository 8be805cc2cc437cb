"""Files of an earlier release are read, and files of a later one are rejected without a change.

`golden/1.0` holds a run of three updates that the release before protocol 1.1 wrote: ledger records, snapshots of
coordinator and data service, checkpoints of the fake trainer, and a payload file.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest

from rollmesh.services.coordinator import snapshots
from rollmesh.services.coordinator.audit import audit_run
from rollmesh.services.coordinator.core.facts import EpisodeScored, PayloadRef
from rollmesh.services.coordinator.core.state import State
from rollmesh.services.coordinator.fact_codec import decode_record, encode_record
from rollmesh.services.coordinator.ledger import StoredRecord, read_ledger
from rollmesh.services.coordinator.recovery import recover
from rollmesh.services.coordinator.snapshots import SnapshotStore, encode_snapshot, encode_state
from rollmesh.services.data.config import DataConfig
from rollmesh.services.data.node import DataNode
from rollmesh.services.data.snapshots import SnapshotFolder
from rollmesh.services.learner.config import LearnerConfig
from rollmesh.shared.bus.bus import StreamLog
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.domain.formats import NewerFormat
from rollmesh.shared.domain.ledger_head import CHECKSUM, EMPTY, record_hash
from rollmesh.shared.domain.protocol import ProtocolVersion
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.store.payload_files import PayloadFiles
from rollmesh.testing.fake_trainer import FakeTrainer
from rollmesh.testing.memory_bus import MemoryBus
from rollmesh.trainer.checkpoint_files import NewerCheckpoint, list_checkpoints, newest_whole, verify
from rollmesh.v1 import events_pb2, types_pb2

from ..tamper.ledger_copy import read_raw, rechained, store

RUN = "golden"
RELEASES = sorted((Path(__file__).parent / "golden").iterdir())
POOL = {"source": {"name": "calc", "options": {"level_max": 2, "num_train": 32, "num_validation": 8, "num_test": 8}}}
STATE_FIELDS = "fa0d9c9c0e559ab218a11fe96fec318b565bb5f1b24b7f4eebe4799b3a490b6d"
"""Digest of the fields of the coordinator's state in snapshots of the present format."""


@pytest.fixture(params=RELEASES, ids=lambda path: path.name)
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a copy of the files of an earlier release."""
    return Path(shutil.copytree(request.param, tmp_path / "files"))


@pytest.fixture
async def bus(files: Path) -> AsyncIterator[MemoryBus]:
    """Yield a bus with the ledger of an earlier release."""
    made = MemoryBus()
    streams = run_streams(RUN)
    for spec in (streams.samples, streams.dead):
        await made.create(spec)
    ledger = await made.create(streams.ledger)
    for _, record_id, headers, payload in msgpack.unpackb((files / "ledger.msgpack").read_bytes()):
        await ledger.append(payload, msg_id=record_id, headers={CHECKSUM: headers[CHECKSUM]})
    yield made
    await made.close()


async def ledger_of(bus: MemoryBus) -> StreamLog:
    return await bus.open(run_streams(RUN).ledger.name)


async def records_of(bus: MemoryBus) -> list[StoredRecord]:
    return [record async for record in read_ledger(await ledger_of(bus))]


# Older files ----------------------------------------------------------------------------------------------------------


async def test_an_old_ledger_is_folded_and_its_audit_holds(bus: MemoryBus, files: Path) -> None:
    report = await audit_run(bus, RUN, checkpoint=files / "checkpoints")
    assert report.holds, report.to_text()
    assert (report.updates, report.samples.trained) == (3, 12)
    assert report.checkpoint is not None
    assert report.checkpoint.updates == 3


async def test_snapshots_of_an_older_format_are_skipped_for_the_whole_ledger(
    bus: MemoryBus, files: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = await ledger_of(bus)
    folded = await recover(ledger, SnapshotStore(tmp_path / "none"))
    store = SnapshotStore(files / "coordinator")
    recovered = await recover(ledger, store)
    assert recovered.snapshot_position == EMPTY.position
    assert caplog.text.count(f"it has format 1, and this release uses {snapshots.FORMAT}") == 2
    assert encode_state(recovered.state) == encode_state(folded.state)


async def test_old_snapshots_of_the_data_service_are_used(
    bus: MemoryBus, files: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder := tmp_path / "data").mkdir()
    shutil.copytree(files / "data", folder / RUN)
    node = DataNode(
        config_from_dict(DataConfig, POOL),
        node_id="data",
        access=Access(token="t"),
        bus=bus,
        base_dir=tmp_path,
        snapshots=SnapshotFolder(folder),
    )
    async with node:
        with caplog.at_level("INFO"):
            _, position = await node.engine.snapshot(RUN)
    assert position == len(await records_of(bus))
    assert "draws restored: run=golden snapshot=" in caplog.text
    assert "snapshot skipped" not in caplog.text


def test_old_checkpoints_are_whole_and_resumed(files: Path) -> None:
    found = newest_whole(files / "checkpoints")
    assert found is not None
    assert (found.meta.update, found.meta.format, found.passed_by) == (3, 1, ())
    restored = FakeTrainer.open(LearnerConfig(directory=str(files)))
    assert restored.position is not None
    assert (restored.position.update, restored.engine.step) == (3, 3)


async def test_old_payload_files_are_read(bus: MemoryBus, files: Path) -> None:
    payloads, read = PayloadFiles(files / "payloads"), []
    last = payloads.sizes()[4096]
    for record in await records_of(bus):
        for fact in record.facts:
            if isinstance(fact, EpisodeScored) and fact.payload.sequence % (1 << 28) < last:
                episode = types_pb2.Episode.FromString(payloads.read(fact.payload.sequence))
                read.append(episode.key.episode)
                assert read[-1] == fact.episode
    assert len(read) > 10


@pytest.mark.parametrize(
    "protocol",
    [ProtocolVersion(major=1, minor=0), ProtocolVersion(major=1, minor=1), ProtocolVersion(major=2, minor=0)],
)
async def test_tokens_of_other_sources_are_unchecked_in_old_records_and_a_finding_in_present_ones(
    bus: MemoryBus, files: Path, protocol: ProtocolVersion
) -> None:
    """A ledger from before `SampleMeta.external`, of a run that trained tokens of other sources."""
    await bus.delete(run_streams(RUN).samples.name)
    samples = await bus.create(run_streams(RUN).samples)
    records, num = [], 0
    for raw in await read_raw(await ledger_of(bus)):
        old = decode_record(raw.payload)
        facts = []
        for fact in old.facts:
            if isinstance(fact, EpisodeScored) and not num:
                episode = types_pb2.Episode.FromString(PayloadFiles(files / "payloads").read(fact.payload.sequence))
                num += len(episode.samples)
                given = next(one for one in episode.segments if one.source != types_pb2.SEGMENT_SOURCE_POLICY)
                given.loss_mask = b"\1" * (len(given.token_ids) // 4)
                given.source = types_pb2.SEGMENT_SOURCE_DATASET
                payload = episode.SerializeToString()
                ref = PayloadRef(sequence=await samples.append(payload, msg_id="e"), size_bytes=len(payload))
                fact = msgspec.structs.replace(fact, payload=ref)
            facts.append(fact)
        payload = encode_record(old.record_id, old.time_unix_s, facts, old.previous, protocol)
        records.append(replace(raw, payload=payload))
    await bus.delete(run_streams(RUN).ledger.name)
    report = await audit_run(await store(rechained(records), RUN, bus), RUN, payloads=True)
    assert report.payloads is not None
    assert report.payloads.compared == num == 1
    assert report.holds == (protocol < ProtocolVersion(major=1, minor=1)), report.to_text()
    if report.holds:
        unchecked = "an earlier release recorded 1 sample without the trained tokens of other sources, which could not be checked"
        assert unchecked in report.to_text()
    else:
        assert [finding.check for finding in report.findings] == ["payloads"]
        assert "`external` was reported as []" in report.findings[0].message


# Newer files ----------------------------------------------------------------------------------------------------------


async def append_newer(bus: MemoryBus, **fields: Any) -> None:
    """Append a record that is linked correctly, as a later coordinator would."""
    ledger = await ledger_of(bus)
    head = (await records_of(bus))[-1].head
    record = events_pb2.LedgerRecord(record_id="newer", previous=bytes.fromhex(head.hash), **fields)
    payload = record.SerializeToString()
    await ledger.append(payload, msg_id="newer", headers={CHECKSUM: record_hash(payload)})


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"format": 3}, "has format 3, and this release reads formats up to 2"),
        ({"facts": [events_pb2.Fact.FromString(b"\xfa\x7d\x00")]}, "holds a fact that this release does not know"),
    ],
    ids=["format", "fact"],
)
async def test_a_newer_record_stops_the_recovery_and_is_a_finding_of_the_audit(
    bus: MemoryBus, tmp_path: Path, fields: dict[str, Any], what: str
) -> None:
    await append_newer(bus, **fields)
    with pytest.raises(
        NewerFormat, match=rf"RM_golden_LEDGER: record \d+: .*{what}: a later release of rollmesh wrote it"
    ):
        await recover(await ledger_of(bus), SnapshotStore(tmp_path))
    report = await audit_run(bus, RUN)
    assert not report.holds
    assert any(what in finding.message for finding in report.findings), report.to_text()


async def test_a_newer_snapshot_is_skipped_and_stays(
    bus: MemoryBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = await ledger_of(bus)
    folded = await recover(ledger, SnapshotStore(tmp_path / "none"))
    body = msgspec.msgpack.decode(encode_snapshot(folded.state, folded.head))
    body |= {"format": snapshots.FORMAT + 1, "state": {"unlike": "ours"}}
    store = SnapshotStore(tmp_path / "newer")
    store.save(msgspec.msgpack.encode(body), folded.head.position)
    recovered = await recover(ledger, store)
    assert recovered.snapshot_position == EMPTY.position
    assert f"it has format {snapshots.FORMAT + 1}, and this release uses {snapshots.FORMAT}" in caplog.text
    assert len(list((tmp_path / "newer").iterdir())) == 1


def test_a_newer_checkpoint_is_not_set_aside_for_an_older_one(files: Path) -> None:
    newest = list_checkpoints(files / "checkpoints")[-1]
    meta = msgspec.json.decode((newest / "rollmesh.json").read_bytes())
    (newest / "rollmesh.json").write_bytes(msgspec.json.encode(meta | {"format": 2, "files": {"unlike": ["ours"]}}))
    with pytest.raises(NewerCheckpoint, match="has format 2, and this release reads formats up to 1: a later release"):
        verify(newest)
    with pytest.raises(ConfigError, match="a later release of rollmesh wrote it; use that release or a later one"):
        FakeTrainer.open(LearnerConfig(directory=str(files)))
    assert list_checkpoints(files / "checkpoints")[-1] == newest


async def test_a_newer_payload_is_not_taken_for_damage(bus: MemoryBus, files: Path) -> None:
    first = next(fact for record in await records_of(bus) for fact in record.facts if isinstance(fact, EpisodeScored))
    path = files / "payloads" / "00004096.payloads"
    data = path.read_bytes()
    assert data[:4] == b"RMP1"
    path.write_bytes(data.replace(b"RMP1", b"RMP2"))
    with pytest.raises(NewerFormat, match="has format 2, and this release reads formats up to 1"):
        PayloadFiles(path.parent).read(first.payload.sequence)


# The present format ---------------------------------------------------------------------------------------------------


def test_a_change_of_the_state_raises_the_format_of_snapshots() -> None:
    described = "\n".join(_fields(msgspec.inspect.type_info(State), set()))
    assert (snapshots.FORMAT, hashlib.sha256(described.encode()).hexdigest()) == (6, STATE_FIELDS), (
        "the state has other fields: raise FORMAT in snapshots.py, and put both values here"
    )


def _fields(node: Any, seen: set[type]) -> Iterator[str]:
    """Yield a line for each field of the structs below a type."""
    cls: Any = getattr(node, "cls", None)
    if cls is not None and cls in seen:
        return
    if cls is not None:
        seen.add(cls)
    for field in getattr(node, "fields", ()):
        yield f"{cls.__name__}.{field.encode_name}: {_name(field.type)}"
        yield from _fields(field.type, seen)
    for below in _below(node):
        yield from _fields(below, seen)


def _below(node: Any) -> list[Any]:
    found = [getattr(node, name) for name in ("item_type", "key_type", "value_type", "type") if hasattr(node, name)]
    return [*found, *getattr(node, "types", ()), *getattr(node, "item_types", ())]


def _name(node: Any) -> str:
    own = getattr(getattr(node, "cls", None), "__name__", type(node).__name__)
    below = ", ".join(map(_name, _below(node)))
    return f"{own}[{below}]" if below else own
