"""A trainer without torch or a model. Its weights are a hash of the samples that it was trained on, in a small
safetensors file.

It implements the port fully: it drops samples that cannot be trained on, skips updates, saves atomically, and resumes
bit for bit. It tests the invariant "once" better than a real trainer, because two trainers with any different sample,
mask or update have different weights.

A checkpoint is a folder `<checkpoints>/update-00000012.0`, as of the torch trainer: `rollmesh.json` (position and
hashes), `state.json`, `model.safetensors`, `trained.jsonl`, `data_snapshot.bin`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np

from rollmesh.services.learner.config import LearnerConfig
from rollmesh.services.learner.engine import ExportedWeights, Position, Restored, StepResult, TrainerEngine
from rollmesh.shared.config.settings import NonNegativeInt, PositiveInt, Settings
from rollmesh.shared.domain.trajectory import (
    FloatArray,
    GroupContext,
    IntArray,
    Outcome,
    Source,
    TrainedGroup,
    TrainingSample,
)
from rollmesh.shared.errors import ConfigError
from rollmesh.trainer.checkpoint_files import (
    SNAPSHOT_NAME,
    TEMPORARY,
    TRAINED_NAME,
    CheckpointError,
    CheckpointPosition,
    folder_name,
    list_checkpoints,
    newest_whole,
    sync,
    write_meta,
)
from rollmesh.trainer.trained_log import TrainedLog

_WEIGHTS = "model.safetensors"
_STATE = "state.json"
_PERIOD = 64
"""Positions with equal remainders have the same distribution."""


class FakeTrainerOptions(Settings):
    """Sizes and injected failures of the fake."""

    vocab_size: NonNegativeInt = 0
    """Number of tokens that it can score. 0 gives no probes, because the fake inference engine has other log-probs and
    would fail them."""
    num_elements: PositiveInt = 16
    """Number of float32 values in its only tensor, `weights`."""
    non_finite_updates: tuple[int, ...] = ()
    """Updates with a non-finite gradient, which are skipped."""


class FakeState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of state.json."""

    history: str
    """Hex hash of everything it was trained on, which determines the weights."""


class FakeTrainer(TrainerEngine):
    """A trainer without a model."""

    Options: ClassVar[type[Settings]] = FakeTrainerOptions
    step: int
    vocab_size: int

    @classmethod
    def open(cls, config: LearnerConfig, options: FakeTrainerOptions | None = None) -> Restored:
        """Open the trainer, see `engine.TrainerEngine.open`. It does not read `config.model`."""
        engine = cls(options or FakeTrainerOptions(), config)
        try:
            found = newest_whole(config.checkpoints)
        except CheckpointError as err:
            raise ConfigError(str(err)) from err
        if found is None:
            return Restored(engine=engine, log=TrainedLog())
        meta = found.meta
        if meta.seed != config.seed:
            raise ConfigError(
                f"{found.path} was trained with seed {meta.seed}, not {config.seed}; set seed to resume it"
            )
        engine.step = meta.update
        engine.history = msgspec.json.decode((found.path / _STATE).read_bytes(), type=FakeState).history
        position = Position(
            update=meta.update,
            policy=meta.policy,
            incarnation=meta.incarnation,
            digest=meta.digest,
            head=meta.head,
        )
        log = TrainedLog(found.path / TRAINED_NAME, update=meta.update, digest=meta.digest)
        return Restored(engine=engine, log=log, position=position, passed_by=found.passed_by)

    def __init__(self, options: FakeTrainerOptions, config: LearnerConfig) -> None:
        self.step = 0
        self.vocab_size = options.vocab_size
        self._options = options
        self._root = config.checkpoints
        self._keep_last = config.keep_last
        self._seed = config.seed
        self._sources = config.sources
        self.history = hashlib.sha256(f"fake trainer {config.seed}".encode()).hexdigest()

    def update(self, k: int, samples: Sequence[TrainingSample], groups: Sequence[GroupContext]) -> StepResult:
        if k != self.step + 1:
            raise ValueError(f"update {k} does not follow step {self.step}")
        scored = {m.sample_id for g in groups for m in g.members if any(r.outcome is Outcome.OK for r in m.rewards)}
        broken = "NON_FINITE" if k in self._options.non_finite_updates else None
        verdicts = tuple((s.sample.sample_id, _drop_reason(s, scored, self._sources) or broken) for s in samples)
        used = [s for s, (_, reason) in zip(samples, verdicts, strict=True) if reason is None]
        if used:
            self.history = _after(self.history, k, used)
        self.step = k
        tokens = sum(_num_trained(s) for s in used)
        metrics = {
            "samples/leased": float(len(samples)),
            "samples/used": float(len(used)),
            "tokens/trained": float(tokens),
        }
        return StepResult(
            update=k, applied=bool(used), verdicts=verdicts, metrics=metrics, groups=tuple(_measured(used, groups))
        )

    def score(self, sequences: Sequence[IntArray]) -> list[FloatArray]:
        return [self._score(token_ids) for token_ids in sequences]

    def _score(self, token_ids: IntArray) -> FloatArray:
        logits = self._draws().standard_normal((_PERIOD, max(1, self.vocab_size)))
        logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        scored: FloatArray = logprobs[np.arange(len(token_ids)) % _PERIOD, token_ids].astype(np.float32)
        scored[0] = 0.0
        return scored

    def export_weights(self, folder: Path) -> ExportedWeights:
        path = folder / _WEIGHTS
        path.write_bytes(self._safetensors())
        return ExportedWeights(files={_WEIGHTS: path})

    def close(self) -> None:
        """Do nothing: it holds memory only."""

    def save(self, log: TrainedLog, position: Position, *, data_snapshot: bytes) -> Path:
        final = self.copy_to_save(log, position, data_snapshot=data_snapshot)()
        log.rebase(final / TRAINED_NAME)
        return final

    def copy_to_save(self, log: TrainedLog, position: Position, *, data_snapshot: bytes) -> Callable[[], Path]:
        if not self.step == log.update == position.update or position.digest != log.digest:
            raise ValueError(f"trainer at {self.step}, list at {log.update}, position at {position.update}")
        place = CheckpointPosition(
            update=position.update,
            policy=position.policy,
            incarnation=position.incarnation,
            digest=position.digest,
            seed=self._seed,
            head=position.head,
        )
        copied = (FakeState(history=self.history), self._safetensors(), log.copy())
        return lambda: self._write(place, *copied, data_snapshot)

    def _write(
        self, place: CheckpointPosition, state: FakeState, weights: bytes, log: TrainedLog, data_snapshot: bytes
    ) -> Path:
        final = self._root / folder_name(place)
        temporary = self._root / f"{TEMPORARY}{final.name}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        (temporary / _STATE).write_bytes(msgspec.json.encode(state))
        (temporary / _WEIGHTS).write_bytes(weights)
        (temporary / SNAPSHOT_NAME).write_bytes(data_snapshot)
        log.write_to(temporary / TRAINED_NAME)
        write_meta(temporary, place)
        os.rename(temporary, final)
        sync(self._root)
        for old in list_checkpoints(self._root)[: -self._keep_last]:
            shutil.rmtree(old)
        return final

    def _draws(self) -> np.random.Generator:
        return np.random.default_rng(int(self.history, 16))

    def _safetensors(self) -> bytes:
        """Return u64le header length, JSON header and data (https://huggingface.co/docs/safetensors)."""
        values = self._draws().standard_normal(self._options.num_elements).astype("<f4").tobytes()
        entry = {"dtype": "F32", "shape": [self._options.num_elements], "data_offsets": [0, len(values)]}
        header = json.dumps({"weights": entry}).encode()
        header += b" " * (-len(header) % 8)
        return len(header).to_bytes(8, "little") + header + values


def _drop_reason(sample: TrainingSample, scored: set[str], sources: Collection[Source]) -> str | None:
    """Return the reason of `rollmesh.trainer.samples.drop_reason`, except those that need a model."""
    if not sample.sample.trainable:
        return "NOT_TRAINABLE"
    if not _num_trained(sample):
        return "NO_TRAINED_TOKENS"
    trained = [s for s in sample.segments if s.num_trainable]
    if any(s.source not in {Source.POLICY, *sources} for s in trained):
        return "SOURCE_NOT_ADMITTED"
    own = sample.sample.policy
    if any(s.source is Source.POLICY and (s.version is None or s.version.policy != own) for s in trained):
        return "OTHER_POLICY"
    return None if sample.sample.sample_id in scored else "UNSCORED"


def _num_trained(sample: TrainingSample) -> int:
    return sum(s.num_trainable for s in sample.segments)


def _measured(used: Sequence[TrainingSample], groups: Sequence[GroupContext]) -> Iterator[TrainedGroup]:
    """Yield the measurements with advantages of reward sums minus their mean in the group, and the ratio 1."""
    for group in groups:
        sums = {m.sample_id: sum(r.value for r in m.rewards if r.outcome is Outcome.OK) for m in group.members}
        mean = float(np.mean(list(sums.values()))) if sums else 0.0
        mine = [(sums[s.sample.sample_id] - mean, _num_trained(s)) for s in used if s.group == group.group]
        tokens = sum(num for _, num in mine)
        if tokens:
            measures = {
                "mean_abs_advantage": sum(abs(advantage) * num for advantage, num in mine) / tokens,
                "policy_loss": -sum(advantage * num for advantage, num in mine) / tokens,
                "num_tokens": float(tokens),
            }
            yield TrainedGroup(group=group.group, measures=measures)


def _after(history: str, k: int, used: Sequence[TrainingSample]) -> str:
    lines = sorted(f"{s.sample.sample_id} {_num_trained(s)}" for s in used)
    return hashlib.sha256("\n".join([history, str(k), *lines]).encode()).hexdigest()
