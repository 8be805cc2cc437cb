"""The engine's thread: failure, idling and configuration."""

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from rollmesh.services.inference.engine import EngineBroken, GenerateDelta, GenerateRequest, KvPolicy
from rollmesh.services.inference.engines.torch.config import TorchEngineConfig
from rollmesh.services.inference.engines.torch.engine import TorchEngine
from rollmesh.services.inference.engines.torch.step_pace import StepPace
from rollmesh.shared.domain.trajectory import FinishReason, SamplingParams

from .builders import TinyModel, version

PROMPT = [20, 33, 47, 5, 90, 61]


def request(name: str, max_tokens: int = 100) -> GenerateRequest:
    return GenerateRequest(
        request_id=name, token_ids=np.array(PROMPT, np.int32), params=SamplingParams(max_tokens=max_tokens)
    )


@pytest.fixture
async def engine(tiny: TinyModel) -> AsyncIterator[TorchEngine]:
    built = TorchEngine(TorchEngineConfig(model=str(tiny.folder), context_max=128, slots_max=4))
    await built.start()
    await built.prepare(version(0), {"w": tiny.file(0)})
    await built.activate(version(0), KvPolicy.RECOMPUTE)
    yield built
    await built.close()


async def test_broken_thread_ends_every_request_with_the_cause(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(engine._runner, "decode", fail)
    ended: asyncio.Queue[GenerateDelta] = asyncio.Queue()
    for i in range(8):  # more than the slots, so that waiting requests end as well
        engine.submit(request(f"r{i}"), lambda delta: ended.put_nowait(delta) if delta.finish is not None else None)
    deltas = [await asyncio.wait_for(ended.get(), 20) for _ in range(8)]
    assert {delta.request_id for delta in deltas} == {f"r{i}" for i in range(8)}
    assert {delta.finish for delta in deltas} == {FinishReason.ERROR}
    assert all("RuntimeError: device lost" in delta.error for delta in deltas)
    with pytest.raises(EngineBroken, match="device lost"):
        engine.submit(request("later"), lambda delta: None)
    with pytest.raises(EngineBroken, match="device lost"):
        await engine.score([np.array(PROMPT, np.int32)])


async def test_call_waiting_for_a_thread_that_breaks_raises(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise MemoryError("no room to score")

    monkeypatch.setattr(engine._runner, "score", fail)
    with pytest.raises(EngineBroken, match="no room to score"):
        await asyncio.wait_for(engine.score([np.array(PROMPT, np.int32)]), 20)


async def test_callback_that_raises_starves_no_other_request(engine: TorchEngine) -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
    ended = asyncio.Event()

    def raises(delta: GenerateDelta) -> None:
        raise RuntimeError("bad callback")

    engine.submit(request("bad"), raises)
    engine.submit(request("good"), lambda delta: ended.set() if delta.finish is FinishReason.LENGTH else None)
    await asyncio.wait_for(ended.wait(), 20)
    assert "bad callback" in str(reported[0]["exception"])


async def test_load_counts_requests_that_wait_for_weights(tiny: TinyModel) -> None:
    engine = TorchEngine(TorchEngineConfig(model=str(tiny.folder), context_max=128))
    await engine.start()
    engine.submit(request("r"), lambda delta: None)
    assert (engine.load().num_waiting, engine.load().num_running) == (1, 0)
    await engine.close()


async def test_tokens_are_emitted_in_runs_and_the_first_at_once(engine: TorchEngine) -> None:
    deltas: list[GenerateDelta] = []
    ended = asyncio.Event()

    def emit(delta: GenerateDelta) -> None:
        deltas.append(delta)
        if delta.finish is not None:
            ended.set()

    engine.submit(request("r", max_tokens=20), emit)
    await asyncio.wait_for(ended.wait(), 20)
    assert [len(delta.token_ids) for delta in deltas] == [1, 8, 8, 3]


async def test_idle_thread_does_not_spin(engine: TorchEngine) -> None:
    assert engine._thread is not None
    assert engine._thread.ident is not None
    clock = time.pthread_getcpuclockid(engine._thread.ident)
    await engine.score([np.array(PROMPT, np.int32)])
    before, until = time.clock_gettime(clock), time.thread_time() + 0.05
    while time.thread_time() < until:
        np.linalg.inv(np.eye(50))  # releases the interpreter lock, so that a spinning thread would run
    assert time.clock_gettime(clock) - before < 0.005


class Client:
    """Sends requests of one session to an engine, each after the end of the one before, and keeps their tokens."""

    def __init__(self, engine: TorchEngine, session: str) -> None:
        self._engine, self._session = engine, session
        self.token_ids: list[int] = []

    async def send(self, num: int, max_tokens: int) -> None:
        for index in range(num):
            ended = asyncio.Event()

            def emit(delta: GenerateDelta, ended: asyncio.Event = ended) -> None:
                self.token_ids += delta.token_ids.tolist()
                if delta.finish is not None:
                    ended.set()

            self._engine.submit(
                GenerateRequest(
                    request_id=f"{self._session}{index}",
                    token_ids=np.array([*PROMPT, index], np.int32),
                    params=SamplingParams(max_tokens=max_tokens, seed=index),
                    session=self._session,
                ),
                emit,
            )
            await asyncio.wait_for(ended.wait(), 20)


async def open_engine(tiny: TinyModel, **settings: Any) -> TorchEngine:
    engine = TorchEngine(TorchEngineConfig(model=str(tiny.folder), context_max=128, slots_max=16, **settings))
    await engine.start()
    await engine.prepare(version(0), {"w": tiny.file(0)})
    await engine.activate(version(0), KvPolicy.RECOMPUTE)
    return engine


async def test_holding_steps_changes_no_token(tiny: TinyModel) -> None:
    made = []
    for hold_ms in (0, 50):
        engine = await open_engine(tiny, hold_ms=hold_ms)
        clients = [Client(engine, name) for name in "abcdefgh"]
        await asyncio.gather(*(client.send(4, 3 + index) for index, client in enumerate(clients)))
        made.append(([client.token_ids for client in clients], engine.load()))
        await engine.close()
    (plain, unheld), (same, held) = made
    assert same == plain
    assert unheld.held_s == 0.0
    assert held.held_s > 0.0


async def test_single_client_is_not_held(tiny: TinyModel) -> None:
    engine = await open_engine(tiny, hold_ms=100)
    await Client(engine, "alone").send(50, 2)
    assert engine.load().held_s == 0.0
    await engine.close()


class AlwaysHolds(StepPace):
    """Holds each step for longer than the test runs, whatever arrives and when."""

    def __init__(self) -> None:
        super().__init__(600.0, 16)
        self.holding = threading.Event()

    def wait_s(self, num_live: int, now_s: float) -> float:
        self.holding.set()
        return 600.0

    def rows_wanted(self, now_s: float) -> int:
        return 16


async def test_update_and_close_do_not_wait_for_a_hold(tiny: TinyModel) -> None:
    engine = await open_engine(tiny)
    engine._pace = pace = AlwaysHolds()
    waiting = asyncio.create_task(Client(engine, "z").send(1, 100))
    await engine.prepare(version(1), {"w": tiny.file(1)})
    for work in (engine.activate(version(1), KvPolicy.RECOMPUTE), engine.score([np.array(PROMPT, np.int32)])):
        assert await asyncio.to_thread(pace.holding.wait, 20)
        pace.holding.clear()  # the thread holds again after the work
        await asyncio.wait_for(work, 20)
    assert await asyncio.to_thread(pace.holding.wait, 20)
    await asyncio.wait_for(engine.close(), 20)
    await waiting


async def test_scores_of_an_activation_arrive_before_the_first_token_of_the_new_weights(
    engine: TorchEngine, tiny: TinyModel
) -> None:
    events: list[int | str] = []
    ended = asyncio.Event()

    def emit(delta: GenerateDelta) -> None:
        events.extend([delta.version.step] * len(delta.token_ids))
        if delta.finish is not None:
            ended.set()

    engine.submit(request("r", max_tokens=100), emit)
    await engine.prepare(version(1), {"w": tiny.file(1)})
    (scored,) = await engine.activate_scored(version(1), KvPolicy.KEEP, [np.array(PROMPT, np.int32)], retain=())
    events.append("scored")  # here, because a callback of a task would run later, after tokens of a slow event loop
    assert engine.held == (version(1),)
    assert scored.version == version(1)
    (again,) = await engine.activate_scored(version(1), KvPolicy.KEEP, [np.array(PROMPT, np.int32)])
    np.testing.assert_array_equal(again.logprobs, scored.logprobs)
    await asyncio.wait_for(ended.wait(), 20)
    assert events.index("scored") < events.index(1)


async def test_an_activation_with_a_probe_that_cannot_be_scored_swaps_nothing(
    engine: TorchEngine, tiny: TinyModel
) -> None:
    await engine.prepare(version(1), {"w": tiny.file(1)})
    with pytest.raises(ValueError, match="outside the vocabulary"):
        await engine.activate_scored(version(1), KvPolicy.KEEP, [np.array([10**6], np.int32)])
    assert engine.held == (version(0),)
    await engine.activate(version(1), KvPolicy.KEEP)
    assert engine.held == (version(1),)


@pytest.mark.parametrize("field", ["slots_max", "context_max", "flush_tokens", "threads", "prefill_tokens_max"])
def test_config_out_of_range_names_field_and_value(field: str) -> None:
    settings: dict[str, Any] = {field: 0}
    with pytest.raises(ValueError, match=f"`{field}` must be >= 1, got 0"):
        TorchEngineConfig(model="m", **settings)


async def test_only_retained_versions_stay_in_memory(tiny: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TorchEngine(TorchEngineConfig(model=str(tiny.folder), context_max=128, slots_max=4, versions_max=2))
    await engine.start()
    lay_out, tensors = engine._runner.lay_out, []

    def recorded(state: Any) -> Any:
        weights = lay_out(state)
        tensors.append(weakref.ref(weights.embed))
        return weights

    monkeypatch.setattr(engine._runner, "lay_out", recorded)
    for step in range(4):
        await engine.prepare(version(step), {"w": tiny.file(step % 2)})
        await engine.activate(version(step), KvPolicy.RECOMPUTE, [version(step - 1)])
    assert engine.held == (version(3), version(2))
    gc.collect()
    assert [ref() is not None for ref in tensors] == [False, False, True, True]
    engine.discard(version(2))
    await engine.score([np.array(PROMPT, np.int32)])
    gc.collect()
    assert [ref() is not None for ref in tensors] == [False, False, False, True]
    await engine.close()
