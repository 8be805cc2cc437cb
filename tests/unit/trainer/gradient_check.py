"""Compare the gradient of a loss with finite differences in float64, on a random ragged batch.

The loss goes through the port as in an update: features under every weights, `prepare`, and `LossInputs` of the
micro-batches. The model is a table of logits, one row per trained token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest import mock

import torch
from torch import Tensor

from rollmesh.trainer.config import LossTermChoice, UpdateConfig
from rollmesh.trainer.features import FeatureInputs
from rollmesh.trainer.losses import LossInputs
from rollmesh.trainer.plugins import Plugins

from .builders import minibatches

LENGTHS = (3, 1, 5, 2, 4, 3)
"""Trained tokens of the samples of the batch, in groups of three."""
STEP = 1e-5


@dataclass(frozen=True, kw_only=True)
class Ragged:
    """Trained tokens of several samples: logits [M, V] under each weights, token ids [M], hidden states [M, d] and
    columns."""

    logits: Tensor
    start: Tensor
    reference: Tensor
    token_ids: Tensor
    hidden: Tensor
    columns: dict[str, Tensor]

    def with_columns(self, **columns: Tensor) -> Ragged:
        return replace(self, columns=self.columns | columns)


def ragged(seed: int = 0, *, lengths: Sequence[int] = LENGTHS, vocabulary: int = 6) -> Ragged:
    """Return a random batch. Its policies differ by about 0.3 nats per token; samples alternate between reward 1 and
    0."""
    rng = torch.Generator().manual_seed(seed)
    total = sum(lengths)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(*shape, generator=rng, dtype=torch.float64)

    logits = normal(total, vocabulary)
    token_ids = torch.randint(vocabulary, (total,), generator=rng)
    sample = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    reward = torch.tensor([float(n % 2) for n in range(len(lengths))], dtype=torch.float64)[sample]
    place = torch.cat([torch.arange(n) for n in lengths])
    start, behavior = logits + normal(total, vocabulary, scale=0.3), logits + normal(total, vocabulary, scale=0.3)
    return Ragged(
        logits=logits,
        start=start,
        reference=logits + normal(total, vocabulary, scale=0.3),
        token_ids=token_ids,
        hidden=normal(total, 4),
        columns={
            "behavior": _chosen(behavior, token_ids),
            "advantages": 2 * reward - 1 + normal(total, scale=0.1),
            "reward": reward,
            "token_weight": torch.full((total,), 1 / total, dtype=torch.float64),
            "temperature": torch.ones(total, dtype=torch.float64),
            "sample": sample,
            "group": sample // 3,
            "turn": (place >= 2).long(),
            "segment": (place >= 2).long(),
            "position": place,
        },
    )


def plugins_of(*terms: LossTermChoice) -> Plugins:
    return Plugins(UpdateConfig(loss=terms, update_rule=minibatches(1)))


def loss_of_logits(plugins: Plugins, batch: Ragged, logits: Tensor, *, parts: int = 1) -> Tensor:
    """Return the loss of one optimizer step under `logits`, summed over `parts` micro-batches."""
    with torch.no_grad():
        columns = dict(batch.columns)
        columns |= _features(plugins, batch, batch.start, "start") | _features(
            plugins, batch, batch.reference, "reference"
        )
        columns |= _features(plugins, batch, logits, "step")
    columns |= plugins.loss.prepare(columns)
    return _micro_batches(plugins, batch, logits, columns, parts)


def check_gradient(plugins: Plugins, batch: Ragged, *, frozen: bool = False, directions: int = 8) -> Tensor:
    """Assert that autograd and finite differences agree in random directions, whatever the split. Return the gradient
    [M, V].

    `frozen` is for terms that treat a function of the policy as a constant: what they detach keeps its value at the
    starting point.
    """
    logits = batch.logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of_logits(plugins, batch, logits), logits)
    (in_parts,) = torch.autograd.grad(loss_of_logits(plugins, batch, logits, parts=3), logits)
    torch.testing.assert_close(gradient, in_parts, rtol=1e-9, atol=1e-12)
    rng = torch.Generator().manual_seed(1)
    for _ in range(directions):
        direction = torch.randn(logits.shape, generator=rng, dtype=torch.float64)
        with _frozen(frozen) as constants:
            loss_of_logits(plugins, batch, batch.logits)
            constants.recording = False
            up, down = (float(loss_of_logits(plugins, batch, batch.logits + s * direction)) for s in (STEP, -STEP))
        expected = torch.tensor((up - down) / (2 * STEP), dtype=torch.float64)
        torch.testing.assert_close((gradient * direction).sum(), expected, rtol=1e-6, atol=1e-9)
    return gradient


def _chosen(logits: Tensor, token_ids: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, token_ids[:, None]).squeeze(-1)


def _inputs(batch: Ragged, logits: Tensor, at: Tensor, columns: Mapping[str, Tensor]) -> FeatureInputs:
    chosen = logits[at]
    return FeatureInputs(
        logits=chosen,
        token_ids=batch.token_ids[at],
        logprobs=_chosen(chosen, batch.token_ids[at]),
        hidden=batch.hidden[at],
        columns={name: values[at] for name, values in columns.items()},
    )


def _features(plugins: Plugins, batch: Ragged, logits: Tensor, under: str) -> dict[str, Tensor]:
    every = torch.arange(len(batch.token_ids))
    inputs = _inputs(batch, logits, every, batch.columns)
    return {name: request.feature(inputs) for name, request in plugins.under(under).items()}


def _micro_batches(plugins: Plugins, batch: Ragged, logits: Tensor, columns: dict[str, Tensor], parts: int) -> Tensor:
    sample = batch.columns["sample"]
    total = torch.zeros((), dtype=torch.float64)
    for part in range(parts):
        at = torch.nonzero(sample % parts == part).squeeze(-1)
        inputs = _inputs(batch, logits, at, columns)
        features: dict[str, Tensor] = {}
        for name, request in plugins.under("current").items():
            found = request.feature(inputs)
            features[name] = found if request.grad else found.detach()
        loss, _ = plugins.loss(LossInputs(inputs.logprobs, {**inputs.columns, **features}, inputs.hidden))
        total = total + loss
    return total


class _Constants:
    """What `detach` returned in the first evaluation, in order."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []
        self.calls = 0
        self.recording = True

    def detach(self, of: Tensor, detach: Callable[[Tensor], Tensor]) -> Tensor:
        if self.recording:
            self.values.append(detach(of).clone())
            return self.values[-1]
        found = self.values[self.calls % len(self.values)]
        assert found.shape == of.shape, "the evaluations detach different tensors"
        self.calls += 1
        return found


@contextmanager
def _frozen(active: bool) -> Iterator[_Constants]:
    """Let `detach` return, once recording is over, what it returned in the first evaluation."""
    constants = _Constants()
    if not active:
        yield constants
        return
    detach = Tensor.detach
    with mock.patch.object(Tensor, "detach", lambda self: constants.detach(self, detach)):
        yield constants
