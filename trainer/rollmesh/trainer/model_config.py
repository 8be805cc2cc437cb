"""Read values from a model's configuration, whose field names differ between architectures, and choose the class of the
model.

A model that also takes images is loaded and written whole. Its text part is trained: the decoder, the embeddings and
the output layer. The other weights are frozen, and published unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.utils.import_utils import is_flash_attn_2_available

from rollmesh.shared.errors import ConfigError
from rollmesh.shared.weights.model_folder import positions_max
from rollmesh.trainer.config import ComputeConfig

FLASH = "flash_attention_2"
_ATTENTION_KEY = "learner.compute.attention"

CONFIG_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError)
"""Exceptions that transformers raises for a config.json that it cannot read, or whose values contradict each other."""
_CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "context_length")
_CAP_NAMES = ("final_logit_softcapping", "logits_soft_cap")
_FACTOR_NAMES = ("logit_scale", "lm_head_multiplier")
_FACTOR_OR_DIVISOR = "logits_scaling"
_MULTIPLIED = ("hyperclovax",)
"""Beginnings of the types of models that multiply by `logits_scaling`. The others divide by it."""


def one_line(error: BaseException) -> str:
    """Return an error of transformers in one line. Its first line alone often lacks the cause."""
    return " ".join(str(error).split())[:500]


def auto_class(config: PretrainedConfig) -> Any:
    """Return the class of transformers whose `from_pretrained` and `from_config` make the whole model of a
    configuration.

    transformers loads a folder of some models that also take images as their text part only, and of some models with an
    encoder as their decoder only, if it is asked for a causal language model. Here a part is chosen only if the
    configuration names its class.

    Raises ValueError for a kind of model that transformers has neither as a causal language model nor with images and
    text.
    """
    names: Any = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    causal, whole = (mapping.get(config.model_type) for mapping in names)
    if whole is not None and causal not in (config.architectures or ()):
        return AutoModelForImageTextToText
    known: Any = AutoModelForCausalLM._model_mapping
    is_decoder_alone = config.is_encoder_decoder and causal not in (config.architectures or ())
    if type(config) not in known or is_decoder_alone:
        raise ValueError(
            f"model_type `{config.model_type}` ({', '.join(config.architectures or ()) or 'without architectures'}) is "
            "neither a causal language model nor a model of images and text that transformers has; choose one of those"
        )
    return AutoModelForCausalLM


def text_part(model: PreTrainedModel) -> set[str]:
    """Return the names of the parameters of the decoder, the embeddings and the output layer. They are all parameters
    of a text model."""
    names = [name for name, _ in model.named_parameters()]
    if text_config(model) is model.config:
        return set(names)
    untyped: Any = model
    parts = (untyped.get_decoder(), untyped.get_input_embeddings(), untyped.get_output_embeddings())
    kept = {id(parameter) for part in parts if part is not None for parameter in part.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in kept}


def freeze_other_parts(model: PreTrainedModel) -> None:
    """Exclude the parameters outside the text part from training, such as those of a vision tower."""
    kept = text_part(model)
    for name, parameter in model.named_parameters():
        if name not in kept:
            parameter.requires_grad_(False)


def has_tied_head(model: PreTrainedModel) -> bool:
    """Return whether the output layer is the matrix of the embeddings."""
    embeddings: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return head is not None and getattr(head, "weight", None) is embeddings.weight


def text_config(model: PreTrainedModel) -> Any:
    """Return the configuration of the language model, which is a part of the whole if the model also takes images."""
    return model.config.get_text_config(decoder=True)


def vocab_size(model: PreTrainedModel) -> int:
    """Return the number of token ids that can be trained on and scored."""
    return int(text_config(model).vocab_size)


def hidden_size(model: PreTrainedModel) -> int:
    """Return the width of the last hidden states."""
    return int(text_config(model).hidden_size)


def context_length(model: PreTrainedModel | PretrainedConfig) -> int | None:
    """Return the most tokens of a sequence; None if the architecture has no limit (recurrent models, ALiBi).

    With `longrope` these are the original positions, as for engines."""
    whole = model.config if isinstance(model, PreTrainedModel) else model
    config = whole.get_text_config(decoder=True)
    values = (positions_max(config.to_dict()), *(getattr(config, name, None) for name in _CONTEXT_NAMES))
    return next((int(value) for value in values if value), None)


@dataclass(frozen=True, slots=True)
class LogitsRule:
    """What a model does with the numbers of its output layer: it multiplies them by `factor`, then caps them at +-`cap`
    (0: not)."""

    factor: float
    cap: float

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the logits [n, V] in float32."""
        logits = logits.float()
        if self.cap:
            return torch.tanh(logits * (self.factor / self.cap)) * self.cap
        return logits if self.factor == 1.0 else logits * self.factor


def logits_rule(model: PreTrainedModel) -> LogitsRule:
    """Return the rule by the fields of the configuration. The self-test compares its result with the model's own
    logits."""
    config = text_config(model)
    cap, factor, either = (
        next((float(value) for name in names if isinstance(value := getattr(config, name, None), int | float)), default)
        for names, default in ((_CAP_NAMES, 0.0), (_FACTOR_NAMES, 1.0), ((_FACTOR_OR_DIVISOR,), 1.0))
    )
    multiplies = str(config.model_type).startswith(_MULTIPLIED)
    return LogitsRule(factor * (either if multiplies else 1.0 / (either or 1.0)), cap)


def use_whole_attention(model: PreTrainedModel) -> None:
    """Select an attention that caps its scores, for a model that needs it. The default attention of transformers omits
    the cap."""
    if getattr(text_config(model), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")


def compute_device(model: PreTrainedModel) -> torch.device:
    """Return the device on which the model computes. Sharded weights may be stored on the host."""
    parameter = next(model.parameters())
    if isinstance(parameter, DTensor) and (kind := parameter.device_mesh.device_type) != "cpu":
        return torch.device(kind, torch.get_device_module(kind).current_device())
    return model.device


def choose_attention(
    model: PreTrainedModel, compute: ComputeConfig, device: torch.device, *, masked: bool = False
) -> None:
    """Select the attention of `compute.attention` on a device, before the model is sharded. A model whose scores are
    capped keeps its own, see `use_whole_attention`. `masked`: the attention must take a mask.

    Raises ConfigError if the package, the device or the model does not have it."""
    if getattr(text_config(model), "attn_logit_softcapping", None):
        return
    chosen: str = compute.attention
    runs = is_flash_attn_2_available() and device.type == "cuda"
    if chosen == FLASH and not runs:
        raise ConfigError(
            "`learner.compute.attention` flash_attention_2 needs the package flash-attn and a CUDA device, got the "
            f"device {device}; install it (pip install flash-attn), or set `auto`",
            key=_ATTENTION_KEY,
        )
    if chosen == "auto" and compute.precision == "bfloat16" and runs and model._supports_flash_attn and not masked:
        chosen = FLASH
    if chosen == "auto":
        return
    try:
        model.set_attn_implementation(chosen)
    except (ValueError, ImportError) as err:
        raise ConfigError(
            f"`learner.compute.attention` {chosen} does not run for {type(model).__name__}: {err}; set `auto`",
            key=_ATTENTION_KEY,
        ) from err


def check_trainable(model: object) -> None:
    """Raise ValueError for a model whose updates would be wrong or lost: adapters, parameters below float32.

    Raises TypeError for an object that is not a transformers model.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"the trainer takes a transformers.PreTrainedModel, got {type(model).__name__}; adapters (PEFT) are not "
            "supported, merge them into the model first (merge_and_unload)"
        )
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(
            f"{type(model).__name__} has adapters (PEFT) loaded, which are not supported; merge them first"
        )
    if model.get_output_embeddings() is None:  # type: ignore[no-untyped-call]
        raise ValueError(
            f"{type(model).__name__} has no output layer over the vocabulary; expected a causal language model"
        )
    dtypes = {p.dtype for p in model.parameters() if p.requires_grad} - {torch.float32}
    if dtypes:
        raise ValueError(
            f"{type(model).__name__} has trainable parameters of {', '.join(sorted(map(str, dtypes)))}, expected "
            "torch.float32: there is no float32 master copy, so small updates would be rounded away; load the model "
            "with dtype=torch.float32"
        )
