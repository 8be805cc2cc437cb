"""The audit of payloads in files: a removed file is purged, as a purged record of a stream is; every other difference
is a finding."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmesh.services.coordinator.audit_payloads import Payloads
from rollmesh.services.coordinator.audit_report import PayloadCounts
from rollmesh.services.coordinator.core import facts as f
from rollmesh.shared.bus.payload_bus import PayloadBus
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.store.payload_files import OFFSET_BITS, PayloadFiles, file_of
from rollmesh.testing.memory_bus import MemoryBus
from rollmesh.v1 import types_pb2

STREAMS = run_streams("r")


class Stored:
    """One episode in a file, and the audit of what the ledger says about it."""

    def __init__(self, folder: Path) -> None:
        self.bus = PayloadBus(MemoryBus(), folder, write=True, bytes_max=1 << 20)
        self.files = PayloadFiles(folder / "r")
        self.findings: list[str] = []
        self.payload = types_pb2.Episode(key=types_pb2.EpisodeKey(group="g", episode="g.0")).SerializeToString()

    async def store(self) -> int:
        log = await self.bus.create(STREAMS.samples)
        return await log.append(self.payload, msg_id="g.0")

    async def audit(self, sequence: int, episode: str = "g.0") -> PayloadCounts:
        payloads = Payloads(lambda check, message, position=None: self.findings.append(message), keep=True)
        ref = f.PayloadRef(sequence=sequence, size_bytes=len(self.payload))
        payloads.enter(f.EpisodeScored(group="g", episode=episode, payload=ref), 1)
        return await payloads.compare(self.bus, STREAMS.samples.name)


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    return Stored(tmp_path)


async def test_a_payload_that_agrees_is_compared(stored: Stored) -> None:
    assert await stored.audit(await stored.store()) == PayloadCounts(compared=1, purged=0)
    assert stored.findings == []


async def test_a_removed_file_counts_as_purged(stored: Stored) -> None:
    at = await stored.store()
    stored.files.remove(file_of(at))
    assert await stored.audit(at) == PayloadCounts(compared=0, purged=1)
    stored.files.remove_all()
    assert await stored.audit(at) == PayloadCounts(compared=0, purged=1)
    assert stored.findings == []


async def test_a_position_that_was_never_written_is_a_finding(stored: Stored) -> None:
    at = await stored.store()
    await stored.audit(at + (1 << OFFSET_BITS))
    await stored.audit(at + 1)
    assert "but the newest file is" in stored.findings[0]
    assert "no record begins at offset 1" in stored.findings[1]
    assert len(stored.findings) == 2


async def test_a_damaged_file_and_another_episode_are_findings(stored: Stored) -> None:
    at = await stored.store()
    await stored.audit(at, episode="g.1")
    (path,) = stored.files.folder.iterdir()
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    await stored.audit(at)
    assert "`episode` must be 'g.1', got 'g.0'" in stored.findings[0]
    assert "another checksum than its header" in stored.findings[1]


async def test_kept_payloads_are_compared_and_the_others_of_their_file_are_purged(stored: Stored) -> None:
    kept, purged = await stored.store(), await stored.store()
    whole = [stored.payload]  # the first of two equal payloads
    stored.files.keep(file_of(kept), lambda payload: bool(whole and whole.pop() == payload))
    stored.files.remove(file_of(kept))
    assert await stored.audit(kept) == PayloadCounts(compared=1, purged=0)
    assert await stored.audit(purged) == PayloadCounts(compared=0, purged=1)
    assert stored.findings == []
