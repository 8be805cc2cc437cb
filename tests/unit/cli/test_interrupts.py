"""Ctrl-C: the first one stops cleanly, the second one exits at once."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from rollmesh.app.interrupts import EXIT_INTERRUPTED, Interrupts, Stopped


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_first_signal_stops_work_and_waits_for_its_clean_up(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_DFL)  # also if the tests run under nohup
    cleaned, noticed = [], []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(True)

    with Interrupts(notice=lambda: noticed.append(True)) as interrupts:
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), number)
        with pytest.raises(Stopped):
            await interrupts.unless_stopped(work())
    assert (cleaned, noticed) == ([True], [True])


async def test_a_hang_up_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup leaves it
    try:
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            assert await interrupts.unless_stopped(asyncio.sleep(0, "done")) == "done"
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_work_that_is_done_gives_its_result_and_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupts() as interrupts:
        assert await interrupts.unless_stopped(asyncio.sleep(0, "done")) == "done"
        assert not interrupts.stop.is_set()
    assert signal.getsignal(signal.SIGINT) is before


async def test_work_begun_after_a_stop_does_not_run_on() -> None:
    with Interrupts() as interrupts:
        interrupts.stop.set()
        with pytest.raises(Stopped):
            await interrupts.unless_stopped(asyncio.Event().wait())


async def test_failure_of_work_passes_through() -> None:
    async def fail() -> None:
        raise RuntimeError("broken")

    with Interrupts() as interrupts, pytest.raises(RuntimeError, match="broken"):
        await interrupts.unless_stopped(fail())


STUCK = """
import asyncio, os, signal, time
from rollmesh.app.interrupts import Interrupts, Stopped
async def main():
    with Interrupts(leave=lambda: print("left", flush=True), notice=lambda: print("noticed", flush=True)) as interrupts:
        asyncio.get_running_loop().call_later(0, os.kill, os.getpid(), signal.SIGINT)
        try:
            await interrupts.unless_stopped(asyncio.Event().wait())
        except Stopped:
            os.kill(os.getpid(), signal.SIGINT)  # while the loop is stuck in what follows
            while True: time.sleep(0.01)
asyncio.run(main())
"""


def test_second_signal_leaves_at_once_even_if_the_loop_is_stuck() -> None:
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == EXIT_INTERRUPTED
    assert done.stdout.split() == ["noticed", "left"]


CHILD = """
import asyncio, os, signal, subprocess, sys, time
from rollmesh.app.interrupts import Interrupts, Stopped
async def main():
    with Interrupts() as interrupts:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        print(child.pid, flush=True)
        interrupts.stop.set()
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
asyncio.run(main())
"""


def test_second_signal_returns_when_the_processes_it_started_are_gone() -> None:
    command = [sys.executable, "-c", CHILD]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=30, check=False)
    assert done.returncode == EXIT_INTERRUPTED
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)
