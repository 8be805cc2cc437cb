"""Compute features: over a table of tokens without gradient, or over a micro-batch.

Equal requests are computed once. All features of the sampled sequences share one forward, and a feature of other sequences has its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from rollmesh.trainer import forward
from rollmesh.trainer.config import PackingConfig
from rollmesh.trainer.features import FeatureInputs, FeatureRequest, OtherSequences
from rollmesh.trainer.forward import ForwardMode
from rollmesh.trainer.packing import MicroBatch, pack
from rollmesh.trainer.samples import TokenTable
from rollmesh.trainer.sequences import Sequence1D


def feature_inputs(
    model: PreTrainedModel, batch: MicroBatch, columns: Mapping[str, Tensor], mode: ForwardMode, *, hidden: bool
) -> FeatureInputs:
    """Run the forward of a micro-batch. `columns` are those of the whole table; the result has those of the micro-batch."""
    tokens = {name: values[batch.target_index] for name, values in columns.items()}
    logits, states, after = forward.target_outputs(model, batch, mode, hidden=hidden)
    logits = forward.at_temperature(logits, tokens["temperature"])
    return FeatureInputs(
        logits=logits,
        token_ids=batch.token_ids[batch.target_row, batch.target_col + 1],
        logprobs=forward.target_logprobs(logits, batch),
        hidden=states,
        columns=tokens,
        after=after,
    )


@torch.no_grad()
def computed_features(
    model: PreTrainedModel,
    table: TokenTable,
    requests: Mapping[str, FeatureRequest],
    packing: PackingConfig,
    mode: ForwardMode,
) -> dict[str, NDArray[np.float32]]:
    """Return the requested features [M] or [M, k] by name, from one pass over the table, and one per feature of other sequences."""
    if not requests:
        return {}
    columns = {name: torch.as_tensor(values, device=model.device) for name, values in table.columns.items()}
    found: dict[Hashable, NDArray[np.float32]] = {}
    for sequences, wanted in _passes(table, requests):
        hidden = any(request.reads_hidden for request in wanted)
        for batch in pack(sequences, mode.packing(packing), device=model.device):
            inputs = feature_inputs(model, batch, columns, mode, hidden=hidden)
            places = batch.target_index.cpu().numpy()
            for request in wanted:
                values = request.feature(inputs).float().cpu().numpy()
                if request.key not in found:
                    found[request.key] = np.zeros((int(table.lengths.sum()), *values.shape[1:]), np.float32)
                found[request.key][places] = values
    return {name: found[request.key] for name, request in requests.items()}


def current_features(
    model: PreTrainedModel,
    batch: MicroBatch,
    inputs: FeatureInputs,
    table: TokenTable,
    requests: Mapping[str, FeatureRequest],
    packing: PackingConfig,
    mode: ForwardMode,
) -> dict[str, Tensor]:
    """Return the requested features of a micro-batch of the table, with gradient where a request asks. `inputs` are of its forward."""
    found: dict[Hashable, Tensor] = {}
    for request in requests.values():
        if request.key in found:
            continue
        with torch.set_grad_enabled(request.grad):
            if not isinstance(request.feature, OtherSequences):
                found[request.key] = request.feature(inputs)
                continue
            others = [s for index in batch.sequences for s in table.others[request.function][index]]
            parts = pack(others, mode.packing(packing), device=model.device)
            values = [
                request.feature(feature_inputs(model, part, inputs.columns, mode, hidden=request.reads_hidden))
                for part in parts
            ]
            found[request.key] = torch.cat(values)[torch.cat([part.target_index for part in parts]).argsort()]
    return {name: found[request.key] for name, request in requests.items()}


def _passes(
    table: TokenTable, requests: Mapping[str, FeatureRequest]
) -> Iterator[tuple[Sequence[Sequence1D], list[FeatureRequest]]]:
    """Yield sequences to run, and the different requests that read them."""
    different = {request.key: request for request in requests.values()}.values()
    if plain := [request for request in different if not isinstance(request.feature, OtherSequences)]:
        yield table.sequences, plain
    for request in different:
        if isinstance(request.feature, OtherSequences):
            yield [s for of_sample in table.others[request.function] for s in of_sample], [request]


def gradient_squares(
    model: PreTrainedModel, table: TokenTable, packing: PackingConfig, mode: ForwardMode
) -> NDArray[np.float32]:
    """Return [M]: for each token, the squared norm of the gradient of its sample's summed log-prob. One backward per sample."""
    squares = []
    for number in range(len(table.sequences)):
        part = table.select([number])
        columns = {"temperature": torch.as_tensor(part.columns["temperature"], device=model.device)}
        (batch,) = pack(part.sequences, mode.packing(packing), device=model.device)
        total = feature_inputs(model, batch, columns, mode, hidden=False).logprobs.sum()
        parameters = [p for p in model.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(total, parameters, allow_unused=True)
        squares.append(sum(float(g.double().square().sum()) for g in gradients if g is not None))
    repeated: NDArray[np.float32] = np.repeat(np.array(squares), table.lengths).astype(np.float32)
    return repeated
