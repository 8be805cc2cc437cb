"""Random batches of episodes for both sides, and the loss of an update of rollmesh on them.

Both sides get the same weights, tokens, masks and rewards. Everything else each side computes itself: the forward
passes, log-probs before the update and under the reference, advantages, importance weights, and the normalization.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor
from transformers import PreTrainedModel

from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.demo.tokenizer import END, SPECIAL_TOKENS, build_tokenizer
from rollmesh.shared.domain.trajectory import (
    FinishReason,
    FloatArray,
    GroupContext,
    Outcome,
    SamplingParams,
    Segment,
    TrainingSample,
)
from rollmesh.trainer.batch import UpdateBatch
from rollmesh.trainer.config import UpdateConfig
from rollmesh.trainer.model_files import load_model, write_model_folder
from rollmesh.trainer.update import BatchTrainer
from rollmesh.trainer.update_rules import OptimizerStep

from ..unit.trainer.builders import action, group, member, prompt, training_sample
from .trl_work import CURRENT, REFERENCE, START, Played, PlayedBatch, save_weights, set_weights

SMALL = TinyModelConfig(hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=12, num_layers=1)
"""1,888 parameters."""
SCALE = 20.0
"""Factor of the initial weights: with it, distributions are not almost uniform."""
CALLS_MAX, TOKENS_MAX = 3, 7
"""Turns of an episode, and tokens of a turn."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the random batches of a pair are like."""

    groups: int = 3
    group_size: int = 4
    drift: float = 0.1
    """Noise of the weights of the compared step, relative to their standard deviation in the tensor."""
    mismatch: float = 0.0
    """Standard deviation of the log-ratios of the policy before the update and the sampler."""
    turns: bool = True
    """Whether episodes have several turns, with tokens of tools between them."""
    temperature: float = 1.0
    truncated: float = 0.0
    """Share of the episodes that a limit of tokens ended."""
    unscored: float = 0.0
    """Share of the episodes, or of their single rewards, without a reward."""
    rewards: tuple[str, ...] = ("correct",)


def make_batch(shape: Shape, seed: int, folder: Path) -> PlayedBatch:
    """Return random episodes, and write the weights of the policies."""
    rng = np.random.default_rng(seed)
    start = folder / START
    start.mkdir(parents=True)
    model = build_tiny_model(SMALL, seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(SCALE)
    write_model_folder(model, build_tokenizer(), start)
    tokens = [_tokens(shape, rng) for _ in range(shape.groups * shape.group_size)]
    behavior = [_behavior(model, *one, shape, rng) for one in tokens]
    for name, drift in ((CURRENT, shape.drift), (REFERENCE, 0.1)):
        moved = load_model(start)
        with torch.no_grad():
            for parameter in moved.parameters():
                noise = torch.from_numpy(rng.standard_normal(tuple(parameter.shape)).astype(np.float32))
                parameter.add_(noise * drift * (parameter.std() if parameter.ndim > 1 else 1.0))
        save_weights(moved, folder / name)
    episodes = []
    for (before, completion, mask), logprobs in zip(tokens, behavior, strict=True):
        truncated = bool(rng.random() < shape.truncated)
        rewards = {name: float(np.round(rng.random(), 2)) for name in shape.rewards if rng.random() >= shape.unscored}
        episodes.append(
            Played(
                prompt=before,
                completion=completion[:-1] if truncated else completion,
                mask=mask[:-1] if truncated else mask,
                behavior=logprobs[:-1] if truncated else logprobs,
                rewards=rewards,
                truncated=truncated,
            )
        )
    return PlayedBatch(folder=str(folder), episodes=episodes)


def _tokens(shape: Shape, rng: np.random.Generator) -> tuple[list[int], list[int], list[int]]:
    """Return the prompt, the completion and its mask."""

    def some(least: int) -> list[int]:
        found: list[int] = rng.integers(len(SPECIAL_TOKENS), 108, rng.integers(least, TOKENS_MAX + 1)).tolist()
        return found

    completion = some(1)
    mask = [1] * len(completion)
    for _ in range(rng.integers(CALLS_MAX) if shape.turns else 0):
        result, turn = some(2), some(1)
        completion, mask = completion + result + turn, mask + [0] * len(result) + [1] * len(turn)
    return some(3), [*completion, SPECIAL_TOKENS.index(END)], [*mask, 1]


@torch.no_grad()
def _behavior(
    model: PreTrainedModel,
    before: list[int],
    completion: list[int],
    mask: list[int],
    shape: Shape,
    rng: np.random.Generator,
) -> list[float]:
    """Return the log-probs of the completion under the model at the temperature, with noise."""
    ids = torch.tensor([before + completion])
    logits: Tensor = model(input_ids=ids).logits[0, len(before) - 1 : -1] / shape.temperature
    found = logits.log_softmax(-1).gather(-1, ids[0, len(before) :, None]).squeeze(-1).numpy()
    found = (found + shape.mismatch * rng.standard_normal(len(found))) * np.array(mask)
    return [float(value) for value in np.minimum(found, 0.0)]


def samples_of(
    batch: PlayedBatch, shape: Shape, entropies: Tensor | None = None
) -> tuple[list[TrainingSample], list[GroupContext]]:
    """Return the samples and groups of a batch. `entropies` [B, T] are the engine's output `entropy`."""
    samples, groups = [], []
    for number, one in enumerate(batch.episodes):
        name = f"g{number // shape.group_size}"
        segments = list(_segments(one, None if entropies is None else entropies[number].numpy()))
        params = SamplingParams(temperature=shape.temperature)
        samples.append(training_sample(f"s{number}", segments, of=name, params=params))
    for start in range(0, len(samples), shape.group_size):
        members = [
            member(sample.sample.sample_id, one.rewards, of=sample)
            if one.rewards
            else member(
                sample.sample.sample_id, {name: 0.0 for name in shape.rewards}, outcome=Outcome.INFRA_FAILURE, of=sample
            )
            for sample, one in list(zip(samples, batch.episodes, strict=True))[start : start + shape.group_size]
        ]
        groups.append(group(samples[start].group, *members))
    return samples, groups


def _segments(one: Played, entropies: FloatArray | None) -> Iterator[Segment]:
    """Yield the segments of an episode."""
    yield prompt(one.prompt)
    mask = np.array(one.mask)
    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    for begin, end in pairwise(edges):
        ids = one.completion[begin:end]
        if not mask[begin]:
            yield prompt(ids)
            continue
        made = action(ids, one.behavior[begin:end])
        if entropies is not None:
            made = replace(made, arrays={"entropy": entropies[begin:end].astype(np.float32)})
        if one.truncated and end == len(mask):
            made = replace(made, finish=FinishReason.LENGTH)
        yield made


class AtCurrent:
    """An update rule: steps under given weights, whatever the steps before have changed."""

    def __init__(self, model: PreTrainedModel, path: Path, samples: Sequence[int], repeats: int) -> None:
        self._model, self._path, self._samples, self._repeats = model, path, samples, repeats

    def steps(self, batch: UpdateBatch, rng: np.random.Generator) -> Iterator[OptimizerStep]:
        for _ in range(self._repeats):
            set_weights(self._model, self._path)
            yield OptimizerStep(samples=self._samples)


@dataclass(frozen=True, kw_only=True)
class Ours:
    """The loss of an optimizer step and its gradient by name."""

    loss: float
    gradients: dict[str, Tensor]
    verdicts: list[str | None]


def trained(
    config: UpdateConfig,
    batch: PlayedBatch,
    shape: Shape,
    *,
    entropies: Tensor | None = None,
    reward_weights: dict[str, float] | None = None,
    share: float = 1.0,
    repeats: int = 1,
) -> Ours:
    """Make an update of `BatchTrainer` whose steps run under the current weights, on the first `share` of the samples,
    and return the mean loss of its steps and the gradient of the last one, before its norm is clipped."""
    folder = Path(batch.folder)
    model = load_model(folder / START)

    def reference() -> PreTrainedModel:
        made = load_model(folder / START)
        set_weights(made, folder / REFERENCE)
        return made

    config = replace(config, optimizer=replace(config.optimizer, clip_norm=1e9))
    outputs = () if entropies is None else ("entropy",)
    trainer = BatchTrainer(
        model, config, seed=0, outputs=outputs, reward_weights=reward_weights, initial_model=reference
    )
    samples, groups = samples_of(batch, shape, entropies)
    chosen = range(int(share * len(samples)))
    trainer.plugins.rule = AtCurrent(model, folder / CURRENT, chosen, repeats)  # type: ignore[assignment]
    gradients: dict[str, Tensor] = {}

    def keep(*args: object) -> None:
        gradients.update((name, p.grad.clone()) for name, p in model.named_parameters() if p.grad is not None)

    trainer.optimizer.register_step_pre_hook(keep)
    result = trainer.update(1, samples, groups)
    return Ours(loss=result.metrics["loss"], gradients=gradients, verdicts=[v.reason for v in result.verdicts])
