"""Arithmetic tasks from a seed: needs no file, has levels of difficulty, and never runs out of held-out tasks.

Task n of a split is a pure function of (seed, split, n, the level settings): the stream is generated in order, so asking for
more tasks never changes the earlier ones. Expressions are distinct within a split; the split is a hash range of the
expression itself, so the splits are disjoint whatever the seeds.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import msgspec

from rollmesh.services.data.calc import make_expression
from rollmesh.services.data.pool import MemoryPool
from rollmesh.services.data.task import Split, Task, check_shares, split_of
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.trajectory import Message

LEVEL_MAX = 32
NUM_TASKS_MAX = 1_000_000
_ATTEMPTS_MAX = 10_000
"""Draws without a new expression of the wanted split before giving up: the level has too few expressions."""


class CalcConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="calc", tag_field="kind"):
    """Settings of the arithmetic source."""

    seed: int = 0
    """Seed of the stream. Another seed gives other tasks from the same hash ranges."""
    level_min: int = 1
    """Fewest operators."""
    level_max: int = 5
    """Most operators, at most 32. Levels outside what the warm start has seen give no signal: keep it within."""
    level_weights: tuple[float, ...] = ()
    """Relative share of each level from `level_min` on; empty = equal shares."""
    num_train: int = 4096
    """Tasks in the training pool."""
    num_validation: int = 256
    """Tasks in the validation pool."""
    num_test: int = 512
    """Tasks in the test pool."""
    validation_share: float = 0.1
    """Share of the hash range that is validation."""
    test_share: float = 0.1
    """Share of the hash range that is test."""
    tools: tuple[str, ...] = ("calculator",)
    """Tools each task names."""

    def __post_init__(self) -> None:
        if not 1 <= self.level_min <= self.level_max <= LEVEL_MAX:
            raise ValueError(
                f"level_min and level_max must satisfy 1 <= level_min <= level_max <= {LEVEL_MAX}, "
                f"got {self.level_min} and {self.level_max}"
            )
        num_levels = self.level_max - self.level_min + 1
        if self.level_weights and len(self.level_weights) != num_levels:
            raise ValueError(
                f"level_weights must have {num_levels} entries, one per level, got {len(self.level_weights)}"
            )
        if any(weight < 0 for weight in self.level_weights) or (self.level_weights and not sum(self.level_weights)):
            raise ValueError(f"level_weights must be >= 0 with a positive sum, got {self.level_weights}")
        for name in ("num_train", "num_validation", "num_test"):
            if not 0 <= getattr(self, name) <= NUM_TASKS_MAX:
                raise ValueError(f"{name} must be in [0, {NUM_TASKS_MAX}], got {getattr(self, name)}")
        check_shares(self.validation_share, self.test_share)


def calc_pool(config: CalcConfig, split: Split) -> MemoryPool:
    """The pool of one split. ConfigError if a level has fewer expressions in this split than are asked for."""
    num_tasks = {
        Split.TRAIN: config.num_train,
        Split.VALIDATION: config.num_validation,
        Split.TEST: config.num_test,
    }[split]
    return MemoryPool(_tasks(config, split, num_tasks))


def _tasks(config: CalcConfig, split: Split, num_tasks: int) -> Iterator[Task]:
    rng = random.Random(f"calc/{config.seed}/{split}")
    levels = _level_sequence(config.level_weights or (1.0,) * (config.level_max - config.level_min + 1))
    seen: set[str] = set()
    for index in range(num_tasks):
        level = config.level_min + next(levels)
        expression = _new_expression(config, split, rng, level, seen)
        seen.add(expression)
        yield Task(
            task_id=f"calc-{config.seed}-{split}-{index}",
            messages=(Message(role="user", content=expression),),
            tools=config.tools,
            oracle_ref=f"calc:{expression}",
            labels={"level": str(level)},
            split=split,
        )


def _level_sequence(weights: Sequence[float]) -> Iterator[int]:
    """Indices of `weights` in exact proportion at every prefix (smooth weighted round robin; equal weights: 0, 1, 2, ...)."""
    total = sum(weights)
    credit = [0.0] * len(weights)
    while True:
        credit = [c + w for c, w in zip(credit, weights, strict=True)]
        chosen = max(range(len(credit)), key=lambda i: (credit[i], -i))
        credit[chosen] -= total
        yield chosen


def _new_expression(config: CalcConfig, split: Split, rng: random.Random, level: int, seen: set[str]) -> str:
    for _ in range(_ATTEMPTS_MAX):
        text = make_expression(rng, level)
        found = split_of(text, validation_share=config.validation_share, test_share=config.test_share)
        if found is split and text not in seen:
            return text
    raise ConfigError(
        f"level {level} has no further expression in the {split} range after {len(seen)} tasks: "
        f"lower num_{split} or drop the level"
    )
