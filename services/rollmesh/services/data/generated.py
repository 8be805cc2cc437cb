"""Tasks from a seed: what sources have in common that need no file, have levels, and never run out of held-out tasks.

A family makes the key of a task, one line of text that says all of it, and from a key the prompt and an ideal agent's way through.
Task n of a split is a pure function of (seed, split, n, the level settings): the stream is generated in order, so asking for
more tasks never changes the earlier ones. Keys are distinct within a split; the split is a hash range of the key itself, so
the splits are disjoint whatever the seeds.

Collaborators: `calc_source`, `code_source`, `sql_source` (one family each); the maker of tiny models, which imitates the ideal agent.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import msgspec

from rollmesh.services.data.pool import MemoryPool
from rollmesh.services.data.task import Split, Task, check_shares, split_of
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.trajectory import Message

NUM_TASKS_MAX = 1_000_000
_ATTEMPTS_MAX = 10_000
"""Draws without a new key of the wanted split before giving up: the level has too few tasks."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """How an ideal agent solves a task: (what it asks the tool, what the tool says) in order, then its answer."""

    calls: tuple[tuple[str, str], ...]
    answer: str


class Family(Protocol):
    """A kind of task that a program makes. Stateless: everything follows from the key."""

    name: str
    """Prefix of task ids, and scheme of oracle references: `name:key`."""
    level_max: int
    """Hardest level there is; the easiest is 1."""

    def make(self, rng: random.Random, level: int) -> str:
        """A key of that level."""

    def prompt(self, key: str) -> str:
        """What the agent is shown."""

    def demonstration(self, key: str) -> Demonstration:
        """How the task is solved."""


class GeneratedConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a generated source."""

    family: ClassVar[Family]
    """What is generated."""

    seed: int = 0
    """Seed of the stream. Another seed gives other tasks from the same hash ranges."""
    level_min: int = 1
    """Easiest level."""
    level_max: int = 5
    """Hardest level. Levels outside what the warm start has seen give no signal: keep it within."""
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
    tools: tuple[str, ...] = ()
    """Tools each task names."""

    def __post_init__(self) -> None:
        if not 1 <= self.level_min <= self.level_max <= self.family.level_max:
            raise ValueError(
                f"level_min and level_max must satisfy 1 <= level_min <= level_max <= {self.family.level_max}, "
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

    def split(self, key: str) -> Split:
        """The split of the task with that key."""
        return split_of(key, validation_share=self.validation_share, test_share=self.test_share)


def generated_pool(config: GeneratedConfig, split: Split) -> MemoryPool:
    """The pool of one split. ConfigError if a level has fewer tasks in this split than are asked for."""
    return MemoryPool(
        Task(
            task_id=f"{config.family.name}-{config.seed}-{split}-{index}",
            messages=(Message(role="user", content=config.family.prompt(key)),),
            tools=config.tools,
            oracle_ref=f"{config.family.name}:{key}",
            labels={"level": str(level)},
            split=split,
        )
        for index, (level, key) in enumerate(generated_keys(config, split))
    )


def generated_keys(config: GeneratedConfig, split: Split) -> Iterator[tuple[int, str]]:
    """(level, key) of each task of one split, in order. ConfigError as `generated_pool`."""
    rng = random.Random(f"{config.family.name}/{config.seed}/{split}")
    levels = _level_sequence(config.level_weights or (1.0,) * (config.level_max - config.level_min + 1))
    num_tasks = {
        Split.TRAIN: config.num_train,
        Split.VALIDATION: config.num_validation,
        Split.TEST: config.num_test,
    }[split]
    seen: set[str] = set()
    for _ in range(num_tasks):
        level = config.level_min + next(levels)
        key = _new_key(config, split, rng, level, seen)
        seen.add(key)
        yield level, key


def _level_sequence(weights: Sequence[float]) -> Iterator[int]:
    """Indices of `weights` in exact proportion at every prefix (smooth weighted round robin; equal weights: 0, 1, 2, ...)."""
    total = sum(weights)
    credit = [0.0] * len(weights)
    while True:
        credit = [c + w for c, w in zip(credit, weights, strict=True)]
        chosen = max(range(len(credit)), key=lambda i: (credit[i], -i))
        credit[chosen] -= total
        yield chosen


def _new_key(config: GeneratedConfig, split: Split, rng: random.Random, level: int, seen: set[str]) -> str:
    for _ in range(_ATTEMPTS_MAX):
        key = config.family.make(rng, level)
        if config.split(key) is split and key not in seen:
            return key
    raise ConfigError(
        f"level {level} has no further task in the {split} range after {len(seen)} tasks: "
        f"lower num_{split} or drop the level"
    )
