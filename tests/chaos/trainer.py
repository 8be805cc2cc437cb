"""A trainer with traps, and a witness that records the samples it received, independently of all reports.

For every update it records, beside the ids, the age of the trained tokens from the stamps in the *payloads*. For the
fake engine it also records whether the stamped weights generate these tokens (a function of weights, seed and
position), which detects a wrong stamp.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import msgspec
import numpy as np

from rollmesh.services.learner.config import LearnerConfig
from rollmesh.services.learner.engine import ExportedWeights, Position, Restored, StepResult, TrainerEngine
from rollmesh.shared.domain.trajectory import FloatArray, GroupContext, IntArray, Source, TrainingSample
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.testing.fake_policy import FakePolicy
from rollmesh.testing.fake_trainer import FakeTrainer
from rollmesh.trainer.trained_log import TrainedLog

from .traps import passes

WITNESS = "witness.jsonl"
VOCAB_SIZE = 112


class Witnessed(msgspec.Struct, frozen=True, kw_only=True):
    """One update of the trainer, whether it was committed or not."""

    update: int
    sample_ids: list[str]
    steps: list[int]
    """Oldest step of each sample's trained tokens."""
    incarnations: list[int]
    """Incarnation of each of those steps."""
    num_forged: int
    """Number of segments whose tokens the stamped version does not generate."""


class WitnessTrainer(TrainerEngine):
    """Wraps another trainer."""

    @classmethod
    def around(cls, restored: Restored, config: LearnerConfig, *, can_forge: bool) -> Restored:
        """Add a witness to the engine. `can_forge`: its tokens are those of the fake engine."""
        return replace(restored, engine=cls(restored.engine, Path(config.directory) / WITNESS, can_forge))

    def __init__(self, engine: TrainerEngine, path: Path, can_forge: bool) -> None:
        self._engine = engine
        self._path = path
        self._can_forge = can_forge

    @property
    def step(self) -> int:
        return self._engine.step

    @property
    def vocab_size(self) -> int:
        return self._engine.vocab_size

    def update(self, k: int, samples: Sequence[TrainingSample], groups: Sequence[GroupContext]) -> StepResult:
        result = self._engine.update(k, samples, groups)
        used = set(result.used_ids)
        self._note(k, [sample for sample in samples if sample.sample.sample_id in used])
        return result

    def score(self, sequences: Sequence[IntArray]) -> list[FloatArray]:
        return self._engine.score(sequences)

    def export_weights(self, folder: Path) -> ExportedWeights:
        return self._engine.export_weights(folder)

    def save(self, log: TrainedLog, position: Position, *, data_snapshot: bytes) -> Path:
        return self._engine.save(_TrappedLog(log), position, data_snapshot=data_snapshot)

    def copy_to_save(self, log: TrainedLog, position: Position, *, data_snapshot: bytes) -> Callable[[], Path]:
        return self._engine.copy_to_save(_TrappedLog(log), position, data_snapshot=data_snapshot)

    def close(self) -> None:
        self._engine.close()

    def _note(self, k: int, samples: Sequence[TrainingSample]) -> None:
        versions = [oldest(sample) for sample in samples]
        line = Witnessed(
            update=k,
            sample_ids=[sample.sample.sample_id for sample in samples],
            steps=[version.step for version in versions],
            incarnations=[version.incarnation for version in versions],
            num_forged=sum(num_forged(sample) for sample in samples) if self._can_forge else 0,
        )
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(descriptor, msgspec.json.encode(line) + b"\n")
        finally:
            os.close(descriptor)


class FakeWitness(WitnessTrainer):
    """The fake trainer with a witness."""

    @classmethod
    def open(cls, config: LearnerConfig, options: object = None) -> Restored:
        return cls.around(FakeTrainer.open(config), config, can_forge=True)


class TorchWitness(WitnessTrainer):
    """The torch trainer with a witness."""

    trains_model = True

    @classmethod
    def open(cls, config: LearnerConfig, options: object = None) -> Restored:
        from rollmesh.services.learner.engines.torch_trainer import (
            TorchTrainer,  # only the learner's process needs torch
        )

        return cls.around(TorchTrainer.open(config), config, can_forge=False)


class _TrappedLog(TrainedLog):
    """Passes `learner-saving` after a checkpoint is written to its temporary folder, and before it is renamed."""

    def __init__(self, log: TrainedLog) -> None:
        self.__dict__ = log.__dict__  # one state, so that `rebase` reaches the tenure's log

    def write_to(self, path: Path) -> None:
        super().write_to(path)
        passes("learner-saving")


def oldest(sample: TrainingSample) -> PolicyVersion:
    versions = [s.version for s in sample.segments if s.source is Source.POLICY and s.num_trainable and s.version]
    return min(versions, key=lambda version: version.step)


def num_forged(sample: TrainingSample) -> int:
    start = forged = 0
    for segment in sample.segments:
        end = start + segment.num_tokens
        if segment.source is Source.POLICY and segment.version is not None:
            params = sample.sampling_params[segment.sampling]
            drawn, _ = _policy(segment.version).draw(params, np.arange(start, end))
            forged += not np.array_equal(drawn, segment.token_ids)
        start = end
    return forged


@lru_cache(maxsize=64)
def _policy(version: PolicyVersion) -> FakePolicy:
    return FakePolicy(version, VOCAB_SIZE)
