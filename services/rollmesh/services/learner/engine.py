"""The port between the learner and a trainer engine.

Implementations are loaded by dotted name, so that other modules of the learner do not import torch:
`engines/torch_trainer.py` uses `rollmesh.trainer`, `rollmesh.testing.fake_trainer` has no dependencies. Every call is
synchronous and may take long. One thread (`compute.ComputeThread`) makes all calls, so an implementation does not need
locks.

Guarantees of an implementation (tests/conformance/test_trainer_engine.py):
- Equal weights, state, seed and inputs give equal weights, bit for bit.
- A checkpoint holds the complete state: the update after a restore equals the update without it.
- A skipped update does not change weights.
- `score` uses the current weights, which `export_weights` writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollmesh.services.learner.config import LearnerConfig
from rollmesh.shared.config.plugin import Plugin, required, required_attribute
from rollmesh.shared.config.registry import Extension, Registry
from rollmesh.shared.domain.ledger_head import EMPTY, LedgerHead
from rollmesh.shared.domain.trajectory import FloatArray, GroupContext, IntArray, TrainedGroup, TrainingSample
from rollmesh.shared.weights.manifest import PROBE_TOLERANCE
from rollmesh.trainer.trained_log import TrainedLog


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The position of the weights in the history of updates."""

    update: int = 0
    """Last update in the weights; 0 for the initial ones."""
    policy: str = "main"
    incarnation: int = 0
    digest: str = ""
    """Commit digest after `update`; empty for 0."""
    head: LedgerHead = EMPTY
    """Head of the ledger that contains that commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One update. `verdicts` has one entry per input sample, in order: (sample id, reason for its exclusion or
    None)."""

    update: int
    applied: bool
    """False if the weights did not change: the update is committed as SKIPPED."""
    verdicts: tuple[tuple[str, str | None], ...]
    metrics: Mapping[str, float]
    groups: tuple[TrainedGroup, ...] = ()
    """Measurements on groups of the batch, which selectors read. They are optional, and empty for a skipped update."""

    @property
    def used_ids(self) -> list[str]:
        """Ids of the samples in the gradient. The commit digest covers them."""
        return [sample_id for sample_id, reason in self.verdicts if reason is None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedWeights:
    """Safetensors files by name, and pairs "name=name" of tensors that share storage.

    With an `adapter`, `files` are those of its base, and the weights are the base with the adapter merged."""

    files: Mapping[str, Path]
    adapter: Mapping[str, Path] = field(default_factory=dict)
    """The two files of a low-rank adapter as peft names them, or none."""
    tied: tuple[str, ...] = ()
    probe_tolerance: float = PROBE_TOLERANCE
    """Maximum difference between `score` and what an inference engine computes with these files, in nats."""


class TrainerEngine(Plugin):
    """Base of trainers: weights and the operations on them."""

    trains_model: bool = False
    """Whether it trains the run's model with the settings of `UpdateConfig`. If so, `rollmesh check` checks model, loss
    and device."""

    @classmethod
    @required
    def open(cls, config: LearnerConfig, options: Any) -> Restored:
        """Make a trainer from the newest complete checkpoint in `config.checkpoints`, or from `config.model` without a
        checkpoint.

        `options` is an instance of `Options`, without settings if the class has none. A damaged checkpoint is set aside
        and reported (`Restored.passed_by`), and the one before it is used; the attach then rolls back. Raises
        ConfigError or ValueError, with the remedy, if loading fails or every checkpoint is damaged.
        """
        raise NotImplementedError

    @required_attribute
    def step(self) -> int:
        """Number of updates in the current weights."""
        raise NotImplementedError

    @required_attribute
    def vocab_size(self) -> int:
        """Upper bound of token ids that can be scored. 0: inference engines cannot reproduce `score`, so versions have
        no probes."""
        raise NotImplementedError

    @required
    def update(self, k: int, samples: Sequence[TrainingSample], groups: Sequence[GroupContext]) -> StepResult:
        """Make update k = step + 1. A sample that cannot be trained on is excluded with a reason, without an error."""
        raise NotImplementedError

    @required
    def score(self, sequences: Sequence[IntArray]) -> list[FloatArray]:
        """Return the plain-softmax log-prob [n] of each token of each sequence given the previous tokens; entry 0 is 0.

        A sequence has the same result beside others as alone, up to float rounding."""
        raise NotImplementedError

    @required
    def export_weights(self, folder: Path) -> ExportedWeights:
        """Write the weights into an existing folder. Equal weights give equal bytes."""
        raise NotImplementedError

    @required
    def save(self, log: TrainedLog, position: Position, *, data_snapshot: bytes) -> Path:
        """Write a durable checkpoint atomically, remove old ones, and return its folder. The log continues from it."""
        raise NotImplementedError

    @required
    def copy_to_save(self, log: TrainedLog, position: Position, *, data_snapshot: bytes) -> Callable[[], Path]:
        """Copy a checkpoint into memory, and return a function that writes it like `save`. It is called in another
        thread, while updates continue, and at most one at a time. The log does not continue from the checkpoint; the
        caller calls `TrainedLog.rebase`.

        Raises ValueError if the trainer cannot copy its state."""
        raise NotImplementedError

    @required
    def close(self) -> None:
        """End the processes that it has started. The learner calls it once it has finished; after an error it opens
        another trainer."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A trainer restored from its newest complete checkpoint, or with the initial weights. All three agree on the last
    update."""

    engine: TrainerEngine
    log: TrainedLog
    position: Position = field(default_factory=Position)
    passed_by: tuple[str, ...] = ()
    """Descriptions of the errors of newer checkpoints, which were set aside. This one is older than the last trained
    update."""


OpenEngine = Callable[[LearnerConfig], Restored]
"""Function that opens a trainer, see `TrainerEngine.open`."""

TRAINERS = Registry(
    "trainer",
    {
        "torch": "rollmesh.services.learner.engines.torch_trainer:TorchTrainer",
        "fake": "rollmesh.testing.fake_trainer:FakeTrainer",
    },
    TrainerEngine,
)


def find_engine(chosen: Extension, base_dir: str | Path | None = None) -> OpenEngine:
    """Return the function that opens the trainer. A user's file is relative to `base_dir`. Raise ConfigError for a name
    or an option."""
    cls, options = TRAINERS.find(chosen.name, base_dir), TRAINERS.options(chosen, base_dir)
    return lambda config: cls.open(config, options)
