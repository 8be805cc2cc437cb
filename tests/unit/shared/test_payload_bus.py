"""The bus whose sample streams keep payloads in files: batches of appends, errors, another host, deletion."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollmesh.services.coordinator.run_storage import RunStorage
from rollmesh.shared.bus import payload_bus
from rollmesh.shared.bus.bus import BusUnavailable, StreamFull, StreamSpec, UnknownRecord
from rollmesh.shared.bus.payload_bus import PayloadBus, SampleStream, WrongHost
from rollmesh.shared.bus.payload_writer import PayloadWriter
from rollmesh.shared.bus.run_streams import StreamLimits, run_streams
from rollmesh.shared.errors import DiskFull, InvalidInput
from rollmesh.shared.store.payload_files import PayloadFiles, in_file
from rollmesh.testing.memory_bus import MemoryBus, MemoryStream

STREAMS = run_streams("r")
NAME = STREAMS.samples.name


async def samples_of(bus: PayloadBus) -> SampleStream:
    log = await bus.create(STREAMS.samples)
    assert isinstance(log, SampleStream)
    return log


def files_bus(folder: Path, *, bytes_max: int = 1 << 20) -> PayloadBus:
    return PayloadBus(MemoryBus(), folder, write=True, bytes_max=bytes_max)


async def test_appends_that_wait_are_one_call_and_return_their_positions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    append = PayloadWriter.append

    def counted(self: PayloadWriter, payloads: Sequence[bytes]) -> list[int]:
        calls.append(len(payloads))
        return append(self, payloads)

    monkeypatch.setattr(PayloadWriter, "append", counted)
    log = await samples_of(files_bus(tmp_path))
    payloads = [os.urandom(100 + n) for n in range(64)]
    positions = await asyncio.gather(*(log.append(p, msg_id=f"{n}") for n, p in enumerate(payloads)))
    assert calls == [64]
    assert all(map(in_file, positions))
    assert [(await log.read_direct(at)).payload for at in positions] == payloads
    monkeypatch.setattr(payload_bus, "CALL_BYTES", 250)
    await asyncio.gather(*(log.append(bytes(100), msg_id=f"a{n}") for n in range(5)))
    assert calls == [64, 2, 2, 1]


async def test_an_error_reaches_every_append_of_its_call_and_the_next_one_succeeds(tmp_path: Path) -> None:
    log = await samples_of(files_bus(tmp_path, bytes_max=1000))
    found = await asyncio.gather(*(log.append(bytes(400), msg_id=f"{n}") for n in range(3)), return_exceptions=True)
    assert [type(error) for error in found] == [StreamFull] * 3
    assert in_file(await log.append(bytes(400), msg_id="3"))
    with pytest.raises(InvalidInput, match="msg_id"):
        await log.append(b"x", msg_id="")


async def test_a_cancelled_append_does_not_disturb_the_others_and_close_waits_for_them(tmp_path: Path) -> None:
    bus = files_bus(tmp_path)
    log = await samples_of(bus)
    tasks = [asyncio.create_task(log.append(b"%d" % n, msg_id=f"{n}")) for n in range(3)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await bus.close()
    first, cancelled, last = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(cancelled, asyncio.CancelledError)
    files = PayloadFiles(tmp_path / "r")
    assert isinstance(first, int)
    assert isinstance(last, int)
    assert [files.read(at) for at in (first, last)] == [b"0", b"2"]


async def test_an_append_to_a_disk_that_hangs_ends_at_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = threading.Event()
    append = PayloadWriter.append

    def hanging(self: PayloadWriter, payloads: Sequence[bytes]) -> list[int]:
        assert disk.wait(20)
        return append(self, payloads)

    monkeypatch.setattr(PayloadWriter, "append", hanging)
    bus = files_bus(tmp_path)
    log = await samples_of(bus)
    try:
        patient = asyncio.create_task(log.append(b"patient", msg_id="1"))
        with pytest.raises(BusUnavailable, match=r"within 0\.01 s"):
            await log.append(b"x", msg_id="2", deadline_s=0.01)
        assert not patient.done()
    finally:
        disk.set()
    assert (await log.read(await patient)).payload == b"patient"
    await bus.close()


async def test_both_kinds_are_read_and_a_purged_file_is_an_unknown_record(tmp_path: Path) -> None:
    server = MemoryBus()
    stream = await samples_of(PayloadBus(server, tmp_path, write=False, bytes_max=1 << 20))
    in_stream = await stream.append(b"stream", msg_id="1")
    log = await samples_of(PayloadBus(server, tmp_path, write=True, bytes_max=1 << 20))
    at = await log.append(b"file", msg_id="2")
    assert in_stream == 1
    for reader in (stream, log):
        assert [(await reader.read(seq)).payload for seq in (in_stream, at)] == [b"stream", b"file"]
    elsewhere = await samples_of(PayloadBus(server, None, write=False, bytes_max=1 << 20))
    assert (await elsewhere.read_direct(in_stream)).payload == b"stream"
    with pytest.raises(WrongHost, match="gateway there"):
        await elsewhere.read_direct(at)
    for number in PayloadFiles(tmp_path / "r").sizes():
        PayloadFiles(tmp_path / "r").remove(number)
    with pytest.raises(UnknownRecord):
        await log.read(at)


async def test_the_folder_of_a_run_is_private_and_removed_with_its_stream(tmp_path: Path) -> None:
    bus = files_bus(tmp_path / "payloads")
    log = await samples_of(bus)
    await (await bus.create(STREAMS.ledger)).append(b"created", msg_id="1")
    await log.append(b"x", msg_id="1")
    folder = tmp_path / "payloads" / "r"
    assert folder.stat().st_mode & 0o777 == 0o700
    await bus.delete(NAME)
    assert not folder.exists()
    assert await bus.names() == [STREAMS.ledger.name]
    await bus.close()


async def test_a_run_that_cannot_be_made_removes_no_payloads_of_the_same_run_on_another_nats(tmp_path: Path) -> None:
    at = await (await samples_of(files_bus(tmp_path / "payloads"))).append(b"kept", msg_id="1")

    class FullBus(MemoryBus):
        full = ""

        async def create(self, spec: StreamSpec) -> MemoryStream:
            if spec.name == self.full:
                raise DiskFull("no room")
            return await super().create(spec)

    for run, has_files in (("r", True), ("other", False)):
        for full in (run_streams(run).ledger.name, run_streams(run).dead.name):
            server = FullBus()
            server.full = full
            bus = PayloadBus(server, tmp_path / "payloads", write=True, bytes_max=1 << 20)
            with pytest.raises(DiskFull):
                await RunStorage(bus, tmp_path / "runs", StreamLimits()).make(run)
            assert await bus.names() == []
            assert (tmp_path / "payloads" / run).exists() is has_files
    assert PayloadFiles(tmp_path / "payloads" / "r").read(at) == b"kept"
