"""Engines whose log-probs depend on the bytes of the weights, so that probes can tell right from wrong; and their
broken kin.

Loaded by nodes as `content_engine.py:Name`, like a user's own engine.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from rollmesh.services.inference.engine import Emit, GenerateDelta, GenerateRequest, KvPolicy, ScoreResult
from rollmesh.shared.domain.engine_capabilities import EngineCapabilities
from rollmesh.shared.domain.trajectory import FinishReason, FloatArray, IntArray
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.testing.fake_engine import FakeEngine, FakeEngineConfig
from rollmesh.testing.fake_policy import FakePolicy

VOCAB = FakeEngineConfig().vocab_size


def content_of(tensors: Mapping[str, Path]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].read_bytes())
    return digest.hexdigest()


def content_logprobs(content: str, token_ids: IntArray) -> FloatArray:
    """What right weights score: [n], entry 0 is 0."""
    policy = FakePolicy(PolicyVersion(policy="", step=0, weights_digest=content), VOCAB)
    logprobs = policy.logprobs_model(token_ids, np.arange(len(token_ids)))
    logprobs[0] = 0.0
    return logprobs


class ContentEngine(FakeEngine):
    """Scores by what the active files hold."""

    def __init__(self, options: FakeEngineConfig) -> None:
        super().__init__(options)
        self.contents: dict[PolicyVersion, str] = {}
        self.serving = ""
        self.emitted = asyncio.Event()
        """Set with the first delta of any request."""
        self.ended = asyncio.Event()
        """Set with the last delta of any request."""

    def submit(self, request: GenerateRequest, emit: Emit) -> None:
        def watched(delta: GenerateDelta) -> None:
            emit(delta)
            self.emitted.set()
            if delta.finish is not None:
                self.ended.set()

        super().submit(request, watched)

    async def prepare(self, version: PolicyVersion, tensors: Mapping[str, Path]) -> None:
        await super().prepare(version, tensors)
        self.contents[version] = content_of(tensors)

    async def activate(self, version: PolicyVersion, kv: KvPolicy, retain: Collection[PolicyVersion] = ()) -> None:
        await super().activate(version, kv, retain)
        self.serving = self.contents[version]

    async def score(self, sequences: Sequence[IntArray], **wishes: Any) -> list[ScoreResult]:
        results = await super().score(sequences, **wishes)
        return [
            replace(result, logprobs=content_logprobs(self.serving, tokens))
            for tokens, result in zip(sequences, results, strict=True)
        ]


class ForgetfulEngine(ContentEngine):
    """Omits the requested outputs."""

    def submit(self, request: GenerateRequest, emit: Emit) -> None:
        super().submit(request, lambda delta: emit(replace(delta, arrays={})))


class DoubleEngine(ContentEngine):
    """Returns outputs of a type that is not allowed."""

    def submit(self, request: GenerateRequest, emit: Emit) -> None:
        def doubled(delta: GenerateDelta) -> None:
            emit(replace(delta, arrays={name: values.astype(np.float64) for name, values in delta.arrays.items()}))

        super().submit(request, doubled)


class HalfEngine(ContentEngine):
    """Computes in bfloat16."""

    capabilities = EngineCapabilities(dtype="bfloat16")


class StuckEngine(ContentEngine):
    """Reports success at every update and goes on serving its first weights."""

    async def activate(self, version: PolicyVersion, kv: KvPolicy, retain: Collection[PolicyVersion] = ()) -> None:
        first = self.serving
        await super().activate(version, kv, retain)
        self.serving = first or self.serving


class ScoredEngine(ContentEngine):
    """Scores the probes as a part of the activation."""

    async def activate_scored(
        self, version: PolicyVersion, kv: KvPolicy, probes: Sequence[IntArray], retain: Collection[PolicyVersion] = ()
    ) -> list[ScoreResult]:
        await self.activate(version, kv, retain)
        return await self.score(probes)


class StuckScoredEngine(ScoredEngine, StuckEngine):
    """Reports success at every update, and scores the probes under its first weights."""


class WideEngine(ContentEngine):
    """Scores with the arrays `place`, the index of each token, and `wide`, of 64 KiB per token."""

    capabilities = EngineCapabilities(score_outputs=("place", "wide"))

    async def score(
        self, sequences: Sequence[IntArray], *, outputs: tuple[str, ...] = (), **wishes: Any
    ) -> list[ScoreResult]:
        results = await super().score(sequences, outputs=outputs, **wishes)
        found = []
        for result in results:
            num = len(result.logprobs)
            arrays = {"place": np.arange(num, dtype=np.int32), "wide": np.ones((num, 16384), np.float32)}
            found.append(replace(result, arrays={name: arrays[name] for name in outputs}))
        return found


class LoadingEngine(FakeEngine):
    """Never finishes loading; `loading` is set once it has begun."""

    def __init__(self, options: FakeEngineConfig) -> None:
        super().__init__(options)
        self.loading = asyncio.Event()

    async def prepare(self, version: PolicyVersion, tensors: Mapping[str, Path]) -> None:
        self.loading.set()
        await asyncio.Event().wait()


class PausingEngine(FakeEngine):
    """Prepares a version of a step in `pauses` when the event is set."""

    def __init__(self, options: FakeEngineConfig) -> None:
        super().__init__(options)
        self.pauses: dict[int, asyncio.Event] = {}

    async def prepare(self, version: PolicyVersion, tensors: Mapping[str, Path]) -> None:
        if version.step in self.pauses:
            await self.pauses[version.step].wait()
        await super().prepare(version, tensors)


class BreakingEngine(FakeEngine):
    """Fails every request after 20 tokens, with one token per step."""

    def submit(self, request: GenerateRequest, emit: Emit) -> None:
        num_tokens = 0

        def until_20(delta: GenerateDelta) -> None:
            nonlocal num_tokens
            num_tokens += len(delta.token_ids)
            emit(delta)
            if num_tokens == 20 and delta.finish is None:
                broken = GenerateDelta(
                    request_id=request.request_id,
                    token_ids=np.empty(0, np.int32),
                    logprobs=np.empty(0, np.float32),
                    logprobs_model=None,
                    version=delta.version,
                    kv_step_oldest=delta.kv_step_oldest,
                    finish=FinishReason.ERROR,
                    error="device lost",
                )
                emit(broken)
                self.cancel(request.request_id)

        super().submit(request, until_20)
