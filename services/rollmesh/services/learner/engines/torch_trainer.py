"""Implement the learner's port with `rollmesh.trainer`. No other module of the learner imports torch.

The compute thread opens and calls the trainer, and sets the number of torch threads. The default is one, because torch
threads spin on barriers and become very slow when cores are busy.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from msgspec import structs
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rollmesh.services.learner.config import LearnerConfig
from rollmesh.services.learner.engine import ExportedWeights, Position, Restored, StepResult, TrainerEngine
from rollmesh.services.learner.engines.rank_group import RankGroup, device_of, size_of_torchrun
from rollmesh.shared.domain.trajectory import FloatArray, GroupContext, IntArray, TrainingSample
from rollmesh.shared.errors import ConfigError, FailedPrecondition
from rollmesh.shared.weights.manifest import PROBE_TOLERANCE, ROUNDED_PROBE_TOLERANCE
from rollmesh.trainer.checkpoint import Checkpoint, copy_checkpoint, latest_checkpoint, save_checkpoint, save_part
from rollmesh.trainer.checkpoint_files import CheckpointError, CheckpointPosition
from rollmesh.trainer.config import UpdateConfig
from rollmesh.trainer.memory_plan import plan_start
from rollmesh.trainer.model_config import has_tied_head, vocab_size
from rollmesh.trainer.model_files import WEIGHTS_NAME, load_tokenizer, open_model, write_weights
from rollmesh.trainer.plugins import Plugins
from rollmesh.trainer.ranks import ONE_RANK, Ranks
from rollmesh.trainer.trained_log import TrainedLog
from rollmesh.trainer.update import BatchTrainer, UpdateOutcome

_log = logging.getLogger(__name__)


class TorchTrainer(TrainerEngine):
    """The trainer. It has no options."""

    trains_model = True

    @classmethod
    def open(cls, config: LearnerConfig, options: object = None) -> Restored:
        """Open the trainer, see `engine.TrainerEngine.open`."""
        size = max(config.compute.ranks, size_of_torchrun())
        try:
            found = latest_checkpoint(config.checkpoints)
            return open_part(config, found) if size == 1 else RankedTrainer.open(config, found)
        except CheckpointError as err:
            raise ConfigError(str(err)) from err

    def __init__(self, trainer: BatchTrainer, tokenizer: PreTrainedTokenizerBase | None, config: LearnerConfig) -> None:
        self._trainer = trainer
        self._tokenizer = tokenizer
        self._config = config
        self._has_base = False
        """Whether this session has written the base of its adapters."""

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
        adapters, adapter = self._trainer.adapters, {}
        if adapters is not None and self._config.lora.publish == "adapter":
            if self.step:  # at step 0 the policy is the base
                adapter = adapters.write(folder, name_base=False)
            path = self._base()
        else:
            path = folder / WEIGHTS_NAME
            self._trainer.export_weights(path, self._published_dtype())
        rounded = "bfloat16" in (self._config.publish.dtype, self._config.compute.precision)
        return ExportedWeights(
            files={WEIGHTS_NAME: path},
            adapter=adapter,
            tied=_tied(self._trainer.model),
            probe_tolerance=ROUNDED_PROBE_TOLERANCE if rounded else PROBE_TOLERANCE,
        )

    def save(self, log: TrainedLog, position: Position, *, data_snapshot: bytes) -> Path:
        saved = save_checkpoint(
            self._config.checkpoints,
            self._trainer,
            self._tokenizer,
            log,
            self._place(position),
            data_snapshot=data_snapshot,
            settings=_settings(self._config),
            keep_last=self._config.keep_last,
        )
        return saved.path

    def copy_to_save(self, log: TrainedLog, position: Position, *, data_snapshot: bytes) -> Callable[[], Path]:
        write = copy_checkpoint(
            self._config.checkpoints,
            self._trainer,
            self._tokenizer,
            log,
            self._place(position),
            data_snapshot=data_snapshot,
            settings=_settings(self._config),
            keep_last=self._config.keep_last,
        )
        return lambda: write().path

    def close(self) -> None:
        """End the process group of a single rank."""
        self._trainer.close()

    def save_part(self, position: Position) -> None:
        """Write the part of this rank, which is not 0, into the checkpoint that rank 0 saves."""
        save_part(self._config.checkpoints, self._trainer, self._place(position))

    def _base(self) -> Path:
        """Return the file of the base, which is written once per session, because it does not change."""
        path = Path(self._config.directory) / "base" / WEIGHTS_NAME
        if not self._has_base:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_weights(self._trainer.model, path, dtype=self._published_dtype(), merged=False)
            self._has_base = True
        return path

    def _published_dtype(self) -> torch.dtype | None:
        """Return the type to which published weights are rounded. The matrices of an adapter are not: nodes add them in
        float32."""
        return torch.bfloat16 if self._config.publish.dtype == "bfloat16" else None

    def _place(self, position: Position) -> CheckpointPosition:
        return CheckpointPosition(
            update=position.update,
            policy=position.policy,
            incarnation=position.incarnation,
            digest=position.digest,
            seed=self._trainer.seed,
            head=position.head,
            config_digest=_digest(self._config),
        )


class RankedTrainer(TrainerEngine):
    """Implements `engine.TrainerEngine` on several ranks: rank 0 makes every call on its part, and the others on
    theirs."""

    def __init__(self, part: TorchTrainer, group: RankGroup) -> None:
        self._part = part
        self._group = group

    @classmethod
    def open(cls, config: LearnerConfig, found: Checkpoint | None) -> Restored:
        """Start the ranks, or those of torchrun again, and open the trainer on all of them. Ranks of a session before
        end first."""
        global _group
        # For the ranks of torchrun; those of `compute.ranks` are checked with the configuration.
        if config.checkpoint_async:
            raise ConfigError(
                "`checkpoint_async` must be false with several ranks, because every rank writes a part of a checkpoint",
                key="checkpoint_async",
            )
        if _group is not None and _group.failed and _group.lasting:
            raise FailedPrecondition(
                "the ranks that torchrun started have ended after an error; restart all of them, as `torchrun "
                "--max-restarts N` does"
            )
        if _group is not None and not _group.lasting:
            _group.close()
            _group = None
        device_of(config, max(config.compute.ranks, size_of_torchrun()), 0)
        _group = group = _group or RankGroup.start(config)
        with group.call("open", config, found):
            restored = open_part(config, found, group.ranks)
        assert isinstance(restored.engine, TorchTrainer)
        return replace(restored, engine=cls(restored.engine, group))

    @property
    def step(self) -> int:
        return self._part.step

    @property
    def vocab_size(self) -> int:
        return self._part.vocab_size

    def update(self, k: int, samples: Sequence[TrainingSample], groups: Sequence[GroupContext]) -> StepResult:
        with self._group.call("update", k, samples, groups):
            return self._part.update(k, samples, groups)

    def score(self, sequences: Sequence[IntArray]) -> list[FloatArray]:
        with self._group.call("score", sequences):
            return self._part.score(sequences)

    def export_weights(self, folder: Path) -> ExportedWeights:
        with self._group.call("export_weights", folder):
            return self._part.export_weights(folder)

    def save(self, log: TrainedLog, position: Position, *, data_snapshot: bytes) -> Path:
        with self._group.call("save_part", position):
            return self._part.save(log, position, data_snapshot=data_snapshot)

    def copy_to_save(self, log: TrainedLog, position: Position, *, data_snapshot: bytes) -> Callable[[], Path]:
        raise ValueError("every rank writes a part of a checkpoint; it cannot be copied")

    def close(self) -> None:
        self._group.close()


_group: RankGroup | None = None
"""The ranks of this process, which has at most one trainer with ranks, because torch has one default process group per
process."""


def open_part(
    config: LearnerConfig, found: Checkpoint | None, ranks: Ranks = ONE_RANK, local_rank: int = 0
) -> Restored:
    """Open the trainer of this rank, from a checkpoint or from the initial model. `local_rank` is its number on this
    host.

    Returns when all ranks have opened theirs. Raises ConfigError for a checkpoint that does not fit."""
    torch.set_num_threads(config.threads)
    config = structs.replace(config, device=device_of(config, ranks.size, local_rank))
    if ranks.size > 1 and config.device.startswith("cuda"):
        torch.cuda.set_device(config.device)  # where NCCL sends from
    ranks.agree(
        "the settings",
        msgspec.json.encode([_settings(config), config.seed, config.outputs, config.external_sources]),
        torch.__version__,
        transformers.__version__,
    )
    try:
        opened = _fresh(config, ranks) if found is None else _resumed(config, found, ranks)
    except CheckpointError as err:
        raise ConfigError(str(err)) from err
    ranks.agree("the number of updates in the weights", opened.engine.step)
    return opened


def _fresh(config: LearnerConfig, ranks: Ranks) -> Restored:
    if not config.model:
        raise ConfigError("`model` must be the folder of the initial model in transformers format, got ''", key="model")
    tokenizer = _tokenizer(Path(config.model))
    engine = TorchTrainer(_trainer(config, Path(config.model), tokenizer, ranks), tokenizer, config)
    return Restored(engine=engine, log=TrainedLog())


def _resumed(config: LearnerConfig, found: Checkpoint, ranks: Ranks) -> Restored:
    tokenizer = _tokenizer(found.path)
    trainer = _trainer(config, found.model_folder(config.lora, config.model), tokenizer, ranks)
    try:
        of_optimizer = found.restore(trainer)
    except CheckpointError:
        trainer.close()
        raise
    meta = found.meta
    changed = found.changed_settings(_settings(config)) or of_optimizer
    if ranks.rank == 0 and (changed or meta.config_digest != _digest(config)):
        settings = f": {', '.join(changed)}" if changed else ""
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


def _trainer(
    config: LearnerConfig, folder: Path, tokenizer: PreTrainedTokenizerBase | None, ranks: Ranks
) -> BatchTrainer:
    encode = None if tokenizer is None else partial(tokenizer.encode, add_special_tokens=False)
    try:
        plugins = Plugins(config, reward_weights=config.reward_weights)
        plan_start(config, folder, config.device, plugins, ranks=ranks.size, copies=config.copies_on_device)
        model = open_model(folder, device=config.device, ranks=ranks)
        return BatchTrainer(
            model,
            config,
            seed=config.seed,
            outputs=config.outputs,
            sources=config.sources,
            reward_weights=config.reward_weights,
            initial_model=lambda: open_model(Path(config.model), device=config.device, ranks=ranks),
            encode=encode,
            ranks=ranks,
            device=None if ranks.size == 1 else torch.device(config.device),
        )
    except ValueError as err:
        raise ConfigError(f"model: {err}", key="model") from err


def _tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer if the model folder has one. Otherwise checkpoints do not have a tokenizer either."""
    return load_tokenizer(folder) if (folder / "tokenizer_config.json").is_file() else None


def _tied(model: PreTrainedModel) -> tuple[str, ...]:
    if not has_tied_head(model):
        return ()
    keys = model._tied_weights_keys
    return tuple(f"{name}={source}" for name, source in keys.items()) if isinstance(keys, dict) else ()


def _settings(config: LearnerConfig) -> dict[str, Any]:
    """Return the settings that decide what an update does to the weights."""
    return {name: getattr(config, name) for name in (*UpdateConfig.__struct_fields__, "reward_weights")}


def _digest(config: LearnerConfig) -> str:
    return hashlib.sha256(msgspec.json.encode(_settings(config))).hexdigest()
