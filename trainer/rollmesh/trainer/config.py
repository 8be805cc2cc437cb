"""The trainer's settings, which a recipe composes. Free of torch, because the mesh and the reward service read them."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Literal

from msgspec import Meta

from rollmesh.shared.registry import Extension
from rollmesh.shared.settings import LIVE, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Settings, Share


class Normalization(Enum):
    """What the loss of one optimizer step averages over."""

    TOKEN = "token"
    """Every trained token counts alike: 1 / tokens of the step (DAPO, arXiv:2503.14476). Long samples weigh more."""
    SEQUENCE_MEAN = "sequence_mean"
    """Every sample counts alike: 1 / (samples x its tokens), as in GRPO. Favors brevity when right, length when wrong."""
    CONSTANT = "constant"
    """The sum over a sample's tokens, divided by a constant: 1 / (samples x `normalization_tokens`). The gradient of a token does not
    depend on the length of its sample (Dr. GRPO, arXiv:2503.20783)."""


_Decay = Annotated[float, Meta(ge=0, lt=1)]


class PackingConfig(Settings):
    """How many tokens run through the model at once."""

    row_tokens: PositiveInt = 128
    """Length of a row, in tokens. Longer: less padding, more attention work on masked pairs."""
    micro_batch_tokens: int = 1024
    """Maximum tokens (padding included) per forward and backward. A longer sequence runs alone. Bounds activation memory; a GPU
    wants 16384 and more."""

    def check_fields(self) -> None:
        if self.micro_batch_tokens < self.row_tokens:
            raise ValueError(
                f"`micro_batch_tokens` must be >= row_tokens = {self.row_tokens}, got {self.micro_batch_tokens}"
            )


class OptimizerConfig(Settings):
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101) with linear warm-up and linear decay over updates."""

    lr: PositiveFloat = 1e-6
    """Peak learning rate. The default suits models of about 0.5 to 10 billion parameters; smaller models need more (the demo's, of
    0.36 million, trains at 7e-4)."""
    modules_factor: PositiveFloat = 1.0
    """Factor of the learning rate of modules of loss terms, such as value heads, which begin untrained and often need a larger one."""
    betas: tuple[_Decay, _Decay] = (0.9, 0.95)
    """Decay rates of the first and the second moment."""
    epsilon: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled decay of matrices; vectors (norms, biases) are never decayed."""
    clip_norm: PositiveFloat = 1.0
    """Maximum global gradient norm. Longer gradients are scaled down to it."""
    warmup_updates: NonNegativeInt = 3
    """Updates until `lr` is reached, linearly from lr / warmup_updates."""
    decay_updates: NonNegativeInt = 0
    """Updates after which the rate is `lr * final_fraction`, and stays; 0 keeps it constant."""
    final_fraction: Share = 0.05
    """Learning rate after the decay, as a share of `lr`."""


class LossTerm(Extension):
    """One term of the loss: a name such as `ppo_clip`, `policy_gradient` or `kl`, or your own, with its factor in the sum."""

    weight: float = 1.0
    """Factor of the term."""
    where: Literal["policy", "external", "all"] | None = None
    """Tokens of the term by their source: those that the `policy` sampled, `external` ones, such as those of a given solution, or `all`.
    Absent: the choice of the term, which is `all` unless its documentation says otherwise. A term that reads behavior log-probs never
    gets a token without one. `learner.normalization` averages over the tokens of the term."""


class FeatureChoice(Extension):
    """A feature that every update computes: a built-in such as `entropy` or `other_prompt_logprob`, or your own."""

    under: Literal["start", "reference", "step", "current"] = "start"
    """Weights: the policy at the `start` of the update, the `reference` model, the policy before each optimizer `step`, or the `current`
    policy in the forward of the loss."""
    grad: bool = False
    """Whether the loss gets its gradient; under `current` only."""

    def check_fields(self) -> None:
        super().check_fields()
        if self.grad and self.under != "current":
            raise ValueError(f"`grad` requires under: current, got {self.under}")


class ReferenceConfig(Settings):
    """The reference model. It is loaded only if the estimator, the loss or a feature needs it, and takes as much memory as the policy."""

    kind: Literal["initial", "path", "average"] = "initial"
    """`initial` has the weights with which the run began, `path` those of a folder, and `average` a moving average of the policy's."""
    path: str = ""
    """Folder of the model in transformers format, for `path`, relative to the config file. It has the architecture and the vocabulary of
    the policy; its size may differ."""
    decay: Annotated[float, Meta(ge=0, lt=1)] = 0.99
    """Share of the old average that an update keeps, for `average`."""

    def check_fields(self) -> None:
        if (self.kind == "path") != bool(self.path):
            raise ValueError(f"`path` must be set exactly if kind is path, got kind {self.kind} and path {self.path!r}")


class UpdateConfig(Settings):
    """How one update is made: estimator, loss, update rule, optimizer."""

    estimator: Extension = Extension("grpo")
    """The estimator of a run, which the trainer and the finalizer both use. `grpo` compares weighted reward sums. `gdpo` normalizes each
    reward separately, which keeps weights meaningful. Your own: `file.py:Name`."""
    loss: tuple[LossTerm, ...] = (LossTerm("ppo_clip"),)
    """Terms whose weighted sum is the loss. A list in a configuration file replaces the list of the recipe."""
    normalization: Normalization = Normalization.TOKEN
    """What the loss of an optimizer step averages over: `token` counts every trained token alike, `sequence_mean` every sample;
    `constant` divides by samples x `normalization_tokens`."""
    normalization_tokens: PositiveInt = 1024
    """The constant of the normalization `constant`, in tokens. Choose the longest possible response of a sample."""
    optimizer: Annotated[OptimizerConfig, LIVE] = OptimizerConfig()
    """AdamW and its schedule."""
    packing: Annotated[PackingConfig, LIVE] = PackingConfig()
    """Tokens per forward."""
    update_rule: Extension = Extension("minibatches", {"num_minibatches": 2})
    """How a batch is cut into optimizer steps: `minibatches` takes random parts of the samples, for one or several epochs. Your own:
    `file.py:Name`."""
    features: dict[str, FeatureChoice] = {}
    """Further columns by name, which the trainer computes, for estimators, loss terms and update rules that read them."""
    reference: ReferenceConfig = ReferenceConfig()
    """The reference model."""
    report_entropy: Annotated[bool, LIVE] = True
    """Report the policy's entropy on trained tokens, at the temperature they were sampled at and without top-p and top-k; costs one
    softmax over the vocabulary per token."""

    def check_fields(self) -> None:
        names = [term.short_name for term in self.loss]
        if not names or len(set(names)) != len(names):
            raise ValueError(
                f"`loss` must have at least one term, each with a different name, got {', '.join(names) or 'none'}"
            )
