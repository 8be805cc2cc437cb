"""Compute log-probs of wanted tokens under a model, packed or one sequence at a time.

The output layer runs on wanted positions only, because for a real vocabulary its logits would be the largest tensor of a step.
Log-probs are computed at the temperature of the sampled token, because the behavior log-probs are under the sampling distribution.
Truncation (top-p, top-k) is NOT reproduced. The behavior log-probs of truncated samples are renormalized over the kept tokens; the
log-probs here are not, so the ratio is biased low. `metrics` reports the share of such tokens.
Collaborators: `packing` (micro-batches), `update`, `sft`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollmesh.shared.trajectory import FloatArray, IntArray
from rollmesh.trainer.config import PackingConfig
from rollmesh.trainer.packing import MicroBatch, pack
from rollmesh.trainer.sequences import Sequence1D, num_targets


class ForwardMode(Enum):
    """How sequences run through the model. `self_test` chooses it."""

    PACKED = "packed"
    """Several sequences per row. The output layer runs on wanted positions only."""
    UNPACKED = "unpacked"
    """One sequence per forward. The logits are those of the model's own forward."""

    def packing(self, config: PackingConfig) -> PackingConfig:
        """Return the settings of `pack` for this mode."""
        return config if self is ForwardMode.PACKED else _ALONE


_ALONE = PackingConfig(row_tokens=1, micro_batch_tokens=1)


def target_logits(model: PreTrainedModel, batch: MicroBatch, mode: ForwardMode = ForwardMode.PACKED) -> Tensor:
    """Return logits [m, V] in float32 at the positions that predict the wanted tokens. `batch` must be packed for `mode`."""
    return target_outputs(model, batch, mode, hidden=False)[0]


def target_outputs(
    model: PreTrainedModel, batch: MicroBatch, mode: ForwardMode, *, hidden: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the logits as `target_logits` does and, if `hidden`, the last hidden states [m, d] in float32 at the same positions, and at
    the wanted tokens themselves."""
    if mode is ForwardMode.UNPACKED:
        own = model(input_ids=batch.token_ids, use_cache=False, output_hidden_states=hidden)
        logits = own.logits[batch.target_row, batch.target_col].float()
        return logits, *_states(own.hidden_states[-1] if hidden else None, batch)
    # Without a mask, transformers finds the sequences of a row in their positions, and every layer applies its own window.
    states = model.base_model(
        input_ids=batch.token_ids, position_ids=batch.position_ids, attention_mask=None, use_cache=False
    ).last_hidden_state
    logits = model.get_output_embeddings()(states[batch.target_row, batch.target_col])  # type: ignore[no-untyped-call]
    return logits.float(), *_states(states if hidden else None, batch)


def _states(states: Tensor | None, batch: MicroBatch) -> tuple[Tensor | None, Tensor | None]:
    """Return the states [m, d] that predict the wanted tokens, and those that have read them, of `states` [rows, columns, d]."""
    if states is None:
        return None, None
    before = states[batch.target_row, batch.target_col].float()
    return before, states[batch.target_row, batch.target_col + 1].float()


def at_temperature(logits: Tensor, temperature: Tensor | None) -> Tensor:
    """Return the logits [m, V] of the distribution sampled from. `temperature` [m] is per token; None means 1.

    If every temperature is 1, this saves a division over the vocabulary.
    """
    if temperature is None or bool((temperature == 1).all()):
        return logits
    return logits / temperature[:, None]


def target_logprobs(logits: Tensor, batch: MicroBatch) -> Tensor:
    """Return the log-probs [m] of the wanted tokens."""
    wanted = batch.token_ids[batch.target_row, batch.target_col + 1]
    chosen = logits.gather(-1, wanted[:, None]).squeeze(-1)
    return chosen - logits.logsumexp(-1)


def entropy(logits: Tensor) -> Tensor:
    """Return the entropy [m] of each distribution in nats, without gradient."""
    with torch.no_grad():
        logprobs = logits.log_softmax(-1)
        return -(logprobs.exp() * logprobs).sum(-1)


@torch.no_grad()
def logprobs_of(
    model: PreTrainedModel,
    sequences: Sequence[Sequence1D],
    packing: PackingConfig,
    temperature: Tensor | None = None,
    mode: ForwardMode = ForwardMode.PACKED,
) -> Tensor:
    """Return the log-probs [M] of all wanted tokens, sequence by sequence. `temperature` [M] has the same order."""
    result = torch.zeros(num_targets(sequences), device=model.device)
    for batch in pack(sequences, mode.packing(packing), device=model.device):
        at = None if temperature is None else temperature[batch.target_index]
        result[batch.target_index] = target_logprobs(at_temperature(target_logits(model, batch, mode), at), batch)
    return result


@torch.no_grad()
def scores(model: PreTrainedModel, sequences: Sequence[IntArray]) -> list[FloatArray]:
    """Return the log-prob [n] of each token of each sequence given those before it, under the plain softmax, as engines score probes; entry 0
    is 0.

    The sequences run in one forward, padded at the end, which a causal model does not see.
    """
    lengths = [len(token_ids) for token_ids in sequences]
    padded = np.zeros((len(lengths), max(lengths, default=0)), np.int64)
    for row, token_ids in zip(padded, sequences, strict=True):
        row[: len(token_ids)] = token_ids
    ids = torch.from_numpy(padded).to(model.device)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    chosen = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    scored = torch.cat([chosen.new_zeros(len(lengths), 1), chosen], dim=1).cpu().numpy()
    return [row[:length] for row, length in zip(scored, lengths, strict=True)]


def score(model: PreTrainedModel, token_ids: IntArray) -> FloatArray:
    """Return the log-prob [n] of each token of one sequence, see `scores`."""
    return scores(model, [token_ids])[0]
