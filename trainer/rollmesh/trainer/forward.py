"""Compute log-probs of wanted tokens under a model, packed or one sequence at a time.

The output layer runs on wanted positions only, because for a real vocabulary its logits would be the largest tensor of
a step. With many wanted positions it runs in parts (`in_parts`), so that the logits of all of them never exist at once.
Log-probs are computed at the temperature of the sampled token, because the behavior log-probs are under the sampling
distribution. Truncation (top-p, top-k) is NOT reproduced. The behavior log-probs of truncated samples are renormalized
over the kept tokens; the log-probs here are not, so the ratio is biased low. `metrics` reports the share of such
tokens. Collaborators: `packing` (micro-batches), `update`, `sft`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rollmesh.shared.domain.trajectory import FloatArray, IntArray
from rollmesh.trainer.config import PackingConfig
from rollmesh.trainer.model_config import FLASH, compute_device, logits_rule, text_config
from rollmesh.trainer.packing import MicroBatch, pack
from rollmesh.trainer.ranks import ONE_RANK, Ranks
from rollmesh.trainer.router import RouterLogits, returned_layers, router_logits
from rollmesh.trainer.router_replay import RouterReplay
from rollmesh.trainer.sequences import Sequence1D, num_targets
from rollmesh.trainer.shared_prefix import SQUARE_TOKENS, attention_mask


class ForwardMode(Enum):
    """How sequences run through the model. `self_test` chooses it."""

    PACKED = "packed"
    """Several sequences per row. The output layer runs on wanted positions only, and `logits_rule` scales and caps its
    numbers."""
    UNPACKED = "unpacked"
    """One sequence per forward. The logits are those of the model's own forward."""

    def packing(self, config: PackingConfig) -> PackingConfig:
        """Return the settings of `pack` for this mode."""
        return config if self is ForwardMode.PACKED else _ALONE


_ALONE = PackingConfig(row_tokens=1, micro_batch_tokens=1)


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    """How a trainer runs sequences through its models."""

    mode: ForwardMode
    packing: PackingConfig
    chunk_tokens: int = 0
    """Maximum number of wanted positions whose logits exist at once; 0 does not limit it."""
    ranks: Ranks = ONE_RANK
    """The ranks between which the micro-batches are divided."""
    square: int = SQUARE_TOKENS
    """That of `shared_prefixes`."""
    replay: RouterReplay | None = None
    """What replays the experts that an engine has recorded, in the forwards of its model."""

    def micro_batches(self, sequences: Sequence[Sequence1D], device: torch.device) -> list[MicroBatch]:
        """Return micro-batches of all ranks, which contain every sequence once."""
        return pack(sequences, self.mode.packing(self.packing), device=device, square=self.square)

    def replaying(self, batch: MicroBatch) -> AbstractContextManager[Callable[[], Tensor | None]]:
        """Return the context in which the forward of a micro-batch runs, see `RouterReplay.replaying`."""
        return nullcontext(lambda: None) if self.replay is None else self.replay.replaying(batch)

    def cuts(self, count: int) -> bool:
        """Return whether `count` wanted positions run through the output layer in parts."""
        return 0 < self.chunk_tokens < count


@dataclass(frozen=True, slots=True)
class TargetOutputs:
    """What the model computed at the m positions that predict the wanted tokens."""

    before_logits: Tensor
    """[m, d] states to which `logits` is applied; [m, V] if the model's own forward has computed its logits."""
    logits: Callable[[Tensor], Tensor]
    """Returns the logits [n, V] in float32 of n rows of `before_logits`."""
    hidden: Tensor | None
    """[m, d] last hidden states in float32, if requested."""
    after: Tensor | None
    """[m, d] last hidden states that have read the wanted tokens, if requested."""
    router: RouterLogits | None = None
    """Logits of the routers at the m positions, if requested."""


def target_logits(model: PreTrainedModel, batch: MicroBatch, mode: ForwardMode = ForwardMode.PACKED) -> Tensor:
    """Return logits [m, V] in float32 at the positions that predict the wanted tokens. `batch` must be packed for
    `mode`."""
    outputs = target_outputs(model, batch, mode, hidden=False)
    return outputs.logits(outputs.before_logits)


def target_outputs(
    model: PreTrainedModel, batch: MicroBatch, mode: ForwardMode, *, hidden: bool, router: bool = False
) -> TargetOutputs:
    """Run the layers of the model. `batch` must be packed for `mode`. `hidden` and `router` request the hidden states
    and the router logits.

    Raises ValueError if router logits are requested of a model without routers."""
    more = {"output_router_logits": True} if router else {}
    if mode is ForwardMode.UNPACKED:
        own = model(input_ids=batch.token_ids, use_cache=False, output_hidden_states=hidden, **more)
        wanted = own.logits[batch.target_row, batch.target_col]
        before, after = _states(own.hidden_states[-1] if hidden else None, batch)
        routers = _routers(model, returned_layers(own), batch) if router else None
        return TargetOutputs(wanted, torch.Tensor.float, before, after, routers)
    states, *layers = _packed(model)(batch.token_ids, batch.position_ids, router, batch.parts)
    head: Callable[[Tensor], Tensor] = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    rule = logits_rule(model)
    wanted = states[batch.target_row, batch.target_col]
    routers = _routers(model, layers, batch) if router else None
    return TargetOutputs(wanted, lambda rows: rule(head(rows)), *_states(states if hidden else None, batch), routers)


def packed_states(
    model: PreTrainedModel,
    token_ids: Tensor,
    position_ids: Tensor,
    router: bool = False,
    parts: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return the last hidden states [rows, columns, d] of packed rows, and the logits [rows x columns, E] of each
    router if requested.

    `parts` is that of `MicroBatch`. `sharding` makes it a method of a sharded model."""
    if model.config._attn_implementation == FLASH and len(token_ids) > 1:  # it finds the sequences of a single row only
        states, *layers = packed_states(model, token_ids.reshape(1, -1), position_ids.reshape(1, -1), router)
        return states.view(*token_ids.shape, -1).clone(), *layers
    more = {"output_router_logits": True} if router else {}
    # Without a mask, transformers finds the sequences of a row in their positions, and every layer applies its own
    # window.
    mask = None
    if parts is not None:
        embeddings: Any = model.get_input_embeddings()
        mask = attention_mask(text_config(model), parts, position_ids, embeddings.weight.dtype)
    outputs = model.base_model(
        input_ids=token_ids, position_ids=position_ids, attention_mask=mask, use_cache=False, **more
    )
    return outputs.last_hidden_state, *(returned_layers(outputs) if router else ())


def _packed(model: PreTrainedModel) -> Callable[[Tensor, Tensor, bool, Tensor | None], tuple[Tensor, ...]]:
    """Return the function of the packed forward, which gathers the weights of a sharded model."""
    own: Callable[[Tensor, Tensor, bool, Tensor | None], tuple[Tensor, ...]] | None
    own = getattr(model, packed_states.__name__, None)
    return own or partial(packed_states, model)


def in_parts(
    rows: Tensor, part_rows: int, function: Callable[[Tensor, slice], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """Return the tensors [m, ...] that `function` makes of `rows` [m, d], from parts of at most `part_rows` rows and
    their places.

    The value of a row must not depend on the other rows. What the function computes for a part is discarded, and the
    backward pass computes it again, so that it exists for one part at a time.
    """
    made = []
    for number, part in enumerate(torch.split(rows, part_rows)):
        at = slice(number * part_rows, number * part_rows + len(part))
        if torch.is_grad_enabled():
            made.append(checkpoint(function, part, at, use_reentrant=False, preserve_rng_state=False))
        else:
            made.append(function(part, at))
    return tuple(torch.cat(found) for found in zip(*made, strict=True))


def _states(states: Tensor | None, batch: MicroBatch) -> tuple[Tensor | None, Tensor | None]:
    """Return the states [m, d] that predict the wanted tokens, and those that have read them, of `states` [rows,
    columns, d]."""
    if states is None:
        return None, None
    before = states[batch.target_row, batch.target_col].float()
    return before, states[batch.target_row, batch.target_next].float()


def _routers(model: PreTrainedModel, layers: Sequence[Tensor], batch: MicroBatch) -> RouterLogits:
    """Return the router logits at the positions that predict the wanted tokens."""
    return router_logits(model, layers).at(batch.target_row * batch.token_ids.shape[1] + batch.target_col)


def at_temperature(logits: Tensor, temperature: Tensor | None) -> Tensor:
    """Return the logits [m, V] of the distribution sampled from. `temperature` [m] is per token; None means 1.

    If every temperature is 1, this saves a division over the vocabulary.
    """
    if temperature is None or bool((temperature == 1).all()):
        return logits
    return logits / temperature[:, None]


def target_logprobs(logits: Tensor, batch: MicroBatch) -> Tensor:
    """Return the log-probs [m] of the wanted tokens."""
    return token_logprobs(logits, batch.target_ids)


def token_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Return the log-probs [m] of tokens [m] under logits [m, V]."""
    chosen = logits.gather(-1, token_ids[:, None]).squeeze(-1)
    return chosen - logits.logsumexp(-1)


@torch.no_grad()
def logprobs_of(
    model: PreTrainedModel,
    sequences: Sequence[Sequence1D],
    packing: PackingConfig,
    temperature: Tensor | None = None,
    mode: ForwardMode = ForwardMode.PACKED,
    chunk_tokens: int = 0,
) -> Tensor:
    """Return the log-probs [M] of all wanted tokens, sequence by sequence. `temperature` [M] has the same order.
    `chunk_tokens` is that of `ForwardPlan`."""
    device = compute_device(model)
    result = torch.zeros(num_targets(sequences), device=device)
    for batch in pack(sequences, mode.packing(packing), device=device):
        heat = None if temperature is None else temperature[batch.target_index]
        result[batch.target_index] = _logprobs(
            model, batch, mode, heat, chunk_tokens or max(1, len(batch.target_index))
        )
    return result


def _logprobs(
    model: PreTrainedModel, batch: MicroBatch, mode: ForwardMode, temperature: Tensor | None, part_rows: int
) -> Tensor:
    """Return the log-probs [m] of the wanted tokens of a micro-batch."""
    outputs, token_ids = target_outputs(model, batch, mode, hidden=False), batch.target_ids

    def of_part(rows: Tensor, at: slice) -> tuple[Tensor, ...]:
        logits = at_temperature(outputs.logits(rows), None if temperature is None else temperature[at])
        return (token_logprobs(logits, token_ids[at]),)

    (found,) = in_parts(outputs.before_logits, part_rows, of_part)
    return found


@torch.no_grad()
def scores(model: PreTrainedModel, sequences: Sequence[IntArray]) -> list[FloatArray]:
    """Return the log-prob [n] of each token of each sequence given those before it, under the plain softmax, as engines
    score probes; entry 0 is 0.

    The sequences run in one forward, padded at the end, which a causal model does not see.
    """
    lengths = [len(token_ids) for token_ids in sequences]
    padded = np.zeros((len(lengths), max(lengths, default=0)), np.int64)
    for row, token_ids in zip(padded, sequences, strict=True):
        row[: len(token_ids)] = token_ids
    ids = torch.from_numpy(padded).to(compute_device(model))
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    chosen = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    scored = torch.cat([chosen.new_zeros(len(lengths), 1), chosen], dim=1).cpu().numpy()
    return [row[:length] for row, length in zip(scored, lengths, strict=True)]


def score(model: PreTrainedModel, token_ids: IntArray) -> FloatArray:
    """Return the log-prob [n] of each token of one sequence, see `scores`."""
    return scores(model, [token_ids])[0]
