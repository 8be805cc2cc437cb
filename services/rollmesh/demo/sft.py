"""Supervised warm start: imitate demonstrations until a target success, so that RL has something to reinforce.

Muon on the hidden matrices, AdamW on embedding and vectors; loss on what the assistant wrote only. Levels come in by a
ladder: a few at first, one more whenever the smoothed loss is small. It stops at a target success, not after a number of steps:
the start of RL is then alike over seeds and machines. The target must be measured on the validation range, so that the test
range stays unseen.

Collaborators: `chat` (renders demonstrations), `packing`, `forward`, `muon`. Tasks come from the caller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from msgspec import Meta
from transformers import PreTrainedModel

from rollmesh.demo.chat import EncodedDemonstration
from rollmesh.demo.muon import Muon
from rollmesh.shared.settings import PositiveFloat, PositiveInt, Settings
from rollmesh.trainer.config import PackingConfig
from rollmesh.trainer.forward import logprobs_of, target_logits, target_logprobs
from rollmesh.trainer.optim import guarded_step, set_lr
from rollmesh.trainer.packing import Sequence1D, num_targets, pack


class WarmStartConfig(Settings):
    """The warm start. Defaults are for the tiny model: 300-600 steps."""

    levels: int = 6
    """Highest level demonstrated. RL gets no signal on levels beyond it: success there stays at 0."""
    levels_first: PositiveInt = 3
    """Levels 1 ... this one at the start. Starting with level 1 alone is slower."""
    promote_loss: PositiveFloat = 0.15
    """A level is added when the smoothed loss per token, in nats, falls below this."""
    batch_size: PositiveInt = 16
    """Demonstrations per step."""
    muon_lr: PositiveFloat = 0.015
    adamw_lr: PositiveFloat = 4e-3
    warmup_steps: PositiveInt = 20
    clip_norm: PositiveFloat = 1.0
    target_success: Annotated[float, Meta(gt=0, le=1)] = 0.45
    """Stop at this validation success. Higher leaves RL less to show; below 0.3 it rises slowly."""
    evaluate_every: PositiveInt = 10
    """Steps between evaluations, once all levels are in. Success can rise by 0.4 within 25 steps: rare ones overshoot."""
    steps_max: PositiveInt = 3000
    """Give up after this many steps."""
    packing: PackingConfig = PackingConfig()

    def check_fields(self) -> None:
        if self.levels_first > self.levels:
            raise ValueError(f"`levels_first` must be <= levels = {self.levels}, got {self.levels_first}")


Demonstrate = Callable[[int, np.random.Generator], EncodedDemonstration]
"""(level, generator) -> a demonstration of a new task of that level, from the training range."""

Evaluate = Callable[[PreTrainedModel], float]
"""Model -> success in [0, 1] on the validation range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartProgress:
    """After a step: loss per trained token in nats; `success` is None where nothing was evaluated."""

    step: int
    level: int
    loss: float
    loss_smoothed: float
    num_tokens: int
    """Real tokens seen so far, padding excluded."""
    success: float | None


class WarmStartFailed(RuntimeError):
    """The target was not reached within `steps_max` steps."""


def warm_start(
    model: PreTrainedModel,
    demonstrate: Demonstrate,
    evaluate: Evaluate,
    config: WarmStartConfig,
    *,
    seed: int,
    on_step: Callable[[WarmStartProgress], None] = lambda _: None,
) -> WarmStartProgress:
    """Train `model` in place until the target. Returns the last progress; raises WarmStartFailed.

    Deterministic: the same model, seed and callbacks give the same weights.
    """
    rng = np.random.default_rng([seed, 0])
    optimizers = _make_optimisers(model, config)
    level, smoothed, num_tokens = config.levels_first, math.inf, 0
    for step in range(1, config.steps_max + 1):
        _set_rates(optimizers, config, step)
        demos = [demonstrate(_draw_level(level, rng), rng) for _ in range(config.batch_size)]
        loss = imitation_step(model, demos, optimizers, config)
        smoothed = loss if math.isinf(smoothed) else 0.9 * smoothed + 0.1 * loss
        num_tokens += sum(len(d.token_ids) for d in demos)
        due = level == config.levels and step % config.evaluate_every == 0
        success = evaluate(model.train(False)) if due else None
        progress = WarmStartProgress(
            step=step, level=level, loss=loss, loss_smoothed=smoothed, num_tokens=num_tokens, success=success
        )
        on_step(progress)
        if success is not None and success >= config.target_success:
            return progress
        level += smoothed < config.promote_loss and level < config.levels
    raise WarmStartFailed(
        f"success stayed below {config.target_success} in {config.steps_max} steps (level {level} of {config.levels}, "
        f"loss {smoothed:.3f}); another seed, or a larger steps_max, may reach it"
    )


def imitation_step(
    model: PreTrainedModel,
    demos: Sequence[EncodedDemonstration],
    optimizers: Sequence[torch.optim.Optimizer],
    config: WarmStartConfig,
) -> float:
    """One optimiser step on the mean loss per trained token; returns that loss in nats. Raises ValueError if not finite."""
    sequences = _sequences(demos)
    total = num_targets(sequences)
    model.train()
    loss_sum = 0.0
    for batch in pack(sequences, config.packing, device=model.device):
        loss = -target_logprobs(target_logits(model, batch), batch).sum() / total
        loss.backward()  # type: ignore[no-untyped-call]
        loss_sum += float(loss.detach())
    if guarded_step(*optimizers, clip_norm=config.clip_norm, loss=loss_sum) is None:
        raise ValueError(f"the warm start's loss or gradient is not finite (loss {loss_sum})")
    return loss_sum


def demonstration_probability(
    model: PreTrainedModel, demos: Sequence[EncodedDemonstration], packing: PackingConfig | None = None
) -> float:
    """Mean probability that sampling at temperature 1 reproduces a demonstration exactly, given its observations.

    A lower bound of success where tools are deterministic (other ways to the answer are not counted), without noise from
    sampling and at the price of one forward.
    """
    sequences = _sequences(demos)
    logprobs = logprobs_of(model, sequences, packing or PackingConfig()).double()
    lengths = [int(s.target_mask.sum()) for s in sequences]
    return float(np.mean([part.sum().exp().item() for part in torch.split(logprobs, lengths)]))


def _make_optimisers(model: PreTrainedModel, config: WarmStartConfig) -> tuple[Muon, torch.optim.AdamW]:
    """Hidden matrices to Muon; embeddings, output layer and vectors to AdamW."""
    outer = {id(p) for m in (model.get_input_embeddings(), model.get_output_embeddings()) for p in m.parameters()}  # type: ignore[no-untyped-call]
    hidden = [p for p in model.parameters() if p.ndim == 2 and id(p) not in outer]
    rest = [p for p in model.parameters() if p.ndim != 2 or id(p) in outer]
    adamw = torch.optim.AdamW(rest, lr=config.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    return Muon(hidden, lr=config.muon_lr), adamw


def _set_rates(optimizers: tuple[Muon, torch.optim.AdamW], config: WarmStartConfig, step: int) -> None:
    """Linear warm-up, then constant."""
    warm = min(1.0, step / config.warmup_steps)
    for optimizer, peak in zip(optimizers, (config.muon_lr, config.adamw_lr), strict=True):
        set_lr(optimizer, peak * warm)


def _draw_level(level: int, rng: np.random.Generator) -> int:
    """Uniform over 1 ... level, the highest twice as likely."""
    return min(int(rng.integers(1, level + 2)), level)


def _sequences(demos: Sequence[EncodedDemonstration]) -> list[Sequence1D]:
    return [Sequence1D(d.token_ids, d.loss_mask) for d in demos]
