"""The embedded engine: torch in a separate thread behind the engine port.

The event loop and the compute thread share no mutable state. Commands enter through one queue, and deltas leave in one
`call_soon_threadsafe` per step. The loop side tracks live requests and rejects bad requests at once; the thread side
(`core`) holds slots and tokens. An idle thread blocks on the queue.

If the thread fails, this is recorded once: every live request ends with ERROR and the cause, and pending and later
calls raise EngineBroken. Results are exact to float rounding; `sampling` describes what the tokens of a request depend
on.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from msgspec import structs

from rollmesh.services.inference.engine import (
    NO_VERSION,
    Emit,
    Engine,
    EngineBroken,
    EngineBusy,
    EngineLoad,
    GenerateDelta,
    GenerateRequest,
    KvPolicy,
    ScoreResult,
)
from rollmesh.services.inference.engines.common.requests import (
    check_request,
    check_retain,
    check_score,
    check_sequences,
)
from rollmesh.services.inference.engines.common.stop import StopRules, load_decode
from rollmesh.services.inference.engines.common.weights_buffer import WeightsBuffer, read_state
from rollmesh.services.inference.engines.torch.command_queue import CommandQueue
from rollmesh.services.inference.engines.torch.config import TorchEngineConfig
from rollmesh.services.inference.engines.torch.core import TorchCore
from rollmesh.services.inference.engines.torch.execution import chooses_experts, find_execution, open_runner
from rollmesh.services.inference.engines.torch.runner import LoadedWeights
from rollmesh.services.inference.engines.torch.step_pace import StepPace
from rollmesh.shared.config.settings import Settings
from rollmesh.shared.domain.engine_capabilities import EngineCapabilities
from rollmesh.shared.domain.outputs import NUM_TOP
from rollmesh.shared.domain.trajectory import FinishReason, IntArray
from rollmesh.shared.domain.versions import PolicyVersion

_CLOSE_S_MAX = 10.0
_SCORE_OUTPUTS = ("entropy", "hidden", "mean_logprob", "top_k")
_T = TypeVar("_T")
_Command = Callable[[TorchCore], None]


class TorchEngine(Engine):
    """Implements `rollmesh.services.inference.engine.Engine`."""

    Options: ClassVar[type[Settings]] = TorchEngineConfig

    def __init__(self, options: TorchEngineConfig) -> None:
        self._config = options
        self._commands: CommandQueue[_Command | None] = CommandQueue()
        self._pace = StepPace(options.hold_ms / 1e3, options.slots_max)
        self._buffer = WeightsBuffer[LoadedWeights](options.prepared_max)
        self._loader = concurrent.futures.ThreadPoolExecutor(
            1, "engine-loader", initializer=torch.set_num_threads, initargs=(1,)
        )
        self._emits: dict[str, Emit] = {}
        self._calls: set[asyncio.Future[Any]] = set()
        self._held: tuple[PolicyVersion, ...] = ()
        self._broken: str = ""
        self._thread: threading.Thread | None = None

    @cached_property
    def capabilities(self) -> EngineCapabilities:
        routed = ("routed_experts",) if chooses_experts(Path(self._config.model)) else ()
        score_outputs = (*_SCORE_OUTPUTS, *routed)
        return EngineCapabilities(
            outputs=("kept_mass", *score_outputs),
            score_outputs=score_outputs,
            versions_max=self._config.versions_max,
            dtype=self._config.dtype,
        )

    @classmethod
    def check_model(cls, options: TorchEngineConfig) -> None:
        """Raise ConfigError for a model or a context that the engine cannot serve."""
        find_execution(options)

    @property
    def active(self) -> PolicyVersion | None:
        return self._held[0] if self._held else None

    @property
    def held(self) -> tuple[PolicyVersion, ...]:
        return self._held

    @property
    def context_max(self) -> int:
        return self._config.context_max

    async def start(self) -> None:
        assert self._thread is None, "started twice"
        self._loop = asyncio.get_running_loop()
        core = await self._loop.run_in_executor(self._loader, self._build)
        self._load = core.load()
        self._thread = threading.Thread(target=self._run, args=(core,), name="engine", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            self._commands.put(None)
            await asyncio.to_thread(self._thread.join, _CLOSE_S_MAX)
            # The thread scheduled its last deltas before it ended; let the loop deliver them.
            await asyncio.sleep(0)
        if self._emits:
            self._break(f"no response to close within {_CLOSE_S_MAX:g} s")
        self._loader.shutdown(wait=False, cancel_futures=True)
        self._broken = self._broken or "engine is closed"
        self._fail_calls()
        await asyncio.sleep(0)

    def submit(self, request: GenerateRequest, emit: Emit) -> None:
        self._check_alive()
        check_request(request, self, vocab_size=self._runner.vocab_size, is_live=self._emits.__contains__)
        self._stop_rules.check(request.params, where=f"request {request.request_id!r}")
        if len(self._emits) >= self._config.slots_max + self._config.queue_max:
            raise EngineBusy(f"{self._config.queue_max} requests are waiting already")
        self._emits[request.request_id] = emit

        def enter(core: TorchCore) -> None:
            core.submit(request)
            self._pace.arrived(request.session, time.perf_counter())

        self._commands.put(enter, urgent=False)

    def cancel(self, request_id: str) -> None:
        self._commands.put(lambda core: core.cancel(request_id), urgent=False)

    async def score(
        self,
        sequences: Sequence[IntArray],
        *,
        version: PolicyVersion | None = None,
        outputs: tuple[str, ...] = (),
        num_top: int = NUM_TOP,
    ) -> list[ScoreResult]:
        self._check_alive()
        check_score(
            sequences, self, vocab_size=self._runner.vocab_size, version=version, outputs=outputs, num_top=num_top
        )
        rows = [np.ascontiguousarray(sequence, dtype=np.int32) for sequence in sequences]
        future: asyncio.Future[list[ScoreResult]] = self._loop.create_future()
        self._commands.put(
            lambda core: core.score(
                rows, outputs, num_top, lambda scores: self._post(_resolve, future, scores), version
            )
        )
        return await self._call(future)

    async def prepare(self, version: PolicyVersion, tensors: Mapping[str, Path]) -> None:
        self._check_alive()
        if version in self._held or version in self._buffer:
            return
        files = dict(tensors)
        weights = await self._loop.run_in_executor(self._loader, lambda: self._runner.lay_out(read_state(files)))
        self._buffer.put(version, weights)

    async def activate(self, version: PolicyVersion, kv: KvPolicy, retain: Collection[PolicyVersion] = ()) -> None:
        await self.activate_scored(version, kv, (), retain)

    async def activate_scored(
        self,
        version: PolicyVersion,
        kv: KvPolicy,
        probes: Sequence[IntArray],
        retain: Collection[PolicyVersion] = (),
    ) -> list[ScoreResult]:
        """Do what `activate` does, and return the scores of the token rows `probes` under the new weights, computed
        before these sample (or, if they do not fit into one micro-batch, between their steps)."""
        self._check_alive()
        if version == self.active:
            return await self.score(probes) if probes else []
        check_retain(retain, self, version)
        check_sequences(probes, self, vocab_size=self._runner.vocab_size)
        rows = [np.ascontiguousarray(probe, dtype=np.int32) for probe in probes]
        weights = None if version in self._held else self._buffer.take(version)
        future: asyncio.Future[list[ScoreResult]] = self._loop.create_future()

        def activated() -> None:
            self._held = (version, *(old for old in self._held if old in retain and old != version))

        def scored(scores: list[ScoreResult] | ValueError) -> None:
            self._post(_resolve, future, scores)

        self._commands.put(
            lambda core: core.activate(
                version, weights, kv, lambda: self._post(activated), retain, probes=rows, scored=scored
            )
        )
        return await self._call(future)

    def discard(self, version: PolicyVersion) -> None:
        self._buffer.discard(version)
        if version in self._held[1:]:
            self._held = tuple(held for held in self._held if held != version)
            self._commands.put(lambda core: core.discard(version))

    def load(self) -> EngineLoad:
        # Requests that the thread has not taken yet also wait.
        waiting = max(0, len(self._emits) - self._load.num_running)
        return structs.replace(
            self._load, num_waiting=waiting, held_s=self._pace.held_s, forward=self._execution.forward
        )

    def _build(self) -> TorchCore:
        config = self._config
        torch.set_num_threads(1)
        self._runner, self._execution = open_runner(config)
        self._stop_rules = StopRules(self._runner.vocab_size, load_decode(Path(config.model)))
        return TorchCore(config, self._runner, self._stop_rules)

    def _run(self, core: TorchCore) -> None:
        """Run the compute thread."""
        torch.set_num_threads(self._config.threads)
        try:
            while self._take_commands(core):
                begin_cpu_s = time.thread_time()
                if core.control():  # callers get results before the model runs
                    self._publish(core, core.take_deltas())
                self._publish(core, core.step())
                self._pace.finished(time.perf_counter(), time.thread_time() - begin_cpu_s)
            core.cancel_all()
            self._publish(core, core.step())
        except Exception as error:  # noqa: BLE001 - the one recording point: the cause goes to every live request
            self._post(self._break, f"{type(error).__name__}: {error}")

    def _take_commands(self, core: TorchCore) -> bool:
        """Run the waiting commands until the next step is due. Return False on the command to end."""
        while True:
            while self._commands:
                command = self._commands.take()
                if command is None:
                    return False
                command(core)
                if core.has_deltas:
                    return True
            if core.idle:
                self._commands.wait(1, None)
            elif not self._hold(core):
                return True

    def _hold(self, core: TorchCore) -> bool:
        """Let the next step wait for further requests. Return False if it is due."""
        now_s = time.perf_counter()
        wait_s = 0.0 if core.has_control else self._pace.wait_s(core.num_live, now_s)
        if wait_s <= 0:
            return False
        self._commands.wait(self._pace.rows_wanted(now_s) - core.num_live, wait_s)
        self._pace.held_s += time.perf_counter() - now_s
        return True

    def _publish(self, core: TorchCore, deltas: list[GenerateDelta]) -> None:
        self._load = core.load()
        if deltas:
            self._post(self._deliver, deltas)
        core.answer()

    def _post(self, function: Callable[..., None], *args: object) -> None:
        """Run a function on the event loop. If the loop is closed, do nothing."""
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def _deliver(self, deltas: list[GenerateDelta]) -> None:
        """Call each emit in a separate callback, so that one that raises is reported by the loop and affects no other
        request."""
        for delta in deltas:
            emit = self._emits.get(delta.request_id)
            if delta.finish is not None:
                self._emits.pop(delta.request_id, None)
            if emit is not None:
                self._loop.call_soon(emit, delta)

    def _break(self, cause: str) -> None:
        self._broken = f"compute thread ended with {cause}"
        version = self.active or NO_VERSION
        empty = np.empty(0, np.float32)
        self._deliver(
            [
                GenerateDelta(
                    request_id=request_id,
                    token_ids=np.empty(0, np.int32),
                    logprobs=empty,
                    logprobs_model=empty,
                    version=version,
                    kv_step_oldest=version.step,
                    finish=FinishReason.ERROR,
                    error=self._broken,
                )
                for request_id in list(self._emits)
            ]
        )
        self._fail_calls()

    def _fail_calls(self) -> None:
        for future in list(self._calls):
            if not future.done():
                future.set_exception(EngineBroken(self._broken))

    def _check_alive(self) -> None:
        if self._thread is None:
            raise EngineBroken("engine is not started")
        if self._broken:
            raise EngineBroken(self._broken)

    async def _call(self, future: asyncio.Future[_T]) -> _T:
        """Await a result of the compute thread. A failed or closed engine resolves all of them with an error."""
        self._calls.add(future)
        try:
            return await future
        finally:
            self._calls.discard(future)


def _resolve(future: asyncio.Future[_T], value: _T | ValueError) -> None:
    if future.done():
        return
    if isinstance(value, ValueError):
        future.set_exception(value)
    else:
        future.set_result(value)
