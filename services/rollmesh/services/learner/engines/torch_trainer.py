"""Implement the learner's port with `rollmesh.trainer`. No other module of the learner imports torch.

The compute thread opens and calls the trainer, and sets the number of torch threads. The default is one, because torch threads spin on
barriers and become very slow when cores are busy.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rollmesh.services.learner.config import LearnerConfig
from rollmesh.services.learner.engine import ExportedWeights, Position, Restored, StepResult
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.trajectory import FloatArray, GroupContext, IntArray, TrainingSample
from rollmesh.trainer.checkpoint import Checkpoint, latest_checkpoint, save_checkpoint
from rollmesh.trainer.checkpoint_files import CheckpointError, CheckpointPosition
from rollmesh.trainer.config import UpdateConfig
from rollmesh.trainer.model_config import vocab_size
from rollmesh.trainer.model_files import WEIGHTS_NAME, load_model, load_tokenizer
from rollmesh.trainer.trained_log import TrainedLog
from rollmesh.trainer.update import BatchTrainer, UpdateOutcome

_log = logging.getLogger(__name__)


class TorchTrainer:
    """Implements `engine.TrainerEngine` and `engine.TrainerClass`. It has no options."""

    trains_model = True

    @classmethod
    def open(cls, config: LearnerConfig, options: object = None) -> Restored:
        """Open the trainer, see `engine.TrainerClass.open`."""
        torch.set_num_threads(config.threads)
        try:
            found = latest_checkpoint(config.checkpoints)
            return _fresh(config) if found is None else _resumed(config, found)
        except CheckpointError as err:
            raise ConfigError(str(err)) from err

    def __init__(self, trainer: BatchTrainer, tokenizer: PreTrainedTokenizerBase | None, config: LearnerConfig) -> None:
        self._trainer = trainer
        self._tokenizer = tokenizer
        self._config = config

    @property
    def step(self) -> int:
        return self._trainer.step

    @property
    def vocab_size(self) -> int:
        return vocab_size(self._trainer.model)

    def update(self, k: int, samples: Sequence[TrainingSample], groups: Sequence[GroupContext]) -> StepResult:
        result = self._trainer.update(k, samples, groups)
        return StepResult(
            update=k,
            applied=result.outcome is UpdateOutcome.APPLIED,
            verdicts=tuple((v.sample_id, v.reason) for v in result.verdicts),
            metrics=result.metrics,
            groups=result.groups,
        )

    def score(self, sequences: Sequence[IntArray]) -> list[FloatArray]:
        return self._trainer.scores(sequences)

    def export_weights(self, folder: Path) -> ExportedWeights:
        path = folder / WEIGHTS_NAME
        self._trainer.export_weights(path)
        return ExportedWeights(files={WEIGHTS_NAME: path}, tied=_tied(self._trainer.model))

    def save(self, log: TrainedLog, position: Position, *, data_snapshot: bytes) -> Path:
        place = CheckpointPosition(
            update=position.update,
            policy=position.policy,
            incarnation=position.incarnation,
            digest=position.digest,
            seed=self._trainer.seed,
            head=position.head,
            config_digest=_digest(self._config),
        )
        saved = save_checkpoint(
            self._config.checkpoints,
            self._trainer,
            self._tokenizer,
            log,
            place,
            data_snapshot=data_snapshot,
            keep_last=self._config.keep_last,
        )
        return saved.path


def _fresh(config: LearnerConfig) -> Restored:
    if not config.model:
        raise ConfigError("`model` must be the folder of the initial model in transformers format, got ''", key="model")
    tokenizer = _tokenizer(Path(config.model))
    engine = TorchTrainer(_trainer(config, Path(config.model), tokenizer), tokenizer, config)
    return Restored(engine=engine, log=TrainedLog())


def _resumed(config: LearnerConfig, found: Checkpoint) -> Restored:
    tokenizer = _tokenizer(found.path)
    trainer = _trainer(config, found.path, tokenizer)
    changed = found.restore(trainer)
    meta = found.meta
    if meta.config_digest != _digest(config):
        settings = f" (optimizer: {', '.join(changed)})" if changed else ""
        _log.warning(
            "%s was trained with other settings of the recipe; the current settings apply%s", found.path, settings
        )
    position = Position(
        update=meta.update,
        policy=meta.policy,
        incarnation=meta.incarnation,
        digest=meta.digest,
        head=meta.head,
    )
    engine = TorchTrainer(trainer, tokenizer, config)
    return Restored(engine=engine, log=found.trained_log(), position=position, passed_by=found.passed_by)


def _trainer(config: LearnerConfig, folder: Path, tokenizer: PreTrainedTokenizerBase | None) -> BatchTrainer:
    encode = None if tokenizer is None else partial(tokenizer.encode, add_special_tokens=False)
    try:
        model = load_model(folder, device=config.device)
        return BatchTrainer(
            model,
            config,
            seed=config.seed,
            outputs=config.outputs,
            reward_weights=config.reward_weights,
            initial_model=lambda: load_model(Path(config.model), device=config.device),
            encode=encode,
        )
    except ValueError as err:
        raise ConfigError(f"model: {err}", key="model") from err


def _tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer if the model folder has one. Otherwise checkpoints do not have a tokenizer either."""
    return load_tokenizer(folder) if (folder / "tokenizer_config.json").is_file() else None


def _tied(model: PreTrainedModel) -> tuple[str, ...]:
    if not model.config.tie_word_embeddings:
        return ()
    keys = model._tied_weights_keys
    return tuple(f"{name}={source}" for name, source in keys.items()) if isinstance(keys, dict) else ()


def _digest(config: LearnerConfig) -> str:
    """Return the digest of the settings that decide what an update does to the weights."""
    settings = {name: getattr(config, name) for name in (*UpdateConfig.__struct_fields__, "reward_weights")}
    return hashlib.sha256(msgspec.json.encode(settings)).hexdigest()
