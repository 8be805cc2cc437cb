"""What a watcher keeps of the states it is shown."""

import asyncio
from pathlib import Path
from typing import Literal

import pytest

from rollmesh.services.cli.series import read_series
from rollmesh.services.cli.stall import RunStalled, unless_stalled
from rollmesh.services.cli.watch import RECORD_EVERY_S, Recorder, Watcher
from rollmesh.shared.clock import ManualClock
from rollmesh.shared.errors import Unavailable
from rollmesh.shared.rpc.access import Access
from rollmesh.v1 import run_pb2


def state(update: int = 0, *, evals: list[run_pb2.EvalResult] | None = None, ended: str = "") -> run_pb2.RunState:
    policy = run_pb2.PolicyState(
        policy="main", applied_step=update, published_step=update, tokens_generated=10 * update
    )
    return run_pb2.RunState(run="r", policies=[policy], evals=evals or [], ended=ended)


def result(step: int, correct: float, *, complete: bool = True) -> run_pb2.EvalResult:
    return run_pb2.EvalResult(step=step, num_samples=8, mean_rewards={"correct": correct}, complete=complete)


def recorder(path: Path, clock: ManualClock) -> Recorder:
    return Recorder(path / "series.jsonl", success_reward="correct", clock=clock)


def test_recorder_keeps_each_update_and_otherwise_a_point_now_and_then(tmp_path: Path) -> None:
    clock = ManualClock()
    seen = recorder(tmp_path, clock)
    for update, wait_s in ((0, 0.5), (0, 0.5), (1, 0.5), (1, RECORD_EVERY_S), (1, 0.5)):
        clock.advance(wait_s)
        seen.see(state(update))
    assert [p.update for p in seen.series.points] == [0, 1, 1]
    assert seen.now.time_s > seen.series.last.time_s
    seen.close()
    assert read_series(tmp_path / "series.jsonl").last == seen.now


def test_recorder_takes_an_evaluation_once_and_only_when_it_is_complete(tmp_path: Path) -> None:
    seen = recorder(tmp_path, ManualClock())
    seen.see(state(evals=[result(0, 0.2, complete=False)]))
    assert not seen.series.evals
    seen.see(state(evals=[result(0, 0.5)]))
    seen.see(state(1, evals=[result(0, 0.5)]))
    assert [(e.step, e.success, e.complete) for e in seen.series.evals] == [(0, 0.5, True)]
    seen.close()


def test_recorder_keeps_an_evaluation_that_was_given_up_as_incomplete(tmp_path: Path) -> None:
    seen = recorder(tmp_path, ManualClock())
    last = state(evals=[result(0, 0.25, complete=False)], ended="UPDATES_MAX")
    seen.see(last)
    assert seen.ended.is_set()
    seen.close(last)
    assert [(e.success, e.complete) for e in read_series(tmp_path / "series.jsonl").evals] == [(0.25, False)]


def test_recorder_goes_on_in_running_time_where_an_interrupted_run_stopped(tmp_path: Path) -> None:
    clock = ManualClock()
    first = recorder(tmp_path, clock)
    clock.advance(40.0)
    first.see(state(3, evals=[result(0, 0.5)]))
    first.close()
    clock.advance(5000.0)  # nobody was running
    second = recorder(tmp_path, clock)
    clock.advance(2.0)
    second.see(state(4, evals=[result(0, 0.5)]))
    second.close()
    series = read_series(tmp_path / "series.jsonl")
    assert [(p.update, p.time_s) for p in series.points] == [(3, 40.0), (4, 42.0)]
    assert len(series.evals) == 1


def stalled_state(cause: str) -> run_pb2.RunState:
    found = state()
    found.stalled = cause
    return found


def test_recorder_knows_whether_the_run_stands_still_and_why(tmp_path: Path) -> None:
    seen = recorder(tmp_path, ManualClock())
    for cause in ("inference-0 silent for 42 s", ""):
        seen.see(stalled_state(cause))
        assert (seen.stalled.is_set(), seen.now.stalled) == (bool(cause), cause)
    seen.miss("the gateway has told nothing for 300 s")
    assert seen.stalled.is_set()
    seen.see(state())
    assert not seen.stalled.is_set()
    seen.close()


async def test_a_gateway_that_never_answers_is_a_stall_of_its_own(tmp_path: Path) -> None:
    clock = ManualClock()
    seen = recorder(tmp_path, clock)
    access = Access(token="t")
    async with Watcher("127.0.0.1:1", access, "r", seen, clock, stall_s=0.5):
        async with asyncio.timeout(20):
            while not seen.stalled.is_set():
                await clock.run_for(0.1)
                await asyncio.sleep(0)
    assert "the gateway at 127.0.0.1:1 has told nothing for" in seen.now.stalled


@pytest.mark.parametrize("on_stall", ["warn", "exit"])
async def test_a_stall_ends_the_work_only_where_the_config_says_so(
    tmp_path: Path, on_stall: Literal["warn", "exit"]
) -> None:
    seen = recorder(tmp_path, ManualClock())
    go = asyncio.Event()

    async def work() -> None:
        await go.wait()

    running = asyncio.create_task(unless_stalled(work(), seen, on_stall))
    await asyncio.sleep(0)
    seen.see(stalled_state("sandbox-0 silent for 9 s"))
    await asyncio.sleep(0)
    if on_stall == "exit":
        with pytest.raises(RunStalled, match="sandbox-0 silent for 9 s"):
            await running
    else:
        go.set()
        await running
    seen.close()


async def test_a_failure_of_the_work_passes_through(tmp_path: Path) -> None:
    seen = recorder(tmp_path, ManualClock())

    async def work() -> None:
        raise Unavailable("gone")

    with pytest.raises(Unavailable):
        await unless_stalled(work(), seen, "exit")
    seen.close()
