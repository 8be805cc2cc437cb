"""One process under supervision: what its end means, how it is stopped, and what is kept of its words."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from rollmesh.mesh.child import Child, ProcessGaveUp
from rollmesh.mesh.child_log import ChildLog
from rollmesh.mesh.process_events import FILE, ProcessEvent, ProcessLog, read_process_events
from rollmesh.mesh.restarts import ProcessesConfig, Restarts
from rollmesh.shared.clock import ManualClock, SystemClock
from rollmesh.shared.errors import ConfigError, DiskFull

LIMIT_S = 60.0
READY = "open('ready', 'w').close()"
SLEEP = f"import signal, time; {READY}; time.sleep(600)"
DEAF = f"import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); {READY}; time.sleep(600)"
ORDERLY = f"""
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
{READY}
time.sleep(600)
"""


@dataclass
class Ward:
    """A child that runs `code` in a separate folder."""

    folder: Path
    child: Child
    task: asyncio.Task[None]

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline_s, read_process_events(self.folder / FILE)
            assert not self.task.done() or condition(), self.task
            await asyncio.sleep(0.01)

    async def ready(self) -> int:
        await self.until((self.folder / "ready").exists)
        assert self.child.pid is not None
        return self.child.pid

    async def ended(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            await self.task

    @property
    def story(self) -> list[str]:
        return [event.what for event in read_process_events(self.folder / FILE)]


def ward(folder: Path, code: str, *, clock: ManualClock | None = None, **config: float) -> Ward:
    settings = ProcessesConfig(**config)  # type: ignore[arg-type]
    used = clock or SystemClock()
    child = Child(
        "part",
        [sys.executable, "-S", "-c", f"import os; os.chdir({str(folder)!r})\n{code}"],
        environment=os.environ,
        config=settings,
        log=ChildLog(folder / "part.log", bytes_max=settings.log_bytes_max),
        events=ProcessLog(folder / FILE, clock=used),
        clock=used,
    )
    return Ward(folder, child, asyncio.create_task(child.run()))


async def test_an_end_in_good_order_is_final(tmp_path: Path) -> None:
    made = ward(tmp_path, "print('done')")
    await made.ended()
    assert made.story == ["started", "ended"]
    assert (tmp_path / "part.log").read_text() == "done\n"


async def test_a_config_error_is_reported_in_the_words_of_the_process_and_not_tried_again(tmp_path: Path) -> None:
    made = ward(tmp_path, "import sys; print('error: run.seed: no\\n  and more'); sys.exit(2)")
    with pytest.raises(ConfigError, match=r"^run\.seed: no\n  and more$"):
        await made.ended()
    assert made.story == ["started", "ended"]


async def test_a_full_disk_is_reported_in_the_words_of_the_process_and_not_tried_again(tmp_path: Path) -> None:
    made = ward(tmp_path, "import sys; print('error: /runs: no space left'); sys.exit(3)")
    with pytest.raises(DiskFull, match=r"^/runs: no space left$"):
        await made.ended()
    assert made.story == ["started", "ended"]


async def test_a_process_that_dies_too_often_is_given_up_with_the_end_of_its_log(tmp_path: Path) -> None:
    made = ward(tmp_path, "print('no disk'); raise SystemExit(1)", restarts_max=2, backoff_s=0.01)
    with pytest.raises(ProcessGaveUp, match=r"(?s)part ended with exit code 1: more than restarts_max = 2 .*no disk$"):
        await made.ended()
    assert made.story == ["started", "ended", "restarting"] * 2 + ["started", "ended", "gave_up"]


async def test_a_killed_process_is_started_again_after_its_pause(tmp_path: Path) -> None:
    clock = ManualClock()
    made = ward(tmp_path, ORDERLY, clock=clock)
    first = await made.ready()
    (tmp_path / "ready").unlink()
    made.child.kill()
    await made.until(lambda: clock.num_sleepers() > 0)
    event = read_process_events(tmp_path / FILE)[-1]
    assert event.text() == "part was ended by SIGKILL; restarts in 0.2 s (restart 1)"
    clock.advance(0.2)
    assert await made.ready() != first
    made.child.stop()
    await made.ended()


@pytest.mark.parametrize("stopped", [False, True])
async def test_a_stop_is_orderly_even_for_a_process_that_stands_still(tmp_path: Path, stopped: bool) -> None:
    made = ward(tmp_path, ORDERLY)
    pid = await made.ready()
    if stopped:
        os.kill(pid, signal.SIGSTOP)
    made.child.stop()
    await made.ended()
    assert read_process_events(tmp_path / FILE)[-1].code == 143


async def test_a_process_that_does_not_stop_is_killed(tmp_path: Path) -> None:
    made = ward(tmp_path, DEAF, stop_s=0.1)
    await made.ready()
    made.child.stop()
    await made.ended()
    assert read_process_events(tmp_path / FILE)[-1].code == -signal.SIGKILL


async def test_a_cancelled_life_leaves_no_process(tmp_path: Path) -> None:
    made = ward(tmp_path, SLEEP)
    pid = await made.ready()
    made.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await made.ended()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_stop_does_not_wait_for_a_pause(tmp_path: Path) -> None:
    clock = ManualClock()
    made = ward(tmp_path, "raise SystemExit(1)", clock=clock)
    await made.until(lambda: clock.num_sleepers() > 0)
    made.child.stop()
    await made.ended()


def test_pauses_double_within_the_window_and_begin_again_after_it() -> None:
    clock = ManualClock()
    restarts = Restarts(ProcessesConfig(restarts_max=4, window_s=60.0, backoff_s=1.0, backoff_s_max=3.0), clock)
    assert [restarts.next_pause_s() for _ in range(5)] == [1.0, 2.0, 3.0, 3.0, None]
    clock.advance(60.1)
    assert restarts.next_pause_s() == 1.0


@pytest.mark.parametrize(
    "wrong",
    [{"restarts_max": -1}, {"window_s": 0.0}, {"backoff_s_max": 0.1}, {"log_bytes_max": 10}, {"stop_s": 0.0}],
)
def test_a_section_that_cannot_work_is_refused_with_the_field_and_its_value(wrong: dict[str, float]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"`{name}` must be .*got {value}"):
        ProcessesConfig(**wrong)  # type: ignore[arg-type]


def test_a_log_is_cut_to_its_newest_lines_while_it_is_written_to(tmp_path: Path) -> None:
    log = ChildLog(tmp_path / "part.log", bytes_max=4096)
    with log.open() as file:
        for number in range(1000):
            file.write(b"line %d\n" % number)
        file.flush()
        log.trim()
        file.write(b"error: the last one\n")
        file.flush()
        lines = log.path.read_text().splitlines()
    assert lines[-2:] == ["line 999", "error: the last one"]
    assert log.path.stat().st_size <= 2048 + 20
    assert log.last_error() == "the last one"


def test_the_reason_of_an_end_is_not_taken_from_an_earlier_life(tmp_path: Path) -> None:
    log = ChildLog(tmp_path / "part.log", bytes_max=4096)
    with log.open() as file:
        file.write(b"error: old\n")
    with log.open() as file:
        file.write(b"killed in the middle of a line")
    assert log.last_error() == ""
    assert log.tail() == "killed in the middle of a line"


def test_a_last_event_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / FILE
    path.write_bytes(b'{"time_s":1.0,"process":"a","what":"started","pid":3}\n{"time_s":2.0,"proc')
    assert [event.pid for event in read_process_events(path)] == [3]
    events = ProcessLog(path, clock=ManualClock())
    events.add(ProcessEvent(time_s=3.0, process="a", what="started", pid=4))
    assert [event.pid for event in read_process_events(path)] == [3, 4]
