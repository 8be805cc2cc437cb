"""Configuration of the learner. It does not import torch, so that a mesh can read it without loading a trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from rollmesh.shared.config.registry import Extension
from rollmesh.shared.config.settings import (
    LIVE,
    NonEmptyStr,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Settings,
)
from rollmesh.shared.domain.sources import EXTERNAL_SOURCES, ExternalSource
from rollmesh.shared.domain.trajectory import Source
from rollmesh.shared.net.retry import RetryConfig
from rollmesh.shared.weights.transfer import TransferConfig
from rollmesh.trainer.config import UpdateConfig


class PublishConfig(Settings):
    """Settings for publishing weights."""

    publish_every: NonNegativeInt = 0
    """Updates between published versions. 0 uses the run's number, which admission assumes."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of published weights. `bfloat16` halves what is stored and sent; it suits engines in bfloat16, which
    reject float32 weights unless `inference.cast_weights` is true. Checkpoints always have float32, and so has a
    published adapter, whose base is rounded."""
    num_probes: NonNegativeInt = 4
    """Number of prompts whose log-probs are published with each version, so that nodes can verify it. 0 disables the
    check."""
    probe_tokens: Annotated[int, Meta(ge=2)] = 64
    """Maximum length of a probe, in tokens. Longer probes cover more of the model and cost more at every activation."""
    attempts_max: PositiveInt = 3
    """Maximum number of uploads of one version if the depot loses it. Then the learner fails."""
    transfer: TransferConfig = TransferConfig()
    """Limits of the upload."""


class LearnerRetryConfig(RetryConfig):
    """Retries while the gateway is unreachable, and restarts from a checkpoint."""

    restarts_max: NonNegativeInt = 8
    """Maximum number of consecutive restarts from a checkpoint without a new checkpoint; then the error is permanent.
    This limit also ends a cycle in which two learners attach alternately and fence each other."""


class LearnerConfig(UpdateConfig):
    """Settings of the trainer, its model and the storage of its state."""

    directory: Annotated[NonEmptyStr, LIVE] = "learner"
    """Folder of the learner: `checkpoints/`, `publishing/`, `metrics.jsonl`, `tensorboard/`. `rollmesh train` sets it
    to the run folder."""
    engine: Extension = Extension("torch")
    """The trainer: `torch`, `fake` (without a model, for tests), or a custom one as `file.py:Name`."""
    model: str = ""
    """Folder of the initial model (transformers format). It is read only if there is no checkpoint."""
    reward_weights: dict[str, float] = {}
    """Reward name -> weight in the advantage. A mesh sets it to `reward.weights`, which the finalizer uses too."""
    outputs: tuple[str, ...] = ()
    """Arrays of engine outputs in the samples. A mesh sets it to those of `rollout.outputs`."""
    external_sources: Annotated[tuple[ExternalSource, ...], LIVE] = ()
    """Sources other than the policy whose tokens are trained. A mesh sets it to `run.external_sources`, and the learner
    to what the coordinator reports when it attaches."""
    seed: NonNegativeInt = 0
    """Seed of the trainer's draws (minibatches). A checkpoint can only be resumed with its own seed."""
    device: Annotated[str, LIVE] = "cpu"
    """Device of the model, e.g. "cpu" or "cuda:0"."""
    threads: Annotated[PositiveInt, LIVE] = 1
    """Compute threads of the trainer. More threads than free cores are slower than one thread, because their barriers
    spin."""
    checkpoint_every: Annotated[PositiveInt, LIVE] = 10
    """Updates between checkpoints: the maximum loss of a crash. A checkpoint is written completely and synced."""
    checkpoint_async: Annotated[bool, LIVE] = False
    """Copy weights and optimizer state to the memory of the CPU, and write the checkpoint while training continues. One
    is written at a time, and reported once it is durable. A crash meanwhile loses the updates since the one before. It
    needs one rank without `lora`, and memory of the host for the copy: 12 bytes per parameter with adamw. The memory
    plan of a device `cpu` contains it."""
    keep_last: Annotated[PositiveInt, LIVE] = 3
    """Number of checkpoints kept."""
    quarantined_max: Annotated[NonNegativeInt, LIVE] = 2
    """Maximum number of consecutive versions that canary nodes may refuse. With one more the learner fails with their
    cause. Meanwhile it continues to train and publish within the staleness bound. At max_staleness 0 the first refusal
    ends it, because generation needs the newest version."""
    prefetch_bytes_max: Annotated[NonNegativeInt, LIVE] = 256 << 20
    """Maximum size of payloads that are loaded while the learner waits for a batch or trains, in bytes, so that it does
    not wait for them after the lease. 0 fetches every payload after the lease."""
    wait_s: Annotated[float, Meta(gt=0, le=60), LIVE] = 10.0
    """Maximum wait of one request for a batch, in seconds, at most 60. Then the learner reports the wait and
    retries."""
    stop_s: Annotated[PositiveFloat, LIVE] = 60.0
    """Maximum wait for the running computation at shutdown, in seconds. A computation cannot be interrupted."""
    tensorboard: Annotated[bool, LIVE] = True
    """Write TensorBoard event files next to `metrics.jsonl`."""
    publish: Annotated[PublishConfig, LIVE] = PublishConfig()
    """Publishing of weights."""
    retry: Annotated[LearnerRetryConfig, LIVE] = LearnerRetryConfig()
    """Retries of calls to the gateway, and restarts from a checkpoint."""

    @property
    def copies_on_device(self) -> bool:
        """Whether the copy of a checkpoint needs memory of the device, for the memory plan."""
        return self.checkpoint_async and self.device.startswith("cpu")

    @property
    def sources(self) -> frozenset[Source]:
        """The members of `external_sources`."""
        return frozenset(Source[name.upper()] for name in self.external_sources)

    @property
    def checkpoints(self) -> Path:
        return Path(self.directory) / "checkpoints"

    def check_fields(self) -> None:
        super().check_fields()
        if unknown := set(self.external_sources) - set(EXTERNAL_SOURCES):
            raise ValueError(
                f"`external_sources` must be some of {', '.join(sorted(EXTERNAL_SOURCES))}, got "
                f"{', '.join(sorted(unknown))}"
            )
        if self.checkpoint_async and self.compute.ranks > 1:
            raise ValueError(
                f"`checkpoint_async` must be false with compute.ranks = {self.compute.ranks}: every rank writes a part "
                "of a checkpoint"
            )
        if self.checkpoint_async and self.lora.rank:
            raise ValueError("`checkpoint_async` must be false with `lora.rank` > 0: a checkpoint of adapters is small")
