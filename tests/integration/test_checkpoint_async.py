"""Checkpoints that are written while the next update is computed."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from rollmesh.services.learner.config import LearnerConfig
from rollmesh.services.learner.engine import Position, Restored
from rollmesh.shared.errors import DiskFull, Fenced
from rollmesh.testing.fake_trainer import FakeTrainer
from rollmesh.trainer.checkpoint_files import list_checkpoints
from rollmesh.trainer.config import ComputeConfig
from rollmesh.trainer.trained_log import TrainedLog

from .learner_world import LIMIT_S, RunningWorld
from .test_learner import Killed, check_once, config, learner, straight_weights, train, weights

Write = Callable[[int, Callable[[], Path]], Path]
"""Writes the copy of an update; gets the function of the engine that does."""


def opener(write: Write, opened: Callable[[], None] = lambda: None) -> Callable[[LearnerConfig], Restored]:
    """Return a function that calls `opened` and opens a trainer whose copies are written by `write`."""

    class Held(FakeTrainer):
        def copy_to_save(self, log: TrainedLog, position: Position, *, data_snapshot: bytes) -> Callable[[], Path]:
            really = super().copy_to_save(log, position, data_snapshot=data_snapshot)
            return lambda: write(position.update, really)

    def open_engine(config: LearnerConfig) -> Restored:
        opened()
        return Held.open(config)

    return open_engine


def settings_of(folder: Path) -> LearnerConfig:
    return replace(config(folder), checkpoint_async=True)


async def test_updates_continue_while_a_checkpoint_is_written_and_it_counts_once_it_is_durable(tmp_path: Path) -> None:
    began, release = threading.Event(), threading.Event()
    writing: list[int] = []

    def write(update: int, really: Callable[[], Path]) -> Path:
        writing.append(update)
        began.set()
        assert release.wait(LIMIT_S)
        return really()

    settings = settings_of(tmp_path)
    async with straight_weights(tmp_path) as expected, RunningWorld(tmp_path) as running:
        world = running.world
        async with learner(running, settings, open_engine=opener(write)) as node, asyncio.timeout(LIMIT_S):
            try:
                await world.until(lambda: world.step == 4)
                assert await asyncio.to_thread(began.wait, LIMIT_S)
                assert writing == [2], "one copy at a time"
                assert (world.checkpoint, node.progress.checkpoint_update) == (0, 0)
                assert list_checkpoints(settings.checkpoints) == []
            finally:
                release.set()
            await node.wait()
        assert world.calls["ReportCheckpoint"] == 3  # 2, 4 and the last
        assert writing == [2, 4, 5]
        check_once(world, settings)
        assert weights(world, (5, 0)) == expected


@pytest.mark.parametrize("killed_at", [2, 4, 5])
async def test_a_learner_killed_between_copy_and_write_resumes_from_the_checkpoint_before(
    tmp_path: Path, killed_at: int
) -> None:
    def write(update: int, really: Callable[[], Path]) -> Path:
        if update == killed_at:
            raise Killed
        return really()

    settings = settings_of(tmp_path)
    async with straight_weights(tmp_path) as expected, RunningWorld(tmp_path) as running:
        with pytest.raises(Killed):
            await train(running, settings, open_engine=opener(write))
        before = [
            int(path.name.removeprefix("update-").partition(".")[0]) for path in list_checkpoints(settings.checkpoints)
        ]
        assert before == [k for k in (2, 4) if k < killed_at]
        assert running.world.checkpoint == max(before, default=0)
        await train(running, settings)
        check_once(running.world, settings)
        assert weights(running.world, (5, running.world.incarnation)) == expected


async def test_a_session_that_is_lost_during_a_write_waits_for_it_and_the_next_one_resumes_from_it(
    tmp_path: Path,
) -> None:
    lost = threading.Event()
    writing: list[int] = []
    found: list[tuple[list[int], list[str]]] = []

    def write(update: int, really: Callable[[], Path]) -> Path:
        writing.append(update)
        assert lost.wait(LIMIT_S)
        path = really()
        writing.remove(update)
        return path

    settings = settings_of(tmp_path)

    def opened() -> None:
        found.append((list(writing), [path.name for path in list_checkpoints(settings.checkpoints)]))

    async with straight_weights(tmp_path) as expected, RunningWorld(tmp_path) as running:
        world = running.world
        async with (
            learner(running, settings, open_engine=opener(write, opened)) as node,
            asyncio.timeout(LIMIT_S),
        ):
            try:
                await world.until(lambda: world.step == 2)
                world.faults.refuse["CommitUpdate"] = [Fenced("another one")]
                await world.until(lambda: not world.faults.refuse["CommitUpdate"])
            finally:
                lost.set()
            await node.wait()
        assert found == [([], []), ([], ["update-00000002.0"])], "no trainer opens while a checkpoint is written"
        check_once(world, settings)
        assert weights(world, (5, world.incarnation)) == expected


async def test_an_error_of_a_write_that_ends_after_its_session_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lost = threading.Event()

    def write(update: int, really: Callable[[], Path]) -> Path:
        if not lost.is_set():
            assert lost.wait(LIMIT_S)
            raise ValueError("the folder is gone")
        return really()

    settings = settings_of(tmp_path)
    async with straight_weights(tmp_path) as expected, RunningWorld(tmp_path) as running:
        world = running.world
        async with learner(running, settings, open_engine=opener(write)) as node, asyncio.timeout(LIMIT_S):
            try:
                await world.until(lambda: world.step == 2)
                world.faults.refuse["CommitUpdate"] = [Fenced("another one")]
                await world.until(lambda: not world.faults.refuse["CommitUpdate"])
            finally:
                lost.set()
            await node.wait()
        assert "a checkpoint could not be written or reported: the folder is gone" in caplog.text
        check_once(world, settings)
        assert weights(world, (5, world.incarnation)) == expected


async def test_a_full_disk_ends_the_learner(tmp_path: Path) -> None:
    def write(update: int, really: Callable[[], Path]) -> Path:
        raise OSError(errno.ENOSPC, "no space left on device")

    async with RunningWorld(tmp_path) as running:
        with pytest.raises(DiskFull):
            await train(running, settings_of(tmp_path), open_engine=opener(write))
        assert running.world.checkpoint == 0


def test_several_ranks_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"`checkpoint_async` must be false with compute\.ranks = 2"):
        LearnerConfig(checkpoint_async=True, compute=ComputeConfig(ranks=2))
