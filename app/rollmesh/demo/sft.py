"""Supervised warm start: imitate demonstrations until a target success, so that RL has behavior to reinforce.

Hidden matrices are trained by Muon, embedding and vectors by AdamW, with a loss on the tokens of the assistant only.
Levels are added one by one, each when the smoothed loss is small. The training stops at a target success, not after a
number of steps, so the start of RL is similar for all seeds and machines. The target must be measured on the validation
range, because the test range must stay unseen.

Collaborators: `chat` (renders demonstrations), `packing`, `forward`, `muon`. The caller provides the tasks.
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
from rollmesh.shared.config.settings import PositiveFloat, PositiveInt, Settings
from rollmesh.trainer.config import PackingConfig
from rollmesh.trainer.forward import logprobs_of, target_logits, target_logprobs
from rollmesh.trainer.optim import guarded_step, set_lr
from rollmesh.trainer.packing import pack
from rollmesh.trainer.sequences import Sequence1D, num_targets


class WarmStartConfig(Settings):
    """Settings of the warm start. With the defaults, the tiny model needs 300-600 steps."""

    levels: int = 6
    """Highest demonstrated level. RL has no signal on higher levels, because their success stays at 0."""
    levels_first: PositiveInt = 3
    """Highest level at the start, with all lower ones. A start with level 1 alone is slower."""
    promote_loss: PositiveFloat = 0.15
    """Smoothed loss per token, in nats, below which a level is added."""
    batch_size: PositiveInt = 16
    """Demonstrations per step."""
    muon_lr: PositiveFloat = 0.015
    adamw_lr: PositiveFloat = 4e-3
    warmup_steps: PositiveInt = 20
    clip_norm: PositiveFloat = 1.0
    target_success: Annotated[float, Meta(gt=0, le=1)] = 0.45
    """Validation success at which the training stops. A higher value leaves less to RL; RL is slow from a start below
    0.3."""
    evaluate_every: PositiveInt = 10
    """Steps between evaluations after all levels were added. Success can rise by 0.4 within 25 steps, so rare
    evaluations overshoot."""
    steps_max: PositiveInt = 3000
    """Maximum number of steps."""
    packing: PackingConfig = PackingConfig()

    def check_fields(self) -> None:
        if self.levels_first > self.levels:
            raise ValueError(f"`levels_first` must be <= levels = {self.levels}, got {self.levels_first}")


Demonstrate = Callable[[int, np.random.Generator], EncodedDemonstration]
"""Returns a demonstration of a new task of a level, from the training range."""

Evaluate = Callable[[PreTrainedModel], float]
"""Returns the success of a model in [0, 1] on the validation range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartProgress:
    """Progress after a step. `loss` is per trained token, in nats. `success` is None if the step had no evaluation."""

    step: int
    level: int
    loss: float
    loss_smoothed: float
    num_tokens: int
    """Number of tokens trained on so far, without padding."""
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
    """Train `model` in place until the target, and return the last progress. Raise WarmStartFailed.

    The same model, seed and callbacks give the same weights.
    """
    rng = np.random.default_rng([seed, 0])
    optimizers = _make_optimizers(model, config)
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
    """Make one optimizer step on the mean loss per trained token, and return that loss in nats. Raise ValueError if not
    finite."""
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
    """Return the mean probability that sampling at temperature 1 reproduces a demonstration exactly, given its
    observations.

    With deterministic tools this is a lower bound of success, because other solutions are not counted. It has no
    sampling noise and costs one forward pass.
    """
    sequences = _sequences(demos)
    logprobs = logprobs_of(model, sequences, packing or PackingConfig()).double()
    lengths = [int(s.target_mask.sum()) for s in sequences]
    return float(np.mean([part.sum().exp().item() for part in torch.split(logprobs, lengths)]))


def _make_optimizers(model: PreTrainedModel, config: WarmStartConfig) -> tuple[Muon, torch.optim.AdamW]:
    """Use Muon for hidden matrices, and AdamW for embeddings, output layer and vectors."""
    outer = {id(p) for m in (model.get_input_embeddings(), model.get_output_embeddings()) for p in m.parameters()}  # type: ignore[no-untyped-call]
    hidden = [p for p in model.parameters() if p.ndim == 2 and id(p) not in outer]
    rest = [p for p in model.parameters() if p.ndim != 2 or id(p) in outer]
    adamw = torch.optim.AdamW(rest, lr=config.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    return Muon(hidden, lr=config.muon_lr), adamw


def _set_rates(optimizers: tuple[Muon, torch.optim.AdamW], config: WarmStartConfig, step: int) -> None:
    """Set learning rates: a linear warm-up, then constant."""
    warm = min(1.0, step / config.warmup_steps)
    for optimizer, peak in zip(optimizers, (config.muon_lr, config.adamw_lr), strict=True):
        set_lr(optimizer, peak * warm)


def _draw_level(level: int, rng: np.random.Generator) -> int:
    """Draw uniformly from 1 ... level, with twice the probability for the highest."""
    return min(int(rng.integers(1, level + 2)), level)


def _sequences(demos: Sequence[EncodedDemonstration]) -> list[Sequence1D]:
    return [Sequence1D(d.token_ids, d.loss_mask) for d in demos]
