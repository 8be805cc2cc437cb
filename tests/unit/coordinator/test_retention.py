"""Kept payloads: the same files are removed with retention, without it, and on a disk that cannot take the copies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollmesh.services.coordinator.config import RunLimits
from rollmesh.services.coordinator.core.core import Core
from rollmesh.services.coordinator.housekeeping import Housekeeper, retained
from rollmesh.services.coordinator.snapshots import SnapshotStore
from rollmesh.shared.bus.bus import UnknownRecord
from rollmesh.shared.bus.payload_bus import PayloadBus, SampleStream
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.clock import SystemClock
from rollmesh.shared.errors import DiskFull
from rollmesh.shared.store.payload_files import PayloadFiles, file_of
from rollmesh.testing.memory_bus import MemoryBus
from rollmesh.v1 import types_pb2

from .core_run import CoreRun

NUM_GROUPS = 16


class Driver:
    """The state of a run that has ended."""

    run = "r"
    purged_below = 0

    def __init__(self) -> None:
        self.core = CoreRun().core
        self.core.state.ended = "STOPPED"
        self.purged_files = set[int]()

    async def read(self, question: Callable[[Core, Any], Any]) -> Any:
        return question(self.core, None)


def key(group: int) -> types_pb2.EpisodeKey:
    return types_pb2.EpisodeKey(run="r", group=f"g{group}", episode=f"g{group}.0")


async def kept(folder: Path, share: float) -> list[int]:
    """Store a payload of each group, purge, and return the groups whose payload is still read."""
    bus = PayloadBus(MemoryBus(), folder / "payloads", write=True, bytes_max=1 << 20)
    samples = await bus.create(run_streams("r").samples)
    at = [
        await samples.append(types_pb2.Episode(key=key(group)).SerializeToString(), msg_id=f"g{group}")
        for group in range(NUM_GROUPS)
    ]
    assert isinstance(samples, SampleStream)
    assert samples.files is not None
    driver: Any = Driver()
    limits, store = RunLimits(retain_share=share), SnapshotStore(folder / "snapshots")
    keeper = Housekeeper(driver, store, samples, clock=SystemClock(), limits=limits, position=0)
    await keeper.purge()
    assert driver.purged_files == set(map(file_of, at))
    assert not driver.purged_files & set(samples.files.sizes())
    found = []
    for group, sequence in enumerate(at):
        try:
            payload = (await samples.read_direct(sequence)).payload
        except UnknownRecord:
            continue
        assert types_pb2.Episode.FromString(payload).key == key(group)
        found.append(group)
    return found


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
async def test_payloads_of_the_share_of_the_groups_are_read_after_their_file_is_removed(
    share: float, tmp_path: Path
) -> None:
    found = await kept(tmp_path, share)
    assert found == [group for group in range(NUM_GROUPS) if retained(key(group), share)]
    lowest, highest = {0.0: (0, 0), 0.5: (1, NUM_GROUPS - 1), 1.0: (NUM_GROUPS, NUM_GROUPS)}[share]
    assert lowest <= len(found) <= highest


async def test_a_full_disk_delays_no_removal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise DiskFull("no space left on the device")

    monkeypatch.setattr(PayloadFiles, "keep", full)
    assert await kept(tmp_path, 1.0) == []
    assert "payloads not kept: run=r" in caplog.text
