"""The configuration that `rollmesh sft` reads. Free of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from rollmesh.sft.rated import RatedConfig
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.config.settings import NonEmptyStr, NonNegativeInt, PositiveInt, Settings, Share
from rollmesh.trainer.config import LossTermChoice, UpdateConfig


class SftLearnerConfig(UpdateConfig):
    """The trainer. Its keys are those of `learner` of a run, with other defaults: every token of the assistant is
    imitated."""

    estimator: Extension = Extension("none")
    """Advantages are not used."""
    loss: tuple[LossTermChoice, ...] = (LossTermChoice("imitation"),)
    """The negative log-likelihood of the assistant's tokens."""
    update_rule: Extension = Extension("minibatches", {"num_minibatches": 1})
    """One optimizer step per update."""
    device: str = "cpu"
    """Device of the model, e.g. `cuda:0`."""
    threads: PositiveInt = 1
    """Compute threads of torch."""
    tensorboard: bool = True
    """Write TensorBoard event files next to `metrics.jsonl`."""

    def check_fields(self) -> None:
        super().check_fields()
        if self.compute.ranks > 1:
            raise ValueError(
                f"`compute.ranks` must be 1, got {self.compute.ranks}: `rollmesh sft` trains in one process; remove "
                "the key"
            )


class SftConfig(Settings):
    """Supervised fine-tuning: a model, conversations, and how to train on them."""

    name: Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,64}$")] = "sft"
    """Name of the run, in the name of its folder."""
    model: NonEmptyStr
    """Folder of the initial model in transformers format, with a chat template, relative to this file."""
    data: NonEmptyStr
    """JSONL file, relative to this file. Each line is an object with `messages` in the format of the OpenAI API, and
    optionally `tools`; other keys are ignored. Only the turns of the assistant are trained, without those with
    `"weight": 0`."""
    rated: RatedConfig | None = None
    """If set, `data` and `heldout` are files of rated samples, as `rollmesh rollout --out` writes them, among which
    conversations are chosen by their rewards, or made from critiques."""
    heldout: str = ""
    """JSONL file of conversations that are not trained, for the held-out loss."""
    heldout_share: Share = 0.05
    """Without `heldout`: share of the conversations of `data` that is held out, at most 1000. 0 measures no held-out
    loss."""
    too_long: Literal["error", "drop"] = "error"
    """What happens to conversations that are longer than the context of the model."""
    seed: NonNegativeInt = 0
    """Order of the conversations, and the held-out ones."""
    epochs: PositiveInt = 1
    """Passes over the data."""
    batch_size: PositiveInt = 32
    """Conversations per update."""
    eval_every: PositiveInt = 50
    """Updates between measurements of the held-out loss. It is also measured before the first update and after the
    last."""
    checkpoint_every: PositiveInt = 50
    """Updates between checkpoints: the maximum loss of a crash."""
    keep_last: PositiveInt = 3
    """Number of checkpoints kept."""
    learner: SftLearnerConfig = SftLearnerConfig()
    """Loss, optimizer, and memory."""

    def located(self, base_dir: Path) -> SftConfig:
        """Return the same configuration with absolute paths. Raises ConfigError if the reference model does not
        exist."""
        found = {
            name: str((base_dir / Path(value).expanduser()).resolve())
            for name in ("model", "data", "heldout")
            if (value := getattr(self, name))
        }
        return msgspec.structs.replace(self, learner=self.learner.located(base_dir), **found)
