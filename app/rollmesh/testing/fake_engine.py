"""A deterministic engine without torch, for tests, the simulator and meshes without a model.

It implements the port fully: it batches, queues, stops, cancels, swaps and counts. One asyncio task steps all running
requests and yields to the loop once per step; with `step_s` 0 it never sleeps. Weights are real safetensors files,
whose header and values are checked against `tensors`. Their values are not used, because the policy depends on the
version alone (`fake_policy`).

Prefix reuse changes only the counters. The engine stores the prefixes of ended sessions by the version that computed
them, and evicts the least recently used.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np

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
from rollmesh.services.inference.engines.common.requests import check_request, check_retain, check_score
from rollmesh.services.inference.engines.common.stop import STOP_ID, StopRules
from rollmesh.shared.clock import Clock, SystemClock
from rollmesh.shared.config.settings import NonNegativeFloat, NonNegativeInt, PositiveInt, Settings
from rollmesh.shared.domain.engine_capabilities import EngineCapabilities
from rollmesh.shared.domain.outputs import NO_TOKEN, NUM_TOP
from rollmesh.shared.domain.trajectory import Columns, FinishReason, IntArray
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.testing.fake_policy import OUTPUTS, SCORE_OUTPUTS, FakePolicy
from rollmesh.testing.fake_weights import check_files


class FakeEngineConfig(Settings):
    """Sizes and delays of the fake."""

    vocab_size: PositiveInt = 64
    """Token t decodes to the printable character chr(32 + t % 95)."""
    context_max: PositiveInt = 1024
    """Most tokens of a sequence, prefix and new tokens together."""
    slots_max: PositiveInt = 64
    """Most requests that run at once."""
    queue_max: PositiveInt = 1024
    """Most requests that wait; one more is rejected with EngineBusy."""
    sessions_max: NonNegativeInt = 1024
    """Most ended sessions whose prefix counts as cached."""
    prepared_max: PositiveInt = 2
    """Most prepared versions; preparing one more drops the oldest of them."""
    versions_max: PositiveInt = 1
    """Most versions from which requests are sampled at once."""
    tokens_per_step: PositiveInt = 8
    """Tokens per request and step. A larger value is cheaper; 1 is most similar to a model."""
    step_s: NonNegativeFloat = 0.0
    """Duration of a step in seconds of the clock; 0 yields to the loop without sleeping."""
    prepare_s: NonNegativeFloat = 0.0
    """Duration of `prepare` in seconds of the clock."""
    tensors: dict[str, tuple[int, ...]] = {}
    """Expected shape per tensor name. Empty accepts any set of finite tensors, also an empty set."""


@dataclass(slots=True)
class _Running:
    request: GenerateRequest
    emit: Emit
    new: list[int] = field(default_factory=list)
    num_cached: int = -1
    """-1 until the request runs."""
    kv_step_oldest: int = 0
    submitted_s: float = 0.0
    queued_s: float = 0.0


class FakeEngine(Engine):
    """Implements `rollmesh.services.inference.engine.Engine`."""

    Options: ClassVar[type[Settings]] = FakeEngineConfig

    def __init__(self, options: FakeEngineConfig, clock: Clock | None = None) -> None:
        self._config = config = options
        self._clock = clock or SystemClock()
        self._stop_rules = StopRules(
            config.vocab_size, lambda tokens: "".join(chr(32 + token % 95) for token in tokens)
        )
        self._arrivals = itertools.count()
        self._waiting: list[tuple[int, int, _Running]] = []
        self._live: dict[str, _Running] = {}
        self._running: dict[str, _Running] = {}
        self._sessions: OrderedDict[str, tuple[PolicyVersion, IntArray]] = OrderedDict()
        self._prepared: OrderedDict[PolicyVersion, FakePolicy] = OrderedDict()
        self._held: dict[PolicyVersion, FakePolicy] = {}
        """The active version is the first."""
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._broken = "engine is not started"
        self._num_steps = self._num_generated = self._num_prefilled = self._num_hit = 0
        self._step_s = 0.0

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(outputs=OUTPUTS, score_outputs=SCORE_OUTPUTS, versions_max=self._config.versions_max)

    @property
    def active(self) -> PolicyVersion | None:
        return next(iter(self._held), None)

    @property
    def held(self) -> tuple[PolicyVersion, ...]:
        return tuple(self._held)

    @property
    def context_max(self) -> int:
        return self._config.context_max

    async def start(self) -> None:
        assert self._task is None, "started twice"
        self._broken = ""
        self._task = asyncio.create_task(self._run(), name="fake-engine")

    async def close(self) -> None:
        self._broken = "engine is closed"
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        for request_id in list(self._live):
            self._end(request_id, FinishReason.CANCELLED)

    def submit(self, request: GenerateRequest, emit: Emit) -> None:
        self._check_alive()
        check_request(request, self, vocab_size=self._config.vocab_size, is_live=self._live.__contains__)
        if len(self._live) >= self._config.slots_max + self._config.queue_max:
            raise EngineBusy(f"{self._config.queue_max} requests are waiting already")
        running = self._live[request.request_id] = _Running(request, emit, submitted_s=self._clock.monotonic_s())
        heapq.heappush(self._waiting, (-request.priority, next(self._arrivals), running))
        self._work.set()

    def cancel(self, request_id: str) -> None:
        if request_id in self._live:
            # Called later, as by an engine with a thread, so that `emit` does not run inside the caller's call.
            asyncio.get_running_loop().call_soon(self._end, request_id, FinishReason.CANCELLED)

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
            sequences, self, vocab_size=self._config.vocab_size, version=version, outputs=outputs, num_top=num_top
        )
        used = version or self._the_active
        policy = self._held[used]
        results = []
        for sequence in sequences:
            logprobs = policy.logprobs_model(sequence, np.arange(len(sequence)))
            logprobs[0] = 0.0
            arrays = policy.measure(np.arange(len(sequence)), outputs, num_top)
            for name, rows in arrays.items():
                rows[0] = NO_TOKEN if name == "top_k_ids" else 0
            results.append(ScoreResult(logprobs=logprobs, version=used, arrays=arrays))
        return results

    async def prepare(self, version: PolicyVersion, tensors: Mapping[str, Path]) -> None:
        self._check_alive()
        if version in self._held or version in self._prepared:
            return
        check_files(tensors, self._config.tensors)
        await self._clock.sleep(self._config.prepare_s)
        self._prepared[version] = FakePolicy(version, self._config.vocab_size)
        while len(self._prepared) > self._config.prepared_max:
            self._prepared.popitem(last=False)

    async def activate(self, version: PolicyVersion, kv: KvPolicy, retain: Collection[PolicyVersion] = ()) -> None:
        self._check_alive()
        if version == self.active:
            return
        check_retain(retain, self, version)
        policy = self._held[version] if version in self._held else self._prepared.pop(version)
        self._held = {version: policy, **{held: p for held, p in self._held.items() if held != version}}
        for running in self._running.values():
            if kv is KvPolicy.RECOMPUTE and running.request.version is None:
                running.kv_step_oldest = version.step
                self._num_prefilled += len(running.request.token_ids) + len(running.new)
        self._keep({version, *retain})
        self._work.set()

    def discard(self, version: PolicyVersion) -> None:
        self._prepared.pop(version, None)
        if version != self.active:
            self._keep(set(self._held) - {version})

    def load(self) -> EngineLoad:
        used = sum(len(running.request.token_ids) + len(running.new) for running in self._running.values())
        return EngineLoad(
            num_running=len(self._running),
            num_waiting=len(self._live) - len(self._running),
            slots_max=self._config.slots_max,
            kv_tokens_used=used,
            kv_tokens_max=self._config.slots_max * self._config.context_max,
            tokens_generated=self._num_generated,
            tokens_prefilled=self._num_prefilled,
            tokens_prefix_hit=self._num_hit,
            steps=self._num_steps,
            step_s=self._step_s,
        )

    async def _run(self) -> None:
        try:
            while True:
                await self._wait_for_work()
                await self._clock.sleep(self._config.step_s)
                if self._held:
                    start_s = self._clock.monotonic_s()
                    self._step(self._the_active)
                    self._step_s += self._clock.monotonic_s() - start_s + self._config.step_s
        except Exception as error:  # noqa: BLE001 - the one recording point: the cause goes to every live request
            self._broken = f"engine task ended with {type(error).__name__}: {error}"
            for request_id in list(self._live):
                self._end(request_id, FinishReason.ERROR)

    async def _wait_for_work(self) -> None:
        while not self._held or not self._live:
            self._work.clear()
            await self._work.wait()

    @property
    def _the_active(self) -> PolicyVersion:
        assert self.active is not None
        return self.active

    def _keep(self, versions: Collection[PolicyVersion]) -> None:
        """Drop the other held versions, their cached prefixes and their requests."""
        self._held = {version: policy for version, policy in self._held.items() if version in versions}
        self._sessions = OrderedDict((name, entry) for name, entry in self._sessions.items() if entry[0] in self._held)
        for running in list(self._live.values()):
            if running.request.version is not None and running.request.version not in self._held:
                self._end(running.request.request_id, FinishReason.CANCELLED)

    def _step(self, active: PolicyVersion) -> None:
        self._num_steps += 1
        while self._waiting and len(self._running) < self._config.slots_max:
            running = heapq.heappop(self._waiting)[2]
            if self._live.get(running.request.request_id) is running:  # not cancelled while it waited
                self._admit(running, running.request.version or active)
        for running in list(self._running.values()):
            if running.request.request_id in self._running:  # an emit may cancel another
                self._extend(running, self._held[running.request.version or active])

    def _admit(self, running: _Running, version: PolicyVersion) -> None:
        """Start a request. As in a real cache, the last token of a cached prefix was never fed."""
        token_ids = running.request.token_ids
        computed_by, held = self._sessions.pop(running.request.session, (version, token_ids[:0]))
        if computed_by != version:
            held = token_ids[:0]
        num = min(len(held), len(token_ids) - 1)
        differs = held[:num] != token_ids[:num]
        running.num_cached = int(differs.argmax()) if differs.any() else num
        running.kv_step_oldest = version.step
        running.queued_s = self._clock.monotonic_s() - running.submitted_s
        self._running[running.request.request_id] = running
        self._num_hit += running.num_cached
        self._num_prefilled += len(token_ids) - running.num_cached

    def _extend(self, running: _Running, policy: FakePolicy) -> None:
        params = running.request.params
        start = len(running.request.token_ids) + len(running.new)
        end = min(len(running.request.token_ids) + params.max_tokens, self.context_max)
        positions = np.arange(start, min(end, start + self._config.tokens_per_step))
        tokens, columns = policy.draw(params, positions, running.request.outputs, running.request.num_top)
        num, stopped = self._until_stop(running, tokens)
        tokens, columns = tokens[:num], {name: values[:num] for name, values in columns.items()}
        running.new += tokens.tolist()
        self._num_generated += num
        finish = FinishReason.STOP if stopped else FinishReason.LENGTH if start + num >= end else None
        self._emit(running, tokens, columns, finish)

    def _until_stop(self, running: _Running, tokens: IntArray) -> tuple[int, bool]:
        """Return how many of the tokens count, and whether the last of them ends the request."""
        params = running.request.params
        if not params.stop and not params.stop_token_ids:
            return len(tokens), False
        marks = self._stop_rules.marks(params)[tokens]
        token_ids = running.request.token_ids
        before = [*token_ids[len(token_ids) - running.request.num_resumed :].tolist(), *running.new]
        for index in np.flatnonzero(marks).tolist():
            new = np.array(before + tokens[: index + 1].tolist(), np.int32)
            if marks[index] & STOP_ID or self._stop_rules.ends_text(new, params.stop):
                return index + 1, True
        return len(tokens), False

    def _end(self, request_id: str, finish: FinishReason) -> None:
        running = self._live.get(request_id)
        if running is not None:
            none = np.empty(0, np.float32)
            self._emit(running, np.empty(0, np.int32), {"logprobs": none, "logprobs_model": none}, finish)

    def _emit(self, running: _Running, tokens: IntArray, columns: Columns, finish: FinishReason | None) -> None:
        request = running.request
        version = request.version or self.active or NO_VERSION
        first = len(tokens) > 0 and len(running.new) == len(tokens)
        if finish is not None:
            self._forget(running)
        running.emit(
            GenerateDelta(
                request_id=request.request_id,
                token_ids=tokens,
                logprobs=columns["logprobs"],
                logprobs_model=columns["logprobs_model"],
                arrays={name: rows for name, rows in columns.items() if name not in ("logprobs", "logprobs_model")},
                version=version,
                kv_step_oldest=running.kv_step_oldest if len(tokens) else version.step,
                finish=finish,
                error=self._broken if finish is FinishReason.ERROR else "",
                num_prompt_cached=running.num_cached if first else 0,
                num_prompt_prefilled=len(request.token_ids) - running.num_cached if first else 0,
                queued_s=running.queued_s if first else 0.0,
            )
        )

    def _forget(self, running: _Running) -> None:
        """Drop an ended request. Its prefix stays for the next turn of its session if one version computed all of
        it."""
        request = running.request
        del self._live[request.request_id]
        ran = self._running.pop(request.request_id, None) is not None
        version = request.version or self.active
        if ran and request.session and running.new and version and running.kv_step_oldest == version.step:
            tokens = np.concatenate((request.token_ids, np.array(running.new[:-1], np.int32)))
            self._sessions[request.session] = version, tokens
            while len(self._sessions) > self._config.sessions_max:
                self._sessions.popitem(last=False)

    def _check_alive(self) -> None:
        if self._broken:
            raise EngineBroken(self._broken)
