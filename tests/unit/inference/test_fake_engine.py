"""What the fake adds to the port: time by the clock, and failure made visible."""

import asyncio
import subprocess
import sys

import numpy as np
import pytest

from rollmesh.services.inference.engine import EngineBroken, GenerateDelta, GenerateRequest, KvPolicy
from rollmesh.shared.clock import ManualClock
from rollmesh.shared.domain.trajectory import FinishReason, SamplingParams
from rollmesh.testing.fake_engine import FakeEngine, FakeEngineConfig
from rollmesh.testing.fake_policy import FakePolicy

from .builders import version


def request(name: str) -> GenerateRequest:
    return GenerateRequest(
        request_id=name, token_ids=np.array([1, 2, 3], np.int32), params=SamplingParams(max_tokens=10)
    )


def test_import_stays_light() -> None:
    code = "import sys, rollmesh.testing.fake_engine; print({'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


async def test_time_is_the_clocks_alone() -> None:
    clock = ManualClock()
    engine = FakeEngine(FakeEngineConfig(tokens_per_step=1, step_s=1.0, prepare_s=5.0), clock)
    await engine.start()
    preparing = asyncio.create_task(engine.prepare(version(0), {}))
    await clock.run_for(4.9)
    assert not preparing.done()
    await clock.run_for(0.2)
    await preparing
    await engine.activate(version(0), KvPolicy.RECOMPUTE)
    deltas: list[GenerateDelta] = []
    engine.submit(request("r"), deltas.append)
    await clock.run_for(6.5)
    assert len(deltas) == 6
    await clock.run_for(4.0)
    assert (len(deltas), deltas[-1].finish) == (10, FinishReason.LENGTH)
    await engine.close()


async def test_failure_ends_every_request_with_the_cause() -> None:
    engine = FakeEngine(FakeEngineConfig())
    await engine.start()
    deltas: list[GenerateDelta] = []

    def raises(delta: GenerateDelta) -> None:
        if delta.finish is not FinishReason.ERROR:
            raise RuntimeError("bad callback")

    def other(delta: GenerateDelta) -> None:
        deltas.append(delta)
        ended.set()

    ended = asyncio.Event()
    engine.submit(request("bad"), raises)
    engine.submit(request("other"), other)
    await engine.prepare(version(0), {})
    await engine.activate(version(0), KvPolicy.RECOMPUTE)
    await asyncio.wait_for(ended.wait(), 5)
    assert deltas[-1].finish is FinishReason.ERROR
    assert "bad callback" in deltas[-1].error
    with pytest.raises(EngineBroken, match="bad callback"):
        engine.submit(request("later"), deltas.append)
    await engine.close()


@pytest.mark.parametrize(
    "params", [SamplingParams(seed=1), SamplingParams(seed=2, temperature=0.7, top_p=0.8, top_k=6)]
)
def test_draws_follow_the_reported_logprobs(params: SamplingParams) -> None:
    policy = FakePolicy(version(0), vocab_size=12)
    positions = 5 + 64 * np.arange(40_000)  # one distribution, many draws
    tokens, columns = policy.draw(params, positions)
    logprobs = columns["logprobs"]
    _, with_entropy = policy.draw(params, positions[:1], ["entropy"])
    counts = np.bincount(tokens, minlength=12)
    probs = np.zeros(12)
    probs[tokens] = np.exp(logprobs.astype(np.float64))
    assert probs.sum() == pytest.approx(1.0, abs=1e-5)
    by_hand = -sum(p * np.log(p) for p in probs if p > 0)
    assert with_entropy["entropy"].tolist() == pytest.approx([by_hand], abs=1e-4)
    kept = probs > 0
    assert (
        (counts[kept] - 40_000 * probs[kept]) ** 2 / (40_000 * probs[kept])
    ).sum() < 38  # 11 degrees of freedom at most
