"""Kept payloads: the same files are removed with retention, without it, and on a disk that cannot take the copies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollmesh.services.coordinator.config import RunLimits
from rollmesh.services.coordinator.core.core import Core
from rollmesh.services.coordinator.core.facts import PayloadRef, Purpose, Task
from rollmesh.services.coordinator.core.state import EpisodeState, EpisodeStatus, GroupState, ReplayEntry
from rollmesh.services.coordinator.housekeeping import Housekeeper, lowest_live, retained
from rollmesh.services.coordinator.snapshots import SnapshotStore
from rollmesh.shared.bus.bus import UnknownRecord
from rollmesh.shared.bus.payload_bus import PayloadBus, SampleStream
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.clock import SystemClock
from rollmesh.shared.errors import DiskFull
from rollmesh.shared.store.payload_files import NoPayloadFile, PayloadFiles, file_of
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
    monkeypatch.setattr(PayloadFiles, "keep", _full)
    assert await kept(tmp_path, 1.0) == []
    assert "payloads not kept: run=r" in caplog.text


async def test_payloads_of_the_replay_log_are_read_until_neither_the_log_nor_a_group_has_them(tmp_path: Path) -> None:
    bus = PayloadBus(MemoryBus(), tmp_path / "payloads", write=True, bytes_max=1 << 20)
    samples = await bus.create(run_streams("r").samples)
    at = [await samples.append(b"payload %d" % number, msg_id=str(number)) for number in range(3)]
    assert isinstance(samples, SampleStream)
    assert samples.files is not None
    driver: Any = Driver()
    state = driver.core.state
    state.ended = "UPDATES_MAX"
    held, replayed = (_entry(f"g{number}", at[number]) for number in (1, 2))
    state.replay.entries = {"g1": held}
    state.groups["r0"] = replayed.group
    store = SnapshotStore(tmp_path / "snapshots")
    keeper = Housekeeper(driver, store, samples, clock=SystemClock(), limits=RunLimits(), position=0)
    await keeper.purge()
    assert [await _read(samples, one) for one in at] == [b"payload 0", b"payload 1", b"payload 2"], "a group is live"
    state.replay.entries["g2"] = replayed
    del state.groups["r0"]
    await keeper.purge()
    assert file_of(at[0]) not in samples.files.sizes()
    assert [await _read(samples, one) for one in at] == [None, b"payload 1", b"payload 2"]
    state.groups["r0"] = replayed.group
    state.replay.entries = {}
    await keeper.purge()
    assert [await _read(samples, one) for one in at] == [None, None, b"payload 2"]
    state.groups.clear()
    await keeper.purge()
    assert await _read(samples, at[2]) is None


async def test_the_copies_of_a_run_that_cannot_be_reopened_are_removed(tmp_path: Path) -> None:
    files, keeper, driver, at = await _logged(tmp_path, 1)
    await keeper.purge()
    assert files.read(at[0]) == b"payload 0"
    driver.core.state.ended = "STOPPED"
    await keeper.purge()
    with pytest.raises(NoPayloadFile):
        files.read(at[0])


async def test_a_payload_of_the_replay_log_that_is_unreadable_delays_no_removal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files, keeper, _, at = await _logged(tmp_path, 2)
    path = files.folder / f"{file_of(at[0]):08d}.payloads"
    path.write_bytes(path.read_bytes().replace(b"payload 0", b"payload ?"))
    await keeper.purge()
    assert file_of(at[0]) not in files.sizes()
    assert files.read(at[1]) == b"payload 1"
    assert "payload of the replay log is lost: run=r" in caplog.text


async def test_a_file_remains_while_the_disk_has_no_room_for_its_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, keeper, _, at = await _logged(tmp_path, 1)
    with monkeypatch.context() as patched:
        patched.setattr(PayloadFiles, "hold", _full)
        await keeper.purge()
        assert file_of(at[0]) in files.sizes()
    await keeper.purge()
    assert file_of(at[0]) not in files.sizes()
    assert files.read(at[0]) == b"payload 0"


def _full(*_: Any, **__: Any) -> None:
    raise DiskFull("no space left on the device")


async def _logged(folder: Path, num: int) -> tuple[PayloadFiles, Housekeeper, Any, list[int]]:
    """Return the files and the housekeeper of a run whose replay log has `num` payloads, and their positions."""
    bus = PayloadBus(MemoryBus(), folder / "payloads", write=True, bytes_max=1 << 20)
    samples = await bus.create(run_streams("r").samples)
    at = [await samples.append(b"payload %d" % number, msg_id=str(number)) for number in range(num)]
    assert isinstance(samples, SampleStream)
    assert samples.files is not None
    driver: Any = Driver()
    driver.core.state.ended = "UPDATES_MAX"
    driver.core.state.replay.entries = {f"g{number}": _entry(f"g{number}", one) for number, one in enumerate(at)}
    store = SnapshotStore(folder / "snapshots")
    keeper = Housekeeper(driver, store, samples, clock=SystemClock(), limits=RunLimits(), position=0)
    return samples.files, keeper, driver, at


def _entry(name: str, sequence: int) -> ReplayEntry:
    episode = EpisodeState(episode=f"{name}.0", status=EpisodeStatus.SCORED, payload=PayloadRef(sequence=sequence))
    group = GroupState(
        group=name, number=0, purpose=Purpose.REPLAY, policy="main", task=Task(task_id="t"), draw=0, update_intended=0,
        step_min=0, incarnation_min=0, episodes={episode.episode: episode},
    )  # fmt: skip
    return ReplayEntry(group=group, sample_ids=(), advantage=0.0)


async def _read(samples: SampleStream, sequence: int) -> bytes | None:
    try:
        return (await samples.read_direct(sequence)).payload
    except UnknownRecord:
        return None


def test_a_stream_is_not_purged_from_the_oldest_payload_of_the_replay_log_on() -> None:
    state = CoreRun().core.state
    state.replay.entries = {"g0": _entry("g0", 7)}
    state.groups["g1"] = _entry("g1", 9).group
    state.replay.entries["g2"] = _entry("g2", 0)  # without a payload
    assert lowest_live(state) == 7
