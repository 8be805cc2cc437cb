"""The attached engines with real servers. A server must run, with the flags of docs/engines.md, and these variables
must be set:

ROLLMESH_SGLANG_URL, ROLLMESH_VLLM_URL   address of the server; a test without its address is skipped
ROLLMESH_SERVED_MODEL                    folder of the served model, with its weights in safetensors files, on a shared file system
ROLLMESH_WEIGHTS_DIR                     folder for weights that the server can read

    pytest -m gpu tests/gpu/test_attached_servers.py
"""  # noqa: W505

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from rollmesh.services.inference.engine import INFERENCE_ENGINES, Engine, GenerateDelta, GenerateRequest, KvPolicy
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import FinishReason, SamplingParams
from rollmesh.shared.domain.versions import PolicyVersion

pytestmark = pytest.mark.gpu

URLS = {"sglang": "ROLLMESH_SGLANG_URL", "vllm_server": "ROLLMESH_VLLM_URL"}
PROMPT = [5, 6, 7, 8, 9, 10]
TOLERANCE = 0.05
"""Largest difference of log-probs in nats; a bfloat16 model is within it."""


def version(step: int) -> PolicyVersion:
    return PolicyVersion(policy="main", step=step, weights_digest=f"gpu-{step}")


@pytest.fixture
def files() -> dict[str, Path]:
    return {path.name: path for path in Path(os.environ["ROLLMESH_SERVED_MODEL"]).glob("*.safetensors")}


@pytest.fixture(params=list(URLS))
async def engine(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Engine]:
    """An engine with two sets of weights: the served ones as step 0, and the same with a scaled last normalization as
    step 1."""
    if URLS[request.param] not in os.environ:
        pytest.skip(f"{URLS[request.param]} is not set")
    files: dict[str, Path] = request.getfixturevalue("files")
    options = {
        "url": os.environ[URLS[request.param]],
        "model": os.environ["ROLLMESH_SERVED_MODEL"],
        "weights_dir": os.environ["ROLLMESH_WEIGHTS_DIR"],
        "context_max": int(os.environ.get("ROLLMESH_CONTEXT_MAX", "1024")),
    }
    engine: Engine = INFERENCE_ENGINES.make(Extension(request.param, options=options))
    await engine.start()
    await engine.prepare(version(0), files)
    await engine.prepare(version(1), {name: changed(path, tmp_path) for name, path in files.items()})
    await engine.activate(version(0), KvPolicy.RECOMPUTE)
    yield engine
    await engine.close()


def changed(path: Path, folder: Path) -> Path:
    """Return a copy of the weights in which the weight that scales the logits is larger."""
    state = load_file(path)
    for name in ("model.norm.weight", "transformer.ln_f.weight", "bigram"):
        if name in state:
            state[name] = state[name] * 1.5
    save_file(state, folder / path.name, metadata={"format": "pt"})
    return folder / path.name


class Received:
    """The deltas of one request."""

    def __init__(self, engine: Engine, name: str, outputs: tuple[str, ...] = (), **params: Any) -> None:
        self.deltas: list[GenerateDelta] = []
        self.first, self.ended = asyncio.Event(), asyncio.Event()
        sampling = SamplingParams(**{"max_tokens": 100, "seed": 3} | params)
        token_ids = np.array(PROMPT, np.int32)
        engine.submit(
            GenerateRequest(request_id=name, token_ids=token_ids, params=sampling, outputs=outputs), self._emit
        )

    def _emit(self, delta: GenerateDelta) -> None:
        self.deltas.append(delta)
        self.first.set()
        if delta.finish is not None:
            self.ended.set()

    async def end(self) -> GenerateDelta:
        await asyncio.wait_for(self.ended.wait(), 120)
        return self.deltas[-1]

    @property
    def tokens(self) -> list[int]:
        return [int(token) for delta in self.deltas for token in delta.token_ids]

    @property
    def logprobs(self) -> np.ndarray[Any, Any]:
        return np.concatenate([delta.logprobs for delta in self.deltas])


async def test_logprobs_are_those_of_the_score(engine: Engine) -> None:
    received = Received(engine, "plain")
    await received.end()
    (scored,) = await engine.score([np.array(PROMPT + received.tokens, np.int32)], outputs=("top_k",), num_top=4)
    assert scored.version == version(0)
    np.testing.assert_allclose(received.logprobs, scored.logprobs[len(PROMPT) :], atol=TOLERANCE)
    best = scored.arrays["top_k_logprobs"][len(PROMPT) :, 0]
    assert (best >= scored.logprobs[len(PROMPT) :] - TOLERANCE).all()


async def test_truncated_logprobs_are_renormalized(engine: Engine) -> None:
    received = Received(engine, "shaped", outputs=("top_k",), top_k=3, top_p=0.9, temperature=0.7)
    await received.end()
    logprobs = np.concatenate([delta.arrays["top_k_logprobs"] for delta in received.deltas if len(delta.token_ids)])
    np.testing.assert_allclose(np.exp(logprobs).sum(axis=1), 1.0, atol=TOLERANCE)


async def test_an_update_changes_the_weights_of_running_requests(engine: Engine) -> None:
    received = Received(engine, "long", max_tokens=400)
    await asyncio.wait_for(received.first.wait(), 60)
    await engine.activate(version(1), KvPolicy.RECOMPUTE)
    assert (await received.end()).finish is FinishReason.LENGTH
    assert {delta.version for delta in received.deltas} == {version(0), version(1)}
    old = sum(len(delta.token_ids) for delta in received.deltas if delta.version == version(0))
    (scored,) = await engine.score([np.array(PROMPT + received.tokens, np.int32)])
    assert scored.version == version(1)
    start = len(PROMPT) + old
    np.testing.assert_allclose(received.logprobs[old:], scored.logprobs[start:], atol=TOLERANCE)
    assert not np.allclose(received.logprobs[:old], scored.logprobs[len(PROMPT) : start], atol=TOLERANCE)


async def test_a_cancelled_request_ends(engine: Engine) -> None:
    received = Received(engine, "long", max_tokens=900)
    await asyncio.wait_for(received.first.wait(), 60)
    engine.cancel("long")
    assert (await received.end()).finish is FinishReason.CANCELLED


async def test_many_requests_at_once(engine: Engine) -> None:
    crowd = [Received(engine, f"r{i}", seed=i, max_tokens=20 + i) for i in range(100)]
    for number, received in enumerate(crowd):
        assert (await received.end()).finish is FinishReason.LENGTH
        assert len(received.tokens) == 20 + number
