"""What the comparison sends to TRL's interpreter, and how weights are exchanged. Both interpreters import this module.

The result of a run on a batch is a safetensors file with the scalar `loss`, `advantages` [B], `entropies` [B, T] and
`gradient/NAME` of each parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

GRADIENT = "gradient/"
START, CURRENT, REFERENCE = "start", "current.safetensors", "reference.safetensors"
"""Names in the folder of a batch: the model folder of the policy before the update, and the weights of the policy of
the compared optimizer step and of the reference."""


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """A completed episode. `mask` [n] is 1 where the policy sampled the token of the completion, `behavior` [n] is its
    log-prob there, and 0 elsewhere."""

    prompt: list[int]
    completion: list[int]
    mask: list[int]
    behavior: list[float]
    rewards: dict[str, float]
    """Rewards by name. Empty: no reward could be computed."""
    truncated: bool = False
    """A limit of tokens ended it."""


class PlayedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Episodes, group by group, and the folder with the weights."""

    folder: str
    episodes: list[Played]


class TrlRun(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration of TRL and the batches on which it computes a loss."""

    name: str
    batches: list[PlayedBatch]
    group_size: int
    rewards: list[str]
    """Names of the rewards, one reward function each."""
    trainer: str = "grpo"
    """`grpo`, `rloo`, `gmpo` or `async_grpo`, whose loss gets the advantages of `grpo`."""
    options: dict[str, float | int | str | bool | list[float] | None] = {}
    """Fields of the trainer's configuration."""
    overlong: tuple[int, int] | None = None
    """Longest completion and buffer of a further reward function, `get_soft_overlong_punishment`."""
    steps: int = 1
    """Parts of equal size into which the batch is cut (`steps_per_generation`)."""
    accumulated: int = 1
    """The first parts that are the micro-batches of the compared optimizer step."""
    repeats: int = 1
    """Optimizer steps on the same data and weights. The gradient is that of the last one, the loss their mean."""
    corrects_sampler: bool = False
    """Give TRL the behavior log-probs as those of another sampler, which it corrects for."""


class TrlWork(msgspec.Struct, frozen=True, kw_only=True):
    runs: list[TrlRun]
    results: str
    """Folder of the results, `NAME-NUMBER.safetensors` for each batch of each run."""


def save_weights(model: nn.Module, path: Path) -> None:
    save_file({name: p.detach().clone() for name, p in model.named_parameters()}, path)


def set_weights(model: nn.Module, path: Path) -> None:
    weights: Mapping[str, Tensor] = load_file(path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
