"""The ports that an episode needs, without a mesh: direct calls of the engine, rewards computed here, payloads in a
list.

Each implements the port of `rollout.ports` that its docstring names. For tools there is
`rollmesh.testing.rollout.LocalSandbox`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rollmesh.services.inference.engine import Engine, GenerateDelta, GenerateRequest
from rollmesh.services.reward.config import RewardConfig, build_engine
from rollmesh.services.reward.servicer import decode_items
from rollmesh.shared.clients.generated import ScoredTokens, Target
from rollmesh.shared.codec.trajectory import episode_from_bytes
from rollmesh.shared.domain.outputs import NUM_TOP
from rollmesh.shared.domain.trajectory import (
    EndpointUse,
    Episode,
    EpisodeKey,
    FinishReason,
    IntArray,
    Reward,
    SamplingParams,
    Segment,
)
from rollmesh.shared.errors import EngineFailed, StaleWeights
from rollmesh.v1 import reward_pb2


class EngineGenerator:
    """Generator: every request goes to the same engine and asks for the same `outputs`."""

    def __init__(self, engine: Engine, outputs: tuple[str, ...] = (), num_top: int = NUM_TOP) -> None:
        self._engine = engine
        self._outputs, self._num_top = outputs, num_top
        self._ids = itertools.count()

    async def score(
        self, sequences: Sequence[IntArray], *, target: Target, outputs: Sequence[str] = ()
    ) -> list[ScoredTokens]:
        version = next((version for version in self._engine.held if target.admits(version)), None)
        if version is None:
            raise StaleWeights(f"the engine holds no weights for {target}", step=target.step)
        found = await self._engine.score(sequences, version=version, outputs=tuple(outputs), num_top=self._num_top)
        return [ScoredTokens(logprobs=one.logprobs, version=one.version, arrays=one.arrays) for one in found]

    def open(
        self, token_ids: IntArray, params: SamplingParams, *, target: Target, session: str, key: EpisodeKey
    ) -> EngineGeneration:
        request = GenerateRequest(
            request_id=str(next(self._ids)),
            token_ids=token_ids,
            params=params,
            session=session,
            outputs=self._outputs,
            num_top=self._num_top,
        )
        return EngineGeneration(self._engine, request)


class EngineGeneration:
    """Generation: the deltas of the engine in order."""

    def __init__(self, engine: Engine, request: GenerateRequest) -> None:
        self.finish = FinishReason.UNFINISHED
        self._engine = engine
        self._request = request
        self._deltas: asyncio.Queue[GenerateDelta] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        self._engine.submit(self._request, self._deltas.put_nowait)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.finish is FinishReason.UNFINISHED:
            self._engine.cancel(self._request.request_id)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Segment:
        while self.finish is FinishReason.UNFINISHED:
            delta = await self._deltas.get()
            if delta.finish is not None:
                self.finish = delta.finish
            if delta.error:
                raise EngineFailed(delta.error)
            if delta.token_ids.size:
                return delta.segment()
        raise StopAsyncIteration


class DirectScorer:
    """Scorer: the scorers and answer keys of the reward service, called directly."""

    def __init__(self, config: RewardConfig, base_dir: Path | None = None) -> None:
        self._engine = build_engine(config, base_dir)

    async def columns(self) -> Collection[str]:
        return {column for scorer in self._engine.scorers for column in scorer.columns}

    async def score(
        self, run: str, item: reward_pb2.ScoreItem, uses: list[EndpointUse] | None = None
    ) -> list[tuple[Reward, ...]]:
        return await self._engine.score(list(decode_items(item, self._engine.oracles)))


class EpisodeList:
    """SampleLog: decodes payloads into a list, as a trainer receives them."""

    def __init__(self) -> None:
        self._episodes: list[Episode] = []

    async def append(self, run: str, payload: bytes, *, message_id: str) -> int:
        self._episodes.append(episode_from_bytes(payload))
        return len(self._episodes)

    def take(self) -> list[Episode]:
        """Return the payloads since the last call, by name."""
        taken, self._episodes = self._episodes, []
        return sorted(taken, key=lambda episode: episode.key.episode)
