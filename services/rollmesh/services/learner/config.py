"""Configuration of the learner. Free of torch: a mesh reads it without loading any trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta

from rollmesh.shared.registry import Extension
from rollmesh.shared.retry import RetryConfig
from rollmesh.shared.settings import LIVE, NonEmptyStr, NonNegativeInt, PositiveFloat, PositiveInt, Settings
from rollmesh.shared.weights.transfer import TransferConfig
from rollmesh.trainer.config import UpdateConfig


class PublishConfig(Settings):
    """How weights leave the learner."""

    publish_every: NonNegativeInt = 0
    """Updates between published versions. 0 takes the run's own number, which admission counts on."""
    num_probes: NonNegativeInt = 4
    """Prompts whose log-probs go with each version, so that nodes can prove what they serve. 0 turns the proof off."""
    probe_tokens: Annotated[int, Meta(ge=2)] = 64
    """Longest probe, tokens. Longer ones see more of the model and cost a node more at every activation."""
    attempts_max: PositiveInt = 3
    """Uploads of one version before a depot that keeps losing it is an error."""
    transfer: TransferConfig = TransferConfig()
    """The upload itself."""


class LearnerRetryConfig(RetryConfig):
    """How long the learner retries while the gateway is away, and how often it restarts from a checkpoint."""

    restarts_max: NonNegativeInt = 8
    """Returns to the newest checkpoint without a new checkpoint in between; then the error is final. Two learners that fence
    each other end here."""


class LearnerConfig(UpdateConfig):
    """The trainer's settings, its model, and where its state is kept."""

    directory: Annotated[NonEmptyStr, LIVE] = "learner"
    """Folder of the learner: `checkpoints/`, `publishing/`, `metrics.jsonl`, `tensorboard/`."""
    engine: Extension = Extension("torch")
    """The trainer: `torch`, `fake` (no model, for tests), or your own as `file.py:Name`."""
    model: str = ""
    """Folder of the initial model (transformers format). Read only while there is no checkpoint."""
    reward_weights: dict[str, float] = {}
    """Reward name -> weight in the advantage. A mesh sets it to `reward.weights`, where both the finalizer and the trainer find it."""
    outputs: tuple[str, ...] = ()
    """Per-token outputs of the engine that samples carry. A mesh sets it to `rollout.outputs`."""
    seed: NonNegativeInt = 0
    """Key of the trainer's draws (minibatches). A checkpoint is only resumed under its own."""
    device: Annotated[str, LIVE] = "cpu"
    """Where the model lives, e.g. "cpu" or "cuda:0"."""
    threads: Annotated[PositiveInt, LIVE] = 1
    """Compute threads of the trainer. More than the free cores is slower than one: their barriers spin."""
    checkpoint_every: Annotated[PositiveInt, LIVE] = 10
    """Updates between checkpoints: what a crash costs at most. A checkpoint is written in full and synced."""
    keep_last: Annotated[PositiveInt, LIVE] = 3
    """Checkpoints kept."""
    quarantined_max: Annotated[NonNegativeInt, LIVE] = 2
    """Versions in a row that the first nodes may refuse; one more ends the learner with their cause. It trains on and publishes the next
    one meanwhile, as far as the bound allows: at max_staleness 0 nothing can be generated without the newest, so the first one ends it."""
    wait_s: Annotated[float, Meta(gt=0, le=60), LIVE] = 10.0
    """Longest wait of one request for a batch, at most 60; then it asks again and says what it waits for."""
    stop_s: Annotated[PositiveFloat, LIVE] = 60.0
    """How long leaving waits for the computation in progress, which cannot be interrupted."""
    tensorboard: Annotated[bool, LIVE] = True
    """Write TensorBoard event files beside `metrics.jsonl`."""
    publish: Annotated[PublishConfig, LIVE] = PublishConfig()
    """Weights."""
    retry: Annotated[LearnerRetryConfig, LIVE] = LearnerRetryConfig()
    """Retries of calls to the gateway, and restarts from a checkpoint."""

    @property
    def checkpoints(self) -> Path:
        return Path(self.directory) / "checkpoints"
