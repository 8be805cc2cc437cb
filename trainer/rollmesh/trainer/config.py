"""The trainer's settings, which a recipe composes. Free of torch, because the mesh and the reward service read them."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Literal, Self

from msgspec import Meta, structs

from rollmesh.shared.config.registry import Extension
from rollmesh.shared.config.settings import (
    LIVE,
    NonEmptyStr,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Settings,
    Share,
)
from rollmesh.shared.weights.model_folder import find_model


class Normalization(Enum):
    """What the loss of one optimizer step averages over."""

    TOKEN = "token"
    """Every trained token counts alike: 1 / tokens of the step (DAPO, arXiv:2503.14476). Long samples weigh more."""
    SEQUENCE_MEAN = "sequence_mean"
    """Every sample counts alike: 1 / (samples x its tokens), as in GRPO. Favors brevity when right, length when
    wrong."""
    CONSTANT = "constant"
    """The sum over a sample's tokens, divided by a constant: 1 / (samples x `normalization_tokens`). The gradient of a
    token does not depend on the length of its sample (Dr. GRPO, arXiv:2503.20783)."""


_Decay = Annotated[float, Meta(ge=0, lt=1)]


class PackingConfig(Settings):
    """How many tokens run through the model at once."""

    row_tokens: PositiveInt = 128
    """Length of a row, in tokens. Longer: less padding, more attention work on masked pairs."""
    micro_batch_tokens: int = 1024
    """Maximum tokens (padding included) per forward and backward. A longer sequence runs alone. Bounds activation
    memory; a GPU wants 16384 and more."""
    shared_row_tokens: NonNegativeInt = 0
    """Maximum length of a row in which sequences share a common prefix, such as the samples of a group their prompt:
    the prefix is computed once, for g samples p + g r tokens instead of g (p + r). 0 shares nothing. More samples than
    fit are divided between rows, and samples share only where that saves a tenth of the estimated work, because
    attention costs the square of a row. A row needs a mask of 4 bytes (2 in bfloat16) per pair of its tokens. Log-probs
    and gradients are the same within rounding. Not every model allows it: a start and `rollmesh check` verify it."""

    def check_fields(self) -> None:
        for name in ("row_tokens", "shared_row_tokens"):
            if self.micro_batch_tokens < getattr(self, name):
                raise ValueError(
                    f"`micro_batch_tokens` must be >= {name} = {getattr(self, name)}, got {self.micro_batch_tokens}"
                )


class ComputeConfig(Settings):
    """How the model is computed: memory, precision, devices. Values stay the same within rounding unless a key says
    otherwise."""

    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of the forward and the backward. With `bfloat16` the optimizer updates weights in float32, of which
    each forward and backward gets a rounded copy, layer by layer; the gradients of micro-batches are summed in float32,
    and log-probs are computed in float32 from the logits. Log-probs differ from those in float32 by rounding."""
    attention: Literal["auto", "sdpa", "flash_attention_2"] = "auto"
    """Implementation of attention in transformers. `flash_attention_2` needs the package flash-attn, a CUDA device and
    `precision: bfloat16`; it holds no mask of tokens x tokens for packed rows. `auto` selects it where it runs, and
    else what transformers selects."""
    offload: Literal["none", "reference", "optimizer"] = "none"
    """What is stored in the memory of the host and not in that of the device. `reference`: the weights of the reference
    model, which a pass copies to the device layer by layer. `optimizer`: also the float32 weights, their gradients and
    the optimizer state; the optimizer step then runs on the CPU. On a CPU it saves nothing."""
    gradient_checkpointing: bool = False
    """Keep only the input of each decoder layer, and compute the inside of a layer again in the backward pass. It saves
    most of the activations, and costs one more forward pass of the layers per micro-batch. The results are the same."""
    logprob_chunk_tokens: NonNegativeInt = 1024
    """Maximum number of trained tokens whose distributions over the vocabulary exist at once. A micro-batch with more
    runs its output layer in parts, and the backward pass computes each part again. The results are the same up to the
    order of sums. 0 never cuts; the memory of the logits is then proportional to the trained tokens of a
    micro-batch."""
    ranks: PositiveInt = 1
    """Processes that train together, on this host. Each holds a part of the weights, gradients and optimizer state, and
    runs a part of the micro-batches. With torchrun the processes exist already, also on several hosts, and their number
    applies."""
    rank_timeout_s: Annotated[float, Meta(gt=0)] = 300.0
    """Maximum time that a rank waits for the others inside a computation, in seconds. Then the session ends, and
    training resumes from the newest checkpoint. It must exceed the difference between the ranks' times for their
    micro-batches."""

    def check_fields(self) -> None:
        if self.attention == "flash_attention_2" and self.precision != "bfloat16":
            raise ValueError(
                "`precision` must be bfloat16 with attention: flash_attention_2, whose kernels compute in half "
                f"precision, got {self.precision}"
            )

    @property
    def shards(self) -> bool:
        """Whether FSDP holds the weights of the policy, also those of a single rank."""
        return self.ranks > 1 or self.precision == "bfloat16" or self.offload == "optimizer"


class LoraSettings(Settings):
    """Low-rank adapters (LoRA, Hu et al., arXiv:2106.09685), by the package peft: the weight W of a linear layer
    becomes W + (alpha / rank) B A, and only A and B are trained. It needs the optimizer's memory for them alone, and a
    learning rate of about ten times that of full training."""

    rank: NonNegativeInt = 0
    """Rank of the adapters: the rows of A and the columns of B. 0 trains all weights, without adapters."""
    alpha: PositiveFloat = 32.0
    """Scale of the adapters: B A is multiplied by alpha / rank."""
    targets: tuple[NonEmptyStr, ...] = ()
    """Linear layers that get an adapter, by the last parts of their names, e.g. `q_proj` or `mlp.down_proj`. Empty: all
    linear layers except the output layer. Stacked matrices of experts are not linear layers, and get none."""
    publish: Literal["adapter", "merged"] = "adapter"
    """`adapter` publishes the base once and then the adapter alone, which every node merges into its copy of the base.
    `merged` publishes whole weights, which servers that rollmesh does not start need."""


class ParameterGroup(Settings):
    """Parameters of the policy with another learning rate or decay."""

    names: NonEmptyStr
    """Pattern of parameter names as in a shell, e.g. `*.embed_tokens.*`. It must match a trainable parameter."""
    lr_factor: NonNegativeFloat = 1.0
    """Factor of the learning rate. 0 keeps the parameters as they are."""
    weight_decay: NonNegativeFloat | None = None
    """Decoupled decay of these parameters, vectors included. Absent: that of the optimizer for matrices, and none for
    vectors."""


class OptimizerConfig(Settings):
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101) with linear warm-up, and linear or cosine decay over updates."""

    kind: Literal["adamw", "adamw_8bit"] = "adamw"
    """`adamw_8bit` keeps the moments in 8 bits (Dettmers et al., arXiv:2110.02861), by the package torchao: 2 instead
    of 8 bytes per parameter. It compiles its kernel at the first step."""
    lr: PositiveFloat = 1e-6
    """Peak learning rate. The default suits models of about 0.5 to 10 billion parameters; smaller models need more (the
    demo's, of 0.36 million, trains at 7e-4)."""
    modules_factor: PositiveFloat = 1.0
    """Factor of the learning rate of modules of loss terms, such as value heads, which begin untrained and often need a
    larger one."""
    groups: tuple[ParameterGroup, ...] = ()
    """Parameters with another learning rate or decay. The first group whose pattern matches a name applies."""
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
    decay: Literal["linear", "cosine"] = "linear"
    """Shape of the decay from `lr` to `lr * final_fraction`. `cosine` is half a period (Loshchilov & Hutter,
    arXiv:1608.03983)."""
    decay_updates: NonNegativeInt = 0
    """Updates after which the rate is `lr * final_fraction`, and stays; 0 keeps it constant."""
    final_fraction: Share = 0.05
    """Learning rate after the decay, as a share of `lr`."""

    def check_fields(self) -> None:
        if self.decay == "cosine" and not self.decay_updates:
            raise ValueError("`decay: cosine` requires `decay_updates`, the number of updates of the decay, got 0")


class LossTermChoice(Extension):
    """One term of the loss: a name such as `ppo_clip`, `policy_gradient` or `kl`, or your own, with its factor in the
    sum."""

    weight: float = 1.0
    """Factor of the term."""
    where: Literal["policy", "external", "all"] | None = None
    """Tokens of the term by their source: those that the `policy` sampled, `external` ones, such as those of a given
    solution, or `all`. Absent: the choice of the term, which is `all` unless its documentation says otherwise. A term
    that reads behavior log-probs never gets a token without one. `learner.normalization` averages over the tokens of
    the term."""


class FeatureChoice(Extension):
    """A feature that every update computes: a built-in such as `entropy` or `other_prompt_logprob`, or your own."""

    under: Literal["start", "reference", "step", "current"] = "start"
    """Weights: the policy at the `start` of the update, the `reference` model, the policy before each optimizer `step`,
    or the `current` policy in the forward of the loss."""
    grad: bool = False
    """Whether the loss gets its gradient; under `current` only."""

    def check_fields(self) -> None:
        super().check_fields()
        if self.grad and self.under != "current":
            raise ValueError(f"`grad` requires under: current, got {self.under}")


class ReferenceConfig(Settings):
    """The reference model. It is loaded only if the estimator, the loss or a feature needs it, and takes as much memory
    as the policy."""

    kind: Literal["initial", "path", "average"] = "initial"
    """`initial` has the weights with which the run began, `path` those of a folder, and `average` a moving average of
    the policy's."""
    path: str = ""
    """Folder of the model in transformers format, for `path`, relative to the config file. It has the architecture and
    the vocabulary of the policy; its size may differ."""
    decay: Annotated[float, Meta(ge=0, lt=1)] = 0.99
    """Share of the old average that an update keeps, for `average`."""

    def check_fields(self) -> None:
        if (self.kind == "path") != bool(self.path):
            raise ValueError(f"`path` must be set exactly if kind is path, got kind {self.kind} and path {self.path!r}")


class UpdateConfig(Settings):
    """How one update is made: estimator, loss, update rule, optimizer."""

    estimator: Extension = Extension("grpo")
    """The estimator of a run, which the trainer and the finalizer both use. `grpo` compares weighted reward sums.
    `gdpo` normalizes each reward separately, which keeps weights meaningful. Your own: `file.py:Name`."""
    loss: tuple[LossTermChoice, ...] = (LossTermChoice("ppo_clip"),)
    """Terms whose weighted sum is the loss. A list in a configuration file replaces the list of the recipe."""
    normalization: Normalization = Normalization.TOKEN
    """What the loss of an optimizer step averages over: `token` counts every trained token alike, `sequence_mean` every
    sample; `constant` divides by samples x `normalization_tokens`."""
    normalization_tokens: PositiveInt = 1024
    """The constant of the normalization `constant`, in tokens. Choose the longest possible response of a sample."""
    group_weight: Literal["samples", "equal"] = "samples"
    """How much groups of different size count. `samples`: every sample has the weight that `normalization` gives it, so
    a group of 16 counts four times as much as one of 4. `equal`: the samples of an update are weighted so that every
    group has the same sum of sample weights, whatever its size."""
    optimizer: Annotated[OptimizerConfig, LIVE] = OptimizerConfig()
    """AdamW and its schedule."""
    packing: Annotated[PackingConfig, LIVE] = PackingConfig()
    """Tokens per forward."""
    compute: Annotated[ComputeConfig, LIVE] = ComputeConfig()
    """Memory and precision of the model's computation."""
    lora: LoraSettings = LoraSettings()
    """Train low-rank adapters instead of the weights of the model."""
    update_rule: Extension = Extension("minibatches", {"num_minibatches": 2})
    """How a batch is cut into optimizer steps: `minibatches` takes random parts of the samples, for one or several
    epochs. Your own: `file.py:Name`."""
    features: dict[str, FeatureChoice] = {}
    """Further columns by name, which the trainer computes, for estimators, loss terms and update rules that read
    them."""
    reference: ReferenceConfig = ReferenceConfig()
    """The reference model."""
    router_replay: bool = False
    """Send the tokens of a mixture of experts to the experts that the engine has recorded for them, so that engine and
    trainer, which round differently, run the same experts. The weights of the experts are those of the trainer's
    routers. It needs `routed_experts` in `rollout.outputs`. Tokens without a record, such as those of prompts, are
    routed by the trainer. Not every model allows it: a start and `rollmesh check` verify it."""
    report_entropy: Annotated[bool, LIVE] = True
    """Report the policy's entropy on trained tokens, at the temperature they were sampled at and without top-p and
    top-k; costs one softmax over the vocabulary per token."""

    def check_fields(self) -> None:
        names = [term.short_name for term in self.loss]
        if not names or len(set(names)) != len(names):
            raise ValueError(
                f"`loss` must have at least one term, each with a different name, got {', '.join(names) or 'none'}"
            )
        if self.lora.rank and (self.compute.precision != "float32" or self.compute.offload != "none"):
            raise ValueError(
                f"`lora.rank` must be 0 with compute.precision {self.compute.precision} and compute.offload "
                f"{self.compute.offload}, got {self.lora.rank}: adapters train in float32 on the device"
            )
        if self.compute.shards and self.optimizer.kind != "adamw":
            raise ValueError(
                f"`optimizer.kind` must be adamw with compute.ranks = {self.compute.ranks}, compute.precision "
                f"{self.compute.precision} and compute.offload {self.compute.offload}, got {self.optimizer.kind}: its "
                "state is not divided between ranks, and it does not take the weights of a trainer in bfloat16 or on "
                "the host"
            )
        if self.packing.shared_row_tokens and self.compute.attention == "flash_attention_2":
            raise ValueError(
                "`packing.shared_row_tokens` must be 0 with compute.attention: flash_attention_2, got "
                f"{self.packing.shared_row_tokens}: its kernels take no mask; set compute.attention to auto or sdpa"
            )
        if self.lora.rank and self.compute.ranks > 1:
            raise ValueError(
                f"`lora.rank` must be 0 with compute.ranks = {self.compute.ranks}, got {self.lora.rank}: adapters "
                "train on one rank"
            )
        if self.lora.rank and self.reference.kind == "average":
            raise ValueError(
                "`reference.kind` must be initial or path with lora.rank > 0, got average: the average of A and B is "
                "not that of the weights"
            )

    def located(self, base_dir: Path) -> Self:
        """Return the same settings with absolute files of the user. Raises ConfigError if the reference model does not
        exist."""
        reference = self.reference
        if reference.kind == "path":
            folder = find_model(reference.path, base_dir, "learner.reference.path")
            reference = structs.replace(reference, path=str(folder))
        return structs.replace(
            self,
            estimator=self.estimator.located(base_dir),
            loss=tuple(term.located(base_dir) for term in self.loss),
            update_rule=self.update_rule.located(base_dir),
            features={name: choice.located(base_dir) for name, choice in self.features.items()},
            reference=reference,
        )
