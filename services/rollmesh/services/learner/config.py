"""Configuration of the learner. Free of torch: a mesh reads it without loading any trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from rollmesh.shared.retry import RetryConfig
from rollmesh.shared.weights.transfer import TransferConfig

TORCH_TRAINER = "rollmesh.services.learner.engines.torch_trainer:open_trainer"
FAKE_TRAINER = "rollmesh.testing.fake_trainer:open_trainer"


class PublishConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How weights leave the learner."""

    publish_every: int = 0
    """Updates between published versions. 0 takes the run's own number, which admission counts on."""
    num_probes: int = 4
    """Prompts whose log-probs go with each version, so that nodes can prove what they serve. 0 turns the proof off."""
    probe_tokens: int = 64
    """Longest probe, tokens. Longer ones see more of the model and cost a node more at every activation."""
    attempts_max: int = 3
    """Uploads of one version before a depot that keeps losing it is an error."""
    transfer: TransferConfig = TransferConfig()
    """The upload itself."""

    def __post_init__(self) -> None:
        for name in ("publish_every", "num_probes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.probe_tokens < 2:
            raise ValueError(f"probe_tokens must be at least 2, got {self.probe_tokens}")
        if self.attempts_max < 1:
            raise ValueError(f"attempts_max must be at least 1, got {self.attempts_max}")


class LearnerRetryConfig(RetryConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long the learner retries while the gateway is away, and how often it restarts from a checkpoint."""

    restarts_max: int = 8
    """Returns to the newest checkpoint without a new checkpoint in between; then the error is final. Two learners that fence
    each other end here."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.restarts_max < 0:
            raise ValueError(f"restarts_max must not be negative, got {self.restarts_max}")


class LearnerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is trained, how, and where its state is kept."""

    directory: str = "learner"
    """Folder of the learner: `checkpoints/`, `publishing/`, `metrics.jsonl`, `tensorboard/`."""
    engine: str = TORCH_TRAINER
    """The trainer behind `engine.OpenEngine`: package.module:function or file.py:function."""
    engine_options: dict[str, Any] = {}
    """Settings of that engine alone; the torch trainer has none."""
    model: str = ""
    """Folder of the initial model (transformers format). Read only while there is no checkpoint."""
    recipe: str = "grpo"
    """Name in `rollmesh.trainer.recipes`: advantage, loss, optimiser, packing."""
    recipe_options: dict[str, Any] = {}
    """Changes to the recipe, nested as in `UpdateConfig`, e.g. {"optimizer": {"lr": 1e-4}}."""
    reward_weights: dict[str, float] = {}
    """Reward name -> weight in the advantage. A mesh sets it to `reward.weights`, where both the finalizer and the trainer find it."""
    outputs: tuple[str, ...] = ()
    """Per-token outputs of the engine that samples carry. A mesh sets it to `rollout.outputs`."""
    seed: int = 0
    """Key of the trainer's draws (minibatches). A checkpoint is only resumed under its own."""
    device: str = "cpu"
    """Where the model lives, e.g. "cpu" or "cuda:0"."""
    threads: int = 1
    """Compute threads of the trainer. More than the free cores is slower than one: their barriers spin."""
    checkpoint_every: int = 10
    """Updates between checkpoints: what a crash costs at most. A checkpoint is written in full and synced."""
    keep_last: int = 3
    """Checkpoints kept."""
    quarantined_max: int = 2
    """Versions in a row that the first nodes may refuse; one more ends the learner with their cause. It trains on and publishes the next
    one meanwhile, as far as the bound allows: at max_staleness 0 nothing can be generated without the newest, so the first one ends it."""
    wait_s: float = 10.0
    """Longest wait of one request for a batch, at most 60; then it asks again and says what it waits for."""
    stop_s: float = 60.0
    """How long leaving waits for the computation in progress, which cannot be interrupted."""
    tensorboard: bool = True
    """Write TensorBoard event files beside `metrics.jsonl`."""
    publish: PublishConfig = PublishConfig()
    """Weights."""
    retry: LearnerRetryConfig = LearnerRetryConfig()
    """Retries of calls to the gateway, and restarts from a checkpoint."""

    def __post_init__(self) -> None:
        for name in ("threads", "checkpoint_every", "keep_last"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.wait_s <= 60:
            raise ValueError(f"wait_s must be above 0 and at most 60, got {self.wait_s}")
        if self.stop_s <= 0:
            raise ValueError(f"stop_s must be positive, got {self.stop_s}")
        if self.quarantined_max < 0:
            raise ValueError(f"quarantined_max must not be negative, got {self.quarantined_max}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        if not self.directory:
            raise ValueError("directory must not be empty")

    @property
    def checkpoints(self) -> Path:
        return Path(self.directory) / "checkpoints"
