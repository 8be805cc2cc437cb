"""The vLLM engine over a fake vLLM: when a request begins again at an update of the weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollmesh.services.inference.engine import GenerateDelta, GenerateRequest, KvPolicy
from rollmesh.services.inference.engines.common.stop import StopRules
from rollmesh.services.inference.engines.vllm import columns
from rollmesh.services.inference.engines.vllm import engine as vllm_engine
from rollmesh.services.inference.engines.vllm.config import VllmEngineConfig
from rollmesh.services.inference.engines.vllm.engine import RESTARTS_MAX, VllmEngine
from rollmesh.shared.domain.trajectory import FinishReason, SamplingParams

from .builders import version

LIMIT_S = 20.0


class Collector:
    """What vLLM returns for an added request: outputs that the test puts."""

    def __init__(self, request_id: str, salt: int) -> None:
        self.request_id, self.salt = request_id, salt
        self.output: Any = None
        self._came = asyncio.Event()

    def put(self, token: int, serial: int, *, finish: str | None = None) -> None:
        logprobs = SimpleNamespace(token_ids=[token, columns.SERIAL_ID - serial], logprobs=[-1.0, -1.0])
        completion = SimpleNamespace(token_ids=[token], logprobs=logprobs, finish_reason=finish)
        self.output = SimpleNamespace(outputs=[completion], num_cached_tokens=0)
        self._came.set()

    def get_nowait(self) -> Any:
        output, self.output = self.output, None
        self._came.clear()
        return output

    async def get(self) -> Any:
        await self._came.wait()
        return self.get_nowait()


class FakeVllm:
    """The calls of `AsyncLLM` that the engine makes."""

    def __init__(self) -> None:
        self.added: list[Collector] = []
        self.live: dict[str, Collector] = {}
        self.may_add = asyncio.Event()
        self.may_add.set()
        self.asked: list[str] = []

    async def add_request(self, request_id: str, prompt: int, params: None) -> Collector:
        self.asked.append(request_id)
        await self.may_add.wait()
        collector = self.live[request_id] = Collector(request_id, prompt)
        self.added.append(collector)
        return collector

    async def abort(self, request_id: str, internal: bool) -> None:
        del self.live[request_id]

    async def reset_prefix_cache(self, **_: Any) -> bool:
        return True

    async def _nothing(self, *_: Any, **__: Any) -> None: ...

    pause_generation = start_weight_update = update_weights = finish_weight_update = resume_generation = _nothing


class Files:
    """A model folder in which every version is prepared."""

    vocab_size = 128

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def take(self, _: object) -> Path:
        return self._folder / "taken"

    def paths(self, _: Path) -> list[str]:
        return []

    def close(self) -> None: ...


@pytest.fixture
async def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[VllmEngine]:
    made: Any = VllmEngine(VllmEngineConfig(model="-", context_max=64))
    made._llm, made._opened, made._broken = FakeVllm(), Files(tmp_path), ""
    made._stop_rules = StopRules(128, lambda tokens: "".join(map(chr, tokens)))
    monkeypatch.setattr(made, "_prompt", lambda _: made._serial)
    monkeypatch.setattr(made, "_params", lambda _: None)
    monkeypatch.setattr(vllm_engine, "_message", lambda *_, **__: None)
    await made.activate(version(0), KvPolicy.KEEP)
    yield made
    await made.close()


def submit(engine: VllmEngine) -> list[GenerateDelta]:
    """Submit a request, and return the list of its deltas."""
    deltas: list[GenerateDelta] = []
    params = SamplingParams(max_tokens=4)
    engine.submit(GenerateRequest(request_id="r", token_ids=np.ones(3, np.int32), params=params), deltas.append)
    return deltas


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110 (callbacks of the engine change it)
            await asyncio.sleep(0)


def has(items: list[Any], num: int) -> bool:
    return len(items) == num


def fake(engine: VllmEngine) -> FakeVllm:
    found: FakeVllm = engine._llm
    return found


@pytest.mark.parametrize("kv", [KvPolicy.KEEP, KvPolicy.RECOMPUTE])
async def test_a_request_without_a_token_begins_again_at_a_limited_number_of_updates(
    engine: VllmEngine, kv: KvPolicy
) -> None:
    vllm = fake(engine)
    deltas = submit(engine)
    for step in range(1, RESTARTS_MAX + 3):
        await until(partial(has, vllm.added, min(step, RESTARTS_MAX + 1)))
        await engine.activate(version(step), kv)
    last = vllm.added[-1]
    assert [collector.salt for collector in vllm.added] == list(range(1, RESTARTS_MAX + 2))
    assert list(vllm.live.values()) == [last], "the others are aborted"
    last.put(65, engine._serial, finish="length")
    await until(lambda: deltas and deltas[-1].finish is not None)
    assert [delta.finish for delta in deltas] == [FinishReason.LENGTH]
    newest = RESTARTS_MAX + 2
    oldest = RESTARTS_MAX if kv is KvPolicy.KEEP else newest
    assert (deltas[0].version.step, deltas[0].kv_step_oldest) == (newest, oldest)
    assert len(vllm.asked) == RESTARTS_MAX + 1


async def test_a_request_that_vllm_does_not_have_yet_begins_again_a_limited_number_of_times(engine: VllmEngine) -> None:
    vllm = fake(engine)
    vllm.may_add.clear()
    deltas = submit(engine)
    for step in range(1, RESTARTS_MAX + 3):
        await until(partial(has, vllm.asked, min(step, RESTARTS_MAX + 1)))
        await engine.activate(version(step), KvPolicy.KEEP)
    vllm.may_add.set()
    await until(lambda: len(vllm.added) == RESTARTS_MAX + 1)
    await until(lambda: len(vllm.live) == 1)
    last = vllm.added[-1]
    assert list(vllm.live.values()) == [last], "those of older weights are aborted"
    assert last.salt == RESTARTS_MAX + 1
    last.put(65, engine._serial, finish="length")
    await until(lambda: deltas and deltas[-1].finish is not None)
    assert (deltas[0].version.step, deltas[0].kv_step_oldest) == (RESTARTS_MAX + 2, RESTARTS_MAX)


async def test_a_request_that_ends_before_vllm_has_it_is_aborted(engine: VllmEngine) -> None:
    vllm = fake(engine)
    vllm.may_add.clear()
    deltas = submit(engine)
    await until(lambda: vllm.asked)
    engine.cancel("r")
    await until(lambda: deltas and deltas[-1].finish is not None)
    vllm.may_add.set()
    await until(lambda: vllm.added)
    await until(lambda: not vllm.live)
    assert [delta.finish for delta in deltas] == [FinishReason.CANCELLED]
    assert engine.load().num_running == 0


async def test_a_request_with_a_token_continues_at_an_update(engine: VllmEngine) -> None:
    vllm = fake(engine)
    deltas = submit(engine)
    await until(lambda: vllm.added)
    (collector,) = vllm.added
    collector.put(65, 1)
    await until(lambda: deltas)
    await engine.activate(version(1), KvPolicy.KEEP)
    collector.put(66, 2, finish="length")
    await until(lambda: deltas and deltas[-1].finish is not None)
    assert [(delta.version.step, delta.kv_step_oldest) for delta in deltas] == [(0, 0), (1, 0)]
    assert len(vllm.asked) == 1
