"""The entries that a watcher records from states."""

import asyncio
from pathlib import Path
from typing import Literal

import pytest

from rollmesh.app.session import RunStalled, unless_fatal
from rollmesh.app.views.causes import AllFailed
from rollmesh.app.views.series import read_series
from rollmesh.app.views.watch import RECORD_EVERY_S, SILENT_S, RunRecorder, Watcher
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


def recorder(path: Path, clock: ManualClock) -> RunRecorder:
    return RunRecorder(path / "series.jsonl", success_reward="correct", clock=clock)


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
    clock.advance(5000.0)  # the run was not running
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
    seen.miss("no response from the gateway for 300 s")
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
    assert "no response from the gateway at 127.0.0.1:1 for" in seen.now.stalled


async def test_silence_is_reported_within_seconds_and_ends_with_the_next_state(tmp_path: Path) -> None:
    clock = ManualClock()
    seen = recorder(tmp_path, clock)
    async with Watcher("127.0.0.1:1", Access(token="t"), "r", seen, clock):
        async with asyncio.timeout(20):
            while not seen.silent_s:
                await clock.run_for(1.0)
                await asyncio.sleep(0)
    assert seen.silent_s >= SILENT_S
    assert not seen.stalled.is_set()


@pytest.mark.parametrize("on_stall", ["warn", "exit"])
async def test_a_stall_ends_the_work_only_where_the_config_says_so(
    tmp_path: Path, on_stall: Literal["warn", "exit"]
) -> None:
    seen = recorder(tmp_path, ManualClock())
    go = asyncio.Event()

    async def work() -> None:
        await go.wait()

    running = asyncio.create_task(unless_fatal(work(), seen, on_stall))
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
        await unless_fatal(work(), seen, "exit")
    seen.close()


def failing(num: int, *, alike: int | None = None, tokens: int = 0) -> run_pb2.RunState:
    found = state()
    found.policies[0].tokens_generated = tokens
    found.samples.failed = num
    found.samples.reasons["failed/TRIES_EXHAUSTED"] = num
    found.failed_attempts.num = 4 * num
    found.failed_attempts.num_alike = 4 * num if alike is None else alike
    found.failed_attempts.cause = "scorer correct: AttributeError: no `answer`"
    found.failed_attempts.traceback = '  File "scorer.py", line 7, in score'
    return found


def limited(path: Path) -> RunRecorder:
    return RunRecorder(path / "series.jsonl", success_reward="correct", clock=ManualClock(), first_failures_max=8)


async def test_a_session_ends_with_the_users_traceback_when_the_first_samples_all_fail_alike(tmp_path: Path) -> None:
    seen = limited(tmp_path)
    seen.see(failing(7))
    assert not seen.fatal.is_set()
    seen.see(failing(8))
    with pytest.raises(
        AllFailed, match=r"first 8 samples all failed with the same kind of error: scorer correct"
    ) as caught:
        await unless_fatal(asyncio.Event().wait(), seen, "warn")  # type: ignore[arg-type]
    assert 'File "scorer.py", line 7' in str(caught.value)
    seen.close()


@pytest.mark.parametrize(
    "found", [failing(9, alike=3), failing(9, tokens=5)], ids=["failures of many kinds", "a sample was scored"]
)
def test_a_run_that_has_scored_a_sample_or_fails_in_many_ways_continues(
    tmp_path: Path, found: run_pb2.RunState
) -> None:
    seen = limited(tmp_path)
    seen.see(found)
    assert not seen.fatal.is_set()
    seen.close()


def test_scored_samples_whose_groups_all_fail_end_the_session(tmp_path: Path) -> None:
    seen = limited(tmp_path)
    found = failing(8, tokens=5, alike=2)
    found.failed_attempts.num_undecided = 7
    seen.see(found)
    assert not seen.fatal.is_set()
    found.failed_attempts.num_undecided = 8
    seen.see(found)
    assert "last 8 samples all failed in the decision on their group: scorer correct" in str(seen.failure)
    seen.close()


def test_failures_before_this_session_do_not_end_it(tmp_path: Path) -> None:
    before = limited(tmp_path)
    before.see(failing(8))
    before.close()
    seen = limited(tmp_path)
    seen.see(failing(9))
    assert not seen.fatal.is_set()
    seen.see(failing(16))
    assert seen.fatal.is_set()
    seen.close()


def test_what_ended_since_the_newest_update_is_counted_by_reason(tmp_path: Path) -> None:
    seen = recorder(tmp_path, ManualClock())
    for update, filtered in ((0, 16), (1, 20), (1, 52)):
        found = state(update)
        found.samples.reasons["filtered/ZERO_VARIANCE"] = filtered
        seen.see(found)
    assert seen.unused() == {"filtered/ZERO_VARIANCE": 32}
    seen.close()
