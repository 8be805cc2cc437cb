"""The torch engine on the demo's 359k-parameter model, called through the engine port from a blocking bench."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.demo.tokenizer import SPECIAL_TOKENS, VOCAB_SIZE, build_tokenizer
from rollmesh.services.inference.engine import Engine, GenerateDelta, GenerateRequest, KvPolicy
from rollmesh.services.inference.engines.torch.config import TorchEngineConfig
from rollmesh.services.inference.engines.torch.engine import TorchEngine
from rollmesh.shared.domain.trajectory import IntArray, SamplingParams
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.trainer.model_files import WEIGHTS_NAME, write_model_folder

NUM_SPECIAL = len(SPECIAL_TOKENS)


@contextmanager
def tiny_folder(context_max: int = 512) -> Iterator[tuple[Path, Any]]:
    """Return the folder and the model of the demo with random weights."""
    torch.set_num_threads(1)
    model: Any = build_tiny_model(TinyModelConfig(context_max=context_max), seed=0)
    model.eval()
    model.generation_config.eos_token_id = None  # transformers fills unset fields of a request from here
    with TemporaryDirectory(prefix="rollmesh-bench-") as name:
        write_model_folder(model, build_tokenizer(), Path(name))
        yield Path(name), model


def prompts(num: int, num_tokens: int, seed: int = 0) -> list[list[int]]:
    """Return random texts without common prefixes, so that no contender benefits from prefix reuse."""
    rows = np.random.default_rng(seed).integers(NUM_SPECIAL, VOCAB_SIZE, (num, num_tokens))
    return [[int(token) for token in row] for row in rows]


@dataclass(slots=True)
class Answer:
    """The output of one request."""

    deltas: list[GenerateDelta] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    on_delta: Callable[[], None] | None = None

    def emit(self, delta: GenerateDelta) -> None:
        self.deltas.append(delta)
        if self.on_delta is not None:
            self.on_delta()
        if delta.finish is not None:
            self.ended.set()

    @property
    def token_ids(self) -> list[int]:
        return [int(token) for delta in self.deltas for token in delta.token_ids]


class EngineBench:
    """A started engine with active weights, on an event loop that only runs inside `drive`."""

    def __init__(self, folder: Path, engine: Engine | None = None, **fields: Any) -> None:
        """`engine` replaces the torch engine with the options `fields`."""
        self.engine = engine or TorchEngine(TorchEngineConfig(model=str(folder), **fields))
        self._runner = asyncio.Runner()
        self._num_requests = 0
        self.drive(self._start(folder / WEIGHTS_NAME))

    def drive(self, work: Awaitable[Any]) -> Any:
        async def run() -> Any:
            return await work

        return self._runner.run(run())

    def close(self) -> None:
        self.drive(self.engine.close())
        self._runner.close()

    def submit(
        self,
        token_ids: Sequence[int] | IntArray,
        params: SamplingParams,
        *,
        session: str = "",
        answer: Answer | None = None,
    ) -> Answer:
        self._num_requests += 1
        answer = answer or Answer()
        request = GenerateRequest(
            request_id=f"r{self._num_requests}",
            token_ids=np.asarray(token_ids, np.int32),
            params=params,
            session=session,
        )
        self.engine.submit(request, answer.emit)
        return answer

    async def _start(self, weights: Path) -> None:
        await self.engine.start()
        version = PolicyVersion(policy="main", step=0)
        await self.engine.prepare(version, {WEIGHTS_NAME: weights})
        await self.engine.activate(version, KvPolicy.RECOMPUTE)
