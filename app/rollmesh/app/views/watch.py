"""Watch a run as an ordinary client of RunService, and record its states.

It retries while the gateway is unavailable, because watching must not end a run. Collaborators: `series` (the recorded
entries).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from rollmesh.app.views.causes import AllFailed, refuse_if_all_failed
from rollmesh.app.views.series import Eval, Point, Series, encode_line, read_series
from rollmesh.shared.clock import Clock
from rollmesh.shared.domain.ledger_head import LedgerHead
from rollmesh.shared.errors import MeshError
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.v1 import run_pb2, run_pb2_grpc

_log = logging.getLogger(__name__)
METRICS_NAME = "metrics.jsonl"

RECORD_EVERY_S = 2.0
"""A point is recorded this often between updates, so that a stalled run is visible."""
SILENT_S = 5.0
"""After this time without a state, the watcher calls GetRun; without a response, it reports the silence to the
recorder."""
_BACKOFF_S = 0.2
_REFRESH_S_MAX = 10.0


class RunRecorder:
    """Converts states to entries of a series, in memory and in a file."""

    def __init__(
        self,
        path: Path,
        *,
        success_reward: str,
        clock: Clock,
        on_state: Callable[[Series], None] = lambda _: None,
        on_eval: Callable[[Eval], None] = lambda _: None,
        first_failures_max: int = 0,
    ) -> None:
        """Append to the series in `path` if it exists. `first_failures_max`: as in RunConfig. Raises ConfigError if it
        is damaged."""
        self.folder = path.parent
        self.series = read_series(path)
        self.now = self.series.last
        """The newest state, recorded or not."""
        self.seen = asyncio.Event()
        """Set with the first state: the gateway responds."""
        self.ended = asyncio.Event()
        """Set when the run has ended."""
        self.stalled = asyncio.Event()
        """Set while the run is stalled; `now.stalled` is the cause."""
        self.fatal = asyncio.Event()
        """Set when the first samples have all failed with the same kind of error; `failure` is the cause."""
        self.failure: AllFailed | None = None
        self.silent_s = 0.0
        """Seconds since the last response about the run; 0 while responses arrive."""
        self.at_update = self.series.last
        """The first state of the newest update. Samples that ended since then led to no update."""
        self.recent = run_pb2.RecentEpisodes()
        """The newest scored episodes; empty without any since the coordinator started."""
        self._begin = self.series.last
        self._first_failures_max = first_failures_max
        self.metrics = path.with_name(METRICS_NAME)
        """The metrics of the learner per update, beside the series."""
        self._success_reward = success_reward
        self._clock = clock
        self._on_state = on_state
        self._on_eval = on_eval
        self._begin_s = clock.monotonic_s() - self.series.last.time_s
        self._known = {(e.step, e.incarnation) for e in self.series.evals if e.complete}
        self._file = path.open("ab")

    def see(self, state: run_pb2.RunState) -> None:
        """Add a state."""
        time_s = self.elapsed_s()
        self.seen.set()
        self.silent_s = 0.0
        self.now = point_of(state, time_s)
        self.recent = state.recent
        for result in state.evals:
            key = (result.step, result.incarnation)
            if result.complete and key not in self._known:
                self._known.add(key)
                self._record(eval_of(result, self._success_reward, time_s))
        if self._worth_recording(self.now):
            self._record(self.now)
        if (self.now.update, self.now.incarnation) != (self.at_update.update, self.at_update.incarnation):
            self.at_update = self.now
        if state.ended:
            self.ended.set()
        self._note_failures(state)
        self._note_stall()

    def _note_failures(self, state: run_pb2.RunState) -> None:
        begin = self._begin
        try:
            refuse_if_all_failed(
                state,
                self._first_failures_max,
                folder=self.folder,
                failed_before=begin.samples.get("failed", 0),
                tokens_before=begin.tokens_generated,
            )
        except AllFailed as err:
            self.failure = err
            self.fatal.set()

    def unused(self) -> dict[str, int]:
        """Return the number of samples that ended since the newest update, by reason."""
        before = self.at_update.reasons
        return {reason: num - before.get(reason, 0) for reason, num in self.now.reasons.items()}

    def miss_answer(self, silent_s: float) -> None:
        """Record that no response arrived for `silent_s` seconds."""
        self.silent_s = silent_s
        self._on_state(self.series)

    def miss(self, cause: str) -> None:
        """Record a stall because no state arrived for `stall_s`. Then the coordinator cannot say what the run waits
        for."""
        self.now = msgspec.structs.replace(self.now, stalled=cause)
        self._note_stall()

    def _note_stall(self) -> None:
        if self.now.stalled and not self.now.ended:
            self.stalled.set()
        else:
            self.stalled.clear()
        self._on_state(self.series)

    def elapsed_s(self) -> float:
        """Return the seconds of running time, including those before a resume."""
        return self._clock.monotonic_s() - self._begin_s

    def close(self, state: run_pb2.RunState | None = None) -> None:
        """Record the newest state and the incomplete evaluations."""
        if self._file.closed:
            return
        if self.now is not self.series.last:
            self._record(self.now)
        for result in state.evals if state is not None else ():
            if (result.step, result.incarnation) not in self._known and result.num_samples:
                self._record(eval_of(result, self._success_reward, self.now.time_s))
        self._file.close()

    def _worth_recording(self, point: Point) -> bool:
        last = self.series.last
        moved = (point.update, point.incarnation, point.ended) != (last.update, last.incarnation, last.ended)
        return not self.series.points or moved or point.time_s - last.time_s >= RECORD_EVERY_S

    def _record(self, entry: Point | Eval) -> None:
        self.series.add(entry)
        if isinstance(entry, Eval):
            self._on_eval(entry)
        self._file.write(encode_line(entry))
        self._file.flush()


def point_of(state: run_pb2.RunState, time_s: float) -> Point:
    """Return the recorded part of a state. Of the policies, only the first one is recorded."""
    policy = state.policies[0] if state.policies else run_pb2.PolicyState()
    names = ("reserved", "live", "trained", "stale", "filtered", "failed", "cancelled", "exported")
    return Point(
        time_s=time_s,
        update=policy.applied_step,
        published_step=policy.published_step,
        incarnation=policy.incarnation,
        checkpoint_update=policy.checkpoint_update,
        mean_rewards=dict(state.mean_rewards),
        samples={name: getattr(state.samples, name) for name in names},
        reasons=dict(state.samples.reasons),
        groups=dict(policy.groups),
        tokens_generated=policy.tokens_generated,
        tokens_trained=policy.tokens_trained,
        trained_by_staleness=dict(policy.trained_by_staleness),
        replay={name: getattr(state.replay.samples, name) for name in names} if state.HasField("replay") else {},
        replayed_by_staleness=dict(state.replay.trained_by_staleness),
        waiting=dict(state.waiting),
        stalled=state.stalled,
        ended=state.ended,
        failed_attempts=state.failed_attempts.num,
        failure=state.failed_attempts.cause,
        ledger_head=LedgerHead(position=state.ledger_position, hash=state.ledger_hash),
    )


def eval_of(result: run_pb2.EvalResult, success_reward: str, time_s: float) -> Eval:
    return Eval(
        time_s=time_s,
        step=result.step,
        incarnation=result.incarnation,
        split=result.split,
        num_samples=result.num_samples,
        success=result.mean_rewards.get(success_reward, 0.0),
        success_by_label=dict(sorted(result.success_by_label.items())),
        complete=result.complete,
        graded=result.graded,
    )


class Watcher:
    """Watches a run in the background while it is entered. `recorder.ended` is set when the run has ended."""

    def __init__(
        self, address: str, access: Access, run: str, recorder: RunRecorder, clock: Clock, *, stall_s: float = 0.0
    ) -> None:
        """`stall_s`: seconds without a response after which the recorder reports a stall; 0 disables it."""
        self._address = address
        self._stall_s = stall_s
        self._seen_s = clock.monotonic_s()
        self._channel = open_channel(address, access=access)
        self._stub: Any = run_pb2_grpc.RunServiceStub(self._channel)
        self._run = run
        self._recorder = recorder
        self._clock = clock
        self._newest: run_pb2.RunState | None = None
        self._task: asyncio.Task[None] | None = None
        self._listening: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._watch(), name=f"watch {self._run}")
        self._listening = asyncio.create_task(self._listen(), name=f"silence of {self._run}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        assert self._listening is not None
        for task in (self._task, self._listening):
            task.cancel()
        await asyncio.wait([self._task, self._listening])
        self._recorder.close(self._newest)
        await self._channel.close()

    async def wait(self) -> None:
        """Wait until the run has ended. Raises MeshError if it is not retryable."""
        assert self._task is not None, "not entered"
        await asyncio.shield(self._task)

    async def refresh(self, limit_s: float = _REFRESH_S_MAX) -> None:
        """Read the current state, because the streamed one may be old. Raises MeshError."""
        with typed_errors():
            reply = await self._stub.GetRun(run_pb2.GetRunRequest(run=self._run), timeout=limit_s)
        self._see(reply.state)

    def _see(self, state: run_pb2.RunState) -> None:
        self._newest = state
        self._seen_s = self._clock.monotonic_s()
        self._recorder.see(state)

    async def _listen(self) -> None:
        """Distinguish a silent coordinator from a run without changes: the coordinator of the latter responds to
        GetRun."""
        while not self._recorder.ended.is_set():
            await self._clock.sleep(SILENT_S)
            if self._clock.monotonic_s() - self._seen_s < SILENT_S:
                continue
            try:
                await self.refresh(SILENT_S)
            except MeshError:
                self._recorder.miss_answer(self._clock.monotonic_s() - self._seen_s)

    async def _watch(self) -> None:
        while not self._recorder.ended.is_set():
            cause = "WatchRun returned no state"
            try:
                async with asyncio.timeout(self._stall_s or None):
                    await self._follow()
            except MeshError as err:
                if not err.retryable:
                    raise
                cause = str(err)
            except TimeoutError:
                pass  # the next request shows whether the gateway responds
            self._miss(cause)
            await self._clock.sleep(_BACKOFF_S)

    def _miss(self, cause: str) -> None:
        _log.debug("watch interrupted: %s", cause)
        silent_s = self._clock.monotonic_s() - self._seen_s
        if 0 < self._stall_s <= silent_s:
            self._recorder.miss(f"no response from the gateway at {self._address} for {silent_s:.0f} s: {cause}")

    async def _follow(self) -> None:
        call = self._stub.WatchRun(run_pb2.WatchRunRequest(run=self._run))
        try:
            with typed_errors():
                async for message in call:
                    self._see(message.state)
                    if self._recorder.ended.is_set():
                        return
        finally:
            call.cancel()
