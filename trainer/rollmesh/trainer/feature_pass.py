"""Compute features: over a table of tokens without gradient, or over a micro-batch.

Equal requests are computed once. All features of the sampled sequences share one forward, and a feature of other
sequences has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from rollmesh.trainer import forward
from rollmesh.trainer.features import FeatureInputs, FeatureRequest
from rollmesh.trainer.forward import ForwardPlan
from rollmesh.trainer.model_config import compute_device
from rollmesh.trainer.packing import MicroBatch
from rollmesh.trainer.router_replay import DIFFERING
from rollmesh.trainer.samples import TokenTable
from rollmesh.trainer.sequences import Sequence1D
from rollmesh.trainer.sharding import local, release


def forward_features(
    model: PreTrainedModel,
    batch: MicroBatch,
    columns: Mapping[str, Tensor],
    plan: ForwardPlan,
    requests: Collection[FeatureRequest] = (),
    *,
    hidden: bool = False,
) -> tuple[FeatureInputs, dict[Hashable, Tensor]]:
    """Run the forward of a micro-batch. Return the inputs of all of its tokens, and the requested features by key.

    `columns` are those of the whole table; the inputs have those of the micro-batch, and DIFFERING if it replays
    records of experts. Without the column `temperature` it is 1. `hidden` requests the hidden states.
    """
    tokens = {name: values[batch.target_index] for name, values in columns.items()}
    token_ids, heat = batch.target_ids, tokens.get("temperature")
    with plan.replaying(batch) as differing:
        outputs = forward.target_outputs(
            model,
            batch,
            plan.mode,
            hidden=hidden or any(request.feature.reads_hidden for request in requests),
            router=any(request.feature.reads_router for request in requests),
        )
        if (shares := differing()) is not None:
            tokens[DIFFERING] = shares

    def logits_of(rows: Tensor, at: slice) -> Tensor:
        return forward.at_temperature(outputs.logits(rows), None if heat is None else heat[at])

    def inputs_of(logits: Tensor | Callable[[], Tensor], logprobs: Tensor, at: slice) -> FeatureInputs:
        states, after = (None if found is None else found[at] for found in (outputs.hidden, outputs.after))
        return FeatureInputs(
            logits=logits,
            token_ids=token_ids[at],
            logprobs=logprobs,
            hidden=states,
            columns={name: values[at] for name, values in tokens.items()},
            after=after,
            router=None if outputs.router is None else outputs.router.at(at),
        )

    def of_part(rows: Tensor, at: slice) -> tuple[Tensor, ...]:
        logits = logits_of(rows, at)
        inputs = inputs_of(logits, forward.token_logprobs(logits, token_ids[at]), at)
        return inputs.logprobs, *(_value(request, inputs) for request in by_token)

    rows, everything = outputs.before_logits, slice(0, len(token_ids))
    if not plan.cuts(len(token_ids)):
        logits = logits_of(rows, everything)
        inputs = inputs_of(logits, forward.token_logprobs(logits, token_ids), everything)
        return inputs, {request.key: _value(request, inputs) for request in requests}
    # Features without gradient are last, because the backward pass computes a part only up to the last tensor that it
    # needs.
    by_token = sorted(
        (request for request in requests if request.feature.by_token), key=lambda request: not request.grad
    )
    logprobs, *values = forward.in_parts(rows, plan.chunk_tokens, of_part)
    inputs = inputs_of(lambda: logits_of(rows, everything), logprobs, everything)
    whole = {request.key: _value(request, inputs) for request in requests if not request.feature.by_token}
    return inputs, whole | {request.key: value for request, value in zip(by_token, values, strict=True)}


def _value(request: FeatureRequest, inputs: FeatureInputs) -> Tensor:
    with torch.set_grad_enabled(request.grad and torch.is_grad_enabled()):
        return request.feature(inputs)


@torch.no_grad()
def computed_features(
    model: PreTrainedModel,
    table: TokenTable,
    requests: Mapping[str, FeatureRequest],
    plan: ForwardPlan,
) -> dict[str, NDArray[np.float32]]:
    """Return the requested features [M] or [M, k] by name, from one pass over the table, and one per feature of other
    sequences.

    Each rank computes those of its micro-batches, and all ranks return all of them."""
    if not requests:
        return {}
    columns = {name: torch.as_tensor(values, device=compute_device(model)) for name, values in table.columns.items()}
    found: dict[Hashable, NDArray[np.float32]] = {}
    for sequences, wanted in _passes(table, requests):
        for batch in plan.ranks.share(plan.micro_batches(sequences, compute_device(model))):
            _, computed = forward_features(model, batch, columns, plan, plan.ranks.computing(wanted, batch))
            places = batch.target_index.cpu().numpy()
            for key, values in computed.items():
                if key not in found:
                    found[key] = np.zeros((int(table.lengths.sum()), *values.shape[1:]), np.float32)
                found[key][places] = values.float().cpu().numpy()
        merged = plan.ranks.merged([found.get(request.key) for request in wanted], int(table.lengths.sum()))
        found |= {request.key: values for request, values in zip(wanted, merged, strict=True)}
    release(model)
    return {name: found[request.key] for name, request in requests.items()}


def current_features(
    model: PreTrainedModel,
    batch: MicroBatch,
    columns: Mapping[str, Tensor],
    table: TokenTable,
    requests: Mapping[str, FeatureRequest],
    plan: ForwardPlan,
    *,
    hidden: bool,
) -> tuple[FeatureInputs, dict[str, Tensor], list[Tensor]]:
    """Run the forward of a micro-batch of the table. Return its inputs and the requested features, with gradient where
    a request asks.

    The list has the log-probs of its forwards with gradient. A micro-batch without targets has no features, but its
    rank makes as many forwards as the others."""
    different = {request.key: request for request in requests.values()}
    sampled = [request for request in different.values() if not request.reads_others]
    inputs, found = forward_features(model, batch, columns, plan, plan.ranks.computing(sampled, batch), hidden=hidden)
    with_gradient = [inputs.logprobs]
    for key, request in different.items():
        if request.reads_others:
            others = [s for index in batch.sequences for s in table.others[request.function][index]]
            parts = plan.micro_batches(others, compute_device(model))
            values: list[Tensor] = []
            for part in plan.ranks.aligned(parts, batch):
                with torch.set_grad_enabled(request.grad):
                    of_part, value = forward_features(
                        model, part, inputs.columns, plan, plan.ranks.computing([request], part)
                    )
                values += value.values()
                with_gradient += [of_part.logprobs] if request.grad else []
            if values:
                found[key] = torch.cat(values)[torch.cat([part.target_index for part in parts]).argsort()]
    return inputs, {name: found[r.key] for name, r in requests.items() if r.key in found}, with_gradient


def _passes(
    table: TokenTable, requests: Mapping[str, FeatureRequest]
) -> Iterator[tuple[Sequence[Sequence1D], list[FeatureRequest]]]:
    """Yield sequences to run, and the different requests that read them."""
    different = {request.key: request for request in requests.values()}.values()
    if plain := [request for request in different if not request.reads_others]:
        yield table.sequences, plain
    for request in different:
        if request.reads_others:
            yield [s for of_sample in table.others[request.function] for s in of_sample], [request]


def gradient_squares(model: PreTrainedModel, table: TokenTable, plan: ForwardPlan) -> NDArray[np.float32]:
    """Return [M]: for each token, the squared norm of the gradient of its sample's summed log-prob. One backward per
    sample.

    The gradients of a sharded model are sums over the ranks, so every rank runs every sample and contributes an equal
    share."""
    squares = []
    parameters = [p for p in model.parameters() if p.requires_grad]
    sharded = isinstance(model, FSDPModule)
    for number in range(len(table.sequences)):
        part = table.select([number])
        columns = {"temperature": torch.as_tensor(part.columns["temperature"], device=compute_device(model))}
        (batch,) = plan.micro_batches(part.sequences, compute_device(model))
        total = forward_features(model, batch, columns, plan)[0].logprobs.sum()
        if sharded:
            (total / plan.ranks.size).backward()  # type: ignore[no-untyped-call]
            gradients = tuple(None if p.grad is None else local(p.grad) for p in parameters)
            model.zero_grad(set_to_none=True)
        else:
            gradients = torch.autograd.grad(total, parameters, allow_unused=True)
        square = sum(float(g.double().square().sum()) for g in gradients if g is not None)
        squares.append(plan.ranks.total(square) if sharded else square)
    repeated: NDArray[np.float32] = np.repeat(np.array(squares), table.lengths).astype(np.float32)
    return repeated
