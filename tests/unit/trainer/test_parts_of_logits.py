"""Log-probs and features from parts of the logits equal those from all logits, with their gradients, and use less
memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.trainer.config import ComputeConfig, FeatureChoice, LossTermChoice, PackingConfig, UpdateConfig
from rollmesh.trainer.feature_pass import forward_features
from rollmesh.trainer.features import FEATURES, Feature, FeatureInputs, FeatureRequest, TokenLogprob
from rollmesh.trainer.forward import ForwardMode, ForwardPlan
from rollmesh.trainer.model_files import published_state
from rollmesh.trainer.sequences import Sequence1D
from rollmesh.trainer.update import BatchTrainer
from tests.models.architectures import build_model

from .builders import minibatches, random_batch

SMALL = TinyModelConfig(hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48)
PACKING = PackingConfig(row_tokens=48, micro_batch_tokens=4096)
CHUNK = 7
OPTIONS: dict[str, dict[str, Any]] = {
    "other_prompt_logprob": {"prefix_ids": [20]},
    "kept_logprob": {"threshold": 0.0},
    "effective_rank": {"stride": 5},
}


class WholeSample(Feature):
    """The mean over a sample of the largest log-prob: it reads logits of all of the tokens of a sample."""

    def __call__(self, inputs: FeatureInputs) -> Tensor:
        largest = inputs.logits.log_softmax(-1).max(-1).values
        sample = inputs.columns["sample"]
        sums = torch.zeros(int(sample.max()) + 1).index_add(0, sample, largest)
        return sums[sample] / torch.bincount(sample)[sample]


def built_in() -> dict[str, Any]:
    return {name: FEATURES.make(FeatureChoice(name, OPTIONS.get(name, {}))) for name in FEATURES.names}


def sequences() -> list[Sequence1D]:
    rng = np.random.default_rng(3)
    made = []
    for length in (20, 17, 11, 6):
        mask = (rng.random(length) < 0.8).astype(np.uint8)
        mask[0], mask[-1] = 0, 1
        made.append(Sequence1D(rng.integers(13, 96, length).astype(np.int32), mask))
    return made


def columns_of(chosen: list[Sequence1D]) -> dict[str, Tensor]:
    counts = [int(s.target_mask.sum()) for s in chosen]
    heat = np.random.default_rng(4).uniform(0.5, 1.5, sum(counts))
    sample = torch.arange(len(chosen)).repeat_interleave(torch.tensor(counts))
    return {"temperature": torch.as_tensor(heat, dtype=torch.float32), "sample": sample}


def computed(
    mode: ForwardMode,
    chunk_tokens: int,
    features: Mapping[str, Any],
    *,
    grad: bool,
    make: Callable[[], PreTrainedModel] | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the features of all tokens by name, and the gradients of a random weighting of them by parameter."""
    model = (make or partial(build_tiny_model, SMALL, seed=1))().train(False)
    chosen = sequences()
    columns = columns_of(chosen)
    requests = {name: FeatureRequest(feature, "current", grad=grad) for name, feature in features.items()}
    plan = ForwardPlan(mode, PACKING, chunk_tokens)
    found: dict[str, Tensor] = {}
    for batch in plan.micro_batches(chosen, model.device):
        inputs, values = forward_features(model, batch, columns, plan, list(requests.values()))
        named = {"logprob": inputs.logprobs, **{name: values[r.key] for name, r in requests.items()}}
        total = torch.zeros(())
        for number, value in enumerate(named.values()):
            shape = (len(columns["sample"]), *value.shape[1:])
            factors = torch.randn(shape, generator=torch.Generator().manual_seed(number))
            total = total + (value * factors[batch.target_index]).sum()
        total.backward()  # type: ignore[no-untyped-call]
        for name, value in named.items():
            whole = found.setdefault(name, torch.zeros(len(columns["sample"]), *value.shape[1:]))
            whole[batch.target_index] = value.detach()
    return found, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("mode", ForwardMode)
def test_every_built_in_feature_and_its_gradient_are_the_same_in_parts(mode: ForwardMode, grad: bool) -> None:
    features = {**built_in(), "whole_sample": WholeSample(), "log_prob": TokenLogprob()}
    (values, gradients), (in_parts, of_parts) = (computed(mode, c, features, grad=grad) for c in (0, CHUNK))
    assert values.keys() == in_parts.keys() >= set(FEATURES.names)
    assert gradients.keys() == of_parts.keys()
    for name, expected in values.items():
        torch.testing.assert_close(in_parts[name], expected, rtol=1e-5, atol=1e-6)
    for name, expected in gradients.items():
        torch.testing.assert_close(of_parts[name], expected, rtol=1e-4, atol=1e-5)


def test_log_probs_in_parts_are_those_of_the_definition() -> None:
    model = build_tiny_model(SMALL, seed=1).train(False)
    chosen = sequences()
    found, _ = computed(ForwardMode.PACKED, CHUNK, {}, grad=False)
    heat = columns_of(chosen)["temperature"].double()
    expected: list[float] = []
    for sequence in chosen:
        ids = torch.as_tensor(sequence.token_ids.astype(np.int64))
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0].double()
        for position in np.flatnonzero(sequence.target_mask):
            row = logits[position - 1] / heat[len(expected)]
            expected.append(float(row[ids[position]] - row.exp().sum().log()))
    assert found["logprob"].numpy() == pytest.approx(np.array(expected), abs=1e-5)


@pytest.mark.parametrize("name", ["gemma2_softcap", "granite_scaled"])
def test_caps_and_scales_of_logits_apply_in_parts(name: str) -> None:
    """The features of the distribution and gradients too: packed in parts, as with the model's own logits."""
    features = {"entropy": FEATURES.make(FeatureChoice("entropy"))}
    make = partial(build_model, name)
    expected, gradients = computed(ForwardMode.UNPACKED, 0, features, grad=True, make=make)
    found, of_parts = computed(ForwardMode.PACKED, CHUNK, features, grad=True, make=make)
    for key, values in (expected | gradients).items():
        torch.testing.assert_close((found | of_parts)[key], values, rtol=1e-4, atol=1e-5)


def trained(compute: ComputeConfig, **settings: Any) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """Return the weights and the metrics after two updates."""
    config = UpdateConfig(
        loss=(LossTermChoice("ppo_clip"), LossTermChoice("kl", weight=0.1), LossTermChoice("high_entropy", weight=0.1)),
        features={"nucleus": FeatureChoice("nucleus_entropy", under="current", grad=True)},
        update_rule=minibatches(2),
        packing=PACKING,
        compute=compute,
        **settings,
    )
    made = BatchTrainer(build_tiny_model(SMALL, seed=1), config, seed=7, outputs=["entropy"])
    metrics = [made.update(k, *random_batch(seed=k)).metrics for k in (1, 2)]
    return published_state(made.model), metrics


def test_the_default_is_bit_for_bit_the_computation_without_parts() -> None:
    (found, metrics), (expected, plain) = trained(ComputeConfig()), trained(ComputeConfig(logprob_chunk_tokens=0))
    assert metrics == plain
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_updates_in_parts_make_the_same_weights_within_rounding() -> None:
    (found, metrics), (expected, plain) = (trained(ComputeConfig(logprob_chunk_tokens=c)) for c in (CHUNK, 0))
    for mine, theirs in zip(metrics, plain, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-7)


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the most rows of a tensor with the width of the vocabulary, except the transposed output layer."""

    def __init__(self, width: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._width = width
        self.rows: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if (
                isinstance(tensor, Tensor)
                and tensor.ndim > 1
                and tensor.shape[-1] == self._width
                and len(tensor) != SMALL.hidden_size
            ):
                self.rows = max(self.rows, tensor.numel() // self._width)
        return made


@pytest.mark.parametrize("name", [name for name, f in built_in().items() if getattr(f, "by_token", False)])
def test_no_tensor_has_more_rows_of_the_vocabulary_than_a_part(name: str) -> None:
    vocabulary = build_tiny_model(SMALL, seed=1).config.vocab_size
    assert vocabulary > 48, "wider than any other tensor"

    def rows(chunk_tokens: int) -> int:
        with _Largest(vocabulary) as largest:
            computed(ForwardMode.PACKED, chunk_tokens, {name: built_in()[name]}, grad=True)
        return int(largest.rows)

    assert rows(CHUNK) == CHUNK
    assert rows(0) == len(columns_of(sequences())["sample"])
