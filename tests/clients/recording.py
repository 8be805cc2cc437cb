"""Parts of a run that also write what they see as JSON lines: engines, a scorer and the trainer.

A mesh loads them as `recording.py:Name`, like a user's own parts. `records.py` compares what they wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np

from rollmesh.services.inference.engine import Emit, GenerateDelta, GenerateRequest
from rollmesh.services.inference.engines.torch.config import TorchEngineConfig
from rollmesh.services.inference.engines.torch.engine import TorchEngine
from rollmesh.services.inference.engines.vllm.config import VllmEngineConfig
from rollmesh.services.inference.engines.vllm.engine import VllmEngine
from rollmesh.services.learner.engine import TrainerEngine
from rollmesh.services.reward.item import ScoreItem
from rollmesh.services.reward.scorers.exact import ExactOptions, ExactScorer
from rollmesh.shared.domain.trajectory import FinishReason, GroupContext, IntArray, Reward, Role, TrainingSample

GENERATED, SCORED, TRAINED = "generated.jsonl", "scored.jsonl", "trained.jsonl"


class GeneratedTurn(msgspec.Struct, frozen=True):
    """One finished request of an engine."""

    prompt: list[int]
    tokens: list[int]


class ScoredSample(msgspec.Struct, frozen=True):
    """One sample as a scorer gets it."""

    sample_id: str
    episode: str
    first_segment: int
    """Index of its first segment in the episode; 0 for the first conversation."""
    prompts: list[list[int]]
    """The tokens before each turn of the model."""
    turns: list[list[int]]
    """The tokens of each turn."""
    tokens: list[int]
    """All tokens."""


class TrainedSample(msgspec.Struct, frozen=True):
    """One sample as a trainer gets it."""

    sample_id: str
    tokens: list[int]


def write(folder: str, name: str, lines: Sequence[msgspec.Struct]) -> None:
    with Path(folder, name).open("ab") as file:
        file.writelines(msgspec.json.encode(line) + b"\n" for line in lines)


# Engines --------------------------------------------------------------------------------------------------------------


def recorded(folder: str, request: GenerateRequest, emit: Emit) -> Emit:
    """Return an `emit` that writes the request when it has finished."""
    tokens: list[int] = []

    def watched(delta: GenerateDelta) -> None:
        tokens.extend(delta.token_ids.tolist())
        if delta.finish in (FinishReason.STOP, FinishReason.LENGTH):
            write(folder, GENERATED, [GeneratedTurn(request.token_ids.tolist(), tokens)])
        emit(delta)

    return watched


class RecordingTorchConfig(TorchEngineConfig):
    """Settings of the torch engine."""

    record: str = ""
    """Folder of the records."""


class RecordingTorch(TorchEngine):
    """The torch engine."""

    Options = RecordingTorchConfig

    def __init__(self, options: RecordingTorchConfig) -> None:
        super().__init__(options)
        self._folder = options.record

    def submit(self, request: GenerateRequest, emit: Emit) -> None:
        super().submit(request, recorded(self._folder, request, emit))


class RecordingVllmConfig(VllmEngineConfig):
    """Settings of the vLLM engine."""

    record: str = ""
    """Folder of the records."""


class RecordingVllm(VllmEngine):
    """The vLLM engine."""

    Options = RecordingVllmConfig

    def __init__(self, options: RecordingVllmConfig) -> None:
        super().__init__(options)
        self._folder = options.record

    def submit(self, request: GenerateRequest, emit: Emit) -> None:
        super().submit(request, recorded(self._folder, request, emit))


# Scorer ---------------------------------------------------------------------------------------------------------------


class RecordingScorerOptions(ExactOptions):
    """Settings of the exact scorer."""

    record: str = ""
    """Folder of the records."""


class RecordingScorer(ExactScorer):
    """The exact scorer."""

    Options: ClassVar[type[msgspec.Struct]] = RecordingScorerOptions

    def __init__(self, *, options: RecordingScorerOptions) -> None:
        super().__init__(options=options)
        self._folder = options.record

    async def score(self, item: ScoreItem) -> Reward:
        write(self._folder, SCORED, [scored_sample(item)])
        return await super().score(item)


def scored_sample(item: ScoreItem) -> ScoredSample:
    prompts: list[list[int]] = []
    turns: list[list[int]] = []
    seen: list[int] = []
    open_turn = False
    for segment in item.path:
        if segment.role is Role.ACTION:
            if not open_turn:
                prompts.append(list(seen))
                turns.append([])
            turns[-1] += segment.token_ids.tolist()
            open_turn = segment.finish is FinishReason.UNFINISHED
        seen += segment.token_ids.tolist()
    key = item.key
    return ScoredSample(item.sample_id, f"{key.episode}-{key.attempt}", item.path[0].index, prompts, turns, seen)


# Trainer --------------------------------------------------------------------------------------------------------------


class RecordingTrainer(TrainerEngine):
    """The torch trainer. It writes to the folder of the learner."""

    trains_model = True

    @classmethod
    def open(cls, config: Any, options: Any) -> Any:
        from rollmesh.services.learner.engines.torch_trainer import TorchTrainer

        restored = TorchTrainer.open(config)
        return replace(restored, engine=cls(restored.engine, config.directory))

    def __init__(self, inner: Any, folder: str) -> None:
        self._inner = inner
        self._folder = folder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def update(self, k: int, samples: Sequence[TrainingSample], groups: Sequence[GroupContext]) -> Any:
        write(self._folder, TRAINED, [TrainedSample(s.sample.sample_id, tokens_of(s)) for s in samples])
        return self._inner.update(k, samples, groups)


def tokens_of(sample: TrainingSample) -> list[int]:
    parts: list[IntArray] = [segment.token_ids for segment in sample.segments]
    return [int(token) for token in np.concatenate(parts)]
