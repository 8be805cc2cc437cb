"""Run each tiny architecture in the trainer, and compare its log-probs and gradients with the plain forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollmesh.trainer.config import PackingConfig, UpdateConfig
from rollmesh.trainer.forward import ForwardMode, target_logits, target_logprobs
from rollmesh.trainer.model_config import context_length
from rollmesh.trainer.packing import pack
from rollmesh.trainer.sequences import Sequence1D, num_targets
from rollmesh.trainer.update import BatchTrainer
from tests.models.architectures import LENGTH_MAX, VOCAB_SIZE, build_model

PACKING = PackingConfig(row_tokens=64, micro_batch_tokens=192)


@dataclass(frozen=True, slots=True)
class TrainerResult:
    """The result for one model. `mode` is None if it is rejected, and `reason` is the error. Errors are absolute (nats)
    and relative."""

    mode: ForwardMode | None
    reason: str
    logprob_error: float = 0.0
    gradient_error: float = 0.0


def trainer_result(name: str, grown: float = 1.0) -> TrainerResult:
    """Run random sequences of 3-40 tokens, longer than every sliding window, through the trainer's forward and the
    plain one.

    With `grown`, the forward is chosen on fresh weights, which are then multiplied by it, as training from scratch
    makes them grow."""
    model = build_model(name, fresh=grown != 1.0)
    try:
        choice = BatchTrainer(model, UpdateConfig(), seed=0).forward_choice
    except ValueError as error:
        return TrainerResult(None, str(error))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(grown if parameter.ndim >= 2 else 1.0)
    sequences = _sequences(context_length(model) or LENGTH_MAX)
    logprobs, gradients = _through_trainer(model, sequences, choice.mode)
    plain_logprobs, plain_gradients = _plain(model, sequences)
    scale = max(float(g.abs().max()) for g in plain_gradients)
    return TrainerResult(
        choice.mode,
        choice.reason,
        float((logprobs - plain_logprobs).abs().max()),
        max(float((a - b).abs().max()) for a, b in zip(gradients, plain_gradients, strict=True)) / scale,
    )


def _sequences(longest: int) -> list[Sequence1D]:
    """Sequences longer than the context are never trained on."""
    rng = np.random.default_rng(1)
    made = []
    for length in (min(wanted, longest) for wanted in (LENGTH_MAX, 3, 17, 29, 8, 11, 36, 5)):
        mask = (rng.random(length) < 0.7).astype(np.uint8)
        mask[0] = 0
        mask[-1] = 1
        made.append(Sequence1D(rng.integers(0, VOCAB_SIZE, length).astype(np.int32), mask))
    return made


def _weighted(logprobs: Tensor) -> Tensor:
    return (logprobs * torch.linspace(-1.0, 1.5, len(logprobs))).sum()


def _through_trainer(
    model: PreTrainedModel, sequences: Sequence[Sequence1D], mode: ForwardMode
) -> tuple[Tensor, list[Tensor]]:
    parts = torch.zeros(num_targets(sequences))
    for batch in pack(sequences, mode.packing(PACKING)):
        parts = parts.index_add(0, batch.target_index, target_logprobs(target_logits(model, batch, mode), batch))
    return parts.detach(), _gradients(model, _weighted(parts))


def _plain(model: PreTrainedModel, sequences: Sequence[Sequence1D]) -> tuple[Tensor, list[Tensor]]:
    parts = []
    for sequence in sequences:
        ids = torch.as_tensor(sequence.token_ids).long()
        logprobs = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        chosen = logprobs[torch.arange(len(ids) - 1), ids[1:]]
        parts.append(chosen[torch.as_tensor(sequence.target_mask[1:]).bool()])
    whole = torch.cat(parts)
    return whole.detach(), _gradients(model, _weighted(whole))


def _gradients(model: PreTrainedModel, loss: Tensor) -> list[Tensor]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
