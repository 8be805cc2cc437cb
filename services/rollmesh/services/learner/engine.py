"""The port to a trainer: what the learner needs of whatever makes updates.

Implementations are loaded by dotted name, so that the learner's own modules never import torch: `engines/torch_trainer.py`
drives `rollmesh.trainer`, `engines/fake_trainer.py` needs nothing. Every call is synchronous and may take long; one
thread (`compute.ComputeThread`) makes them all, so an implementation needs no locks.

What an implementation promises (tests/conformance/test_trainer_engine.py):
- Equal weights, state, seed and inputs give equal weights, bit for bit.
- A checkpoint holds all of it: the update after a restore equals the one that would have come.
- A skipped update changes no weights.
- `score` is about the present weights, the ones that `export_weights` writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from rollmesh.services.learner.config import LearnerConfig
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.ledger_head import EMPTY, LedgerHead
from rollmesh.shared.registry import Extension, Registry
from rollmesh.shared.trajectory import FloatArray, GroupContext, IntArray, TrainingSample
from rollmesh.trainer.trained_log import TrainedLog


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a history of weights stands."""

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
    """One update. `verdicts` has one entry per sample given, in order: (sample id, why it was left out, or None)."""

    update: int
    applied: bool
    """False if nothing changed: the update is committed as SKIPPED."""
    verdicts: tuple[tuple[str, str | None], ...]
    metrics: Mapping[str, float]

    @property
    def used_ids(self) -> list[str]:
        """Samples in the gradient: what the commit digest is over."""
        return [sample_id for sample_id, reason in self.verdicts if reason is None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedWeights:
    """Safetensors files by name, and pairs "name=name" of tensors that share storage."""

    files: Mapping[str, Path]
    tied: tuple[str, ...] = ()


class TrainerEngine(Protocol):
    """Weights and the means to change them."""

    @property
    def step(self) -> int:
        """Number of updates behind the present weights."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids below this may be scored. 0: no inference engine can reproduce `score`, so versions go without probes."""
        ...

    def update(self, k: int, samples: Sequence[TrainingSample], groups: Sequence[GroupContext]) -> StepResult:
        """Makes update k = step + 1. A sample that cannot be trained on is left out with a reason, never an error."""
        ...

    def score(self, token_ids: IntArray) -> FloatArray:
        """Plain-softmax log-prob [n] of each token given those before it; entry 0 is 0."""
        ...

    def export_weights(self, folder: Path) -> ExportedWeights:
        """Writes the weights into an existing folder. Equal weights make equal bytes."""
        ...

    def save(self, log: TrainedLog, position: Position, *, data_snapshot: bytes) -> Path:
        """Writes a durable checkpoint, atomically, and removes old ones. The log continues from it. Returns its folder."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A trainer as its newest whole checkpoint left it, or with the initial weights. All three agree on the last update."""

    engine: TrainerEngine
    log: TrainedLog
    position: Position = field(default_factory=Position)
    passed_by: tuple[str, ...] = ()
    """What was wrong with newer checkpoints, in words: they are set aside, and this one is older than what was trained."""


class TrainerClass(Protocol):
    """What a trainer's class declares. Its `Options`, if it has settings, are a strict struct."""

    trains_model: ClassVar[bool]
    """Whether it trains the model of the run by the settings of `UpdateConfig`. If so, `rollmesh check` checks model, loss and device."""

    @classmethod
    def open(cls, config: LearnerConfig, options: Any) -> Restored:
        """Make a trainer from the newest whole checkpoint in `config.checkpoints`, or from `config.model` if there is none.

        `options` is an instance of the class's `Options`, without settings if it has none. A damaged checkpoint is set aside and
        reported (`Restored.passed_by`), and the one before it is used; the attach then rolls back. Raises ConfigError or ValueError,
        with the remedy, for what cannot be loaded. Checkpoints of which none is whole are such an error.
        """
        ...


OpenEngine = Callable[[LearnerConfig], Restored]
"""Opens a trainer, see `TrainerClass.open`."""

TRAINERS = Registry(
    "trainer",
    {
        "torch": "rollmesh.services.learner.engines.torch_trainer:TorchTrainer",
        "fake": "rollmesh.testing.fake_trainer:FakeTrainer",
    },
)


def find_engine(chosen: Extension, base_dir: str | Path | None = None) -> OpenEngine:
    """Return the function that opens the trainer. A user's file is relative to `base_dir`. Raises ConfigError for a name or an option."""
    cls, options = TRAINERS.find(chosen.name, base_dir), TRAINERS.options(chosen, base_dir)
    if not hasattr(cls, "open"):
        raise ConfigError(f"trainer `{chosen.name}` must have a class method `open(config, options)`", name=chosen.name)
    return lambda config: cls.open(config, options)
