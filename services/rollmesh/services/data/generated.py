"""Sources of generated tasks: they have levels, need no file, and are determined by a seed.

A task family makes the key of a task, one line of text that determines the task, and derives prompt and demonstration
from the key. Task n of a split is a pure function of (seed, split, n, level settings). The stream is generated in
order, so a larger number of tasks does not change the earlier ones. Keys are distinct within a split. The split is a
hash range of the key, so splits are disjoint for all seeds.

Collaborators: `rollmesh.demo.families` (the families of the demo), `rollmesh.demo.make_model` (imitates the
demonstrations).
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Annotated, ClassVar

from msgspec import Meta

from rollmesh.services.data.proportion import in_proportion
from rollmesh.services.data.source import TaskSource
from rollmesh.services.data.task import PoolTask, Split, check_shares, split_of
from rollmesh.shared.config.settings import NonNegativeFloat, PositiveInt, Settings
from rollmesh.shared.domain.trajectory import Message
from rollmesh.shared.errors import ConfigError

NUM_TASKS_MAX = 1_000_000
_ATTEMPTS_MAX = 10_000
"""Limit of draws without a new key of the split. Beyond it, the level has too few tasks."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """An ideal episode: (input of the tool, its output) for each call in order, then the answer."""

    calls: tuple[tuple[str, str], ...]
    answer: str


class GeneratedOptions(Settings):
    """Settings of a generated source."""

    seed: int = 0
    """Seed of the stream. Another seed gives other tasks from the same hash ranges."""
    level_min: PositiveInt = 1
    """Easiest level."""
    level_max: int = 5
    """Hardest level. Levels that the warm start has not seen give no learning signal."""
    level_weights: tuple[NonNegativeFloat, ...] = ()
    """Relative share of each level, beginning with `level_min`. Empty means equal shares."""
    num_train: Annotated[int, Meta(ge=0, le=NUM_TASKS_MAX)] = 4096
    """Tasks in the training pool."""
    num_validation: Annotated[int, Meta(ge=0, le=NUM_TASKS_MAX)] = 256
    """Tasks in the validation pool."""
    num_test: Annotated[int, Meta(ge=0, le=NUM_TASKS_MAX)] = 512
    """Tasks in the test pool."""
    validation_share: Annotated[float, Meta(ge=0, lt=1)] = 0.1
    """Share of the hash range that is the validation split."""
    test_share: Annotated[float, Meta(ge=0, lt=1)] = 0.1
    """Share of the hash range that is the test split."""
    tools: tuple[str, ...] = ()
    """Names of the tools of each task."""
    agent: str = ""
    """Name of the agent of each task, an entry of `rollout.agents`. Empty means the default agent."""
    scorers: tuple[str, ...] = ()
    """Names of the rewards that score each task. Empty means all."""

    def check_fields(self) -> None:
        if self.level_min > self.level_max:
            raise ValueError(f"`level_min` must be <= level_max = {self.level_max}, got {self.level_min}")
        num_levels = self.level_max - self.level_min + 1
        if self.level_weights and len(self.level_weights) != num_levels:
            raise ValueError(
                f"`level_weights` must have {num_levels} entries, one per level, got {len(self.level_weights)}"
            )
        if self.level_weights and not sum(self.level_weights):
            raise ValueError(f"`level_weights` must have a positive sum, got {self.level_weights}")
        if len(set(self.scorers)) != len(self.scorers):
            raise ValueError(f"`scorers` must have different names, got {', '.join(self.scorers)}")
        check_shares(self.validation_share, self.test_share)


class GeneratedSource(TaskSource, ABC):
    """The source of one task family. A family has no state, because the key determines the task.

    A subclass MAY set `Options` to a subclass with other defaults.
    """

    name: ClassVar[str]
    """Prefix of task ids, and scheme of oracle references: `name:key`."""
    hardest_level: ClassVar[int]
    """The hardest level; the easiest is 1."""
    Options: ClassVar[type[GeneratedOptions]] = GeneratedOptions

    @abstractmethod
    def make(self, rng: random.Random, level: int) -> str:
        """Return a random key of that level."""

    @abstractmethod
    def prompt(self, key: str) -> str:
        """Return the prompt of the task."""

    @abstractmethod
    def demonstration(self, key: str) -> Demonstration:
        """Return an ideal episode of the task."""

    def agent(self, key: str) -> str:
        """Return the name of the agent of the task. A family MAY choose it by the key, by default it is the option."""
        return self.options.agent

    def scorers(self, key: str) -> tuple[str, ...]:
        """Return the names of the rewards that score the task. A family MAY choose them by the key, by default they are
        the option."""
        return self.options.scorers

    def __init__(self, *, options: GeneratedOptions, base_dir: str | Path | None = None) -> None:
        """`base_dir` is not used. Raise ConfigError if the family does not have all levels."""
        if options.level_max > self.hardest_level:
            raise ConfigError(
                f"`level_max` must be in [`level_min` = {options.level_min}, {self.hardest_level}], got "
                f"{options.level_max}"
            )
        self.options = options

    def tasks(self) -> Iterator[PoolTask]:
        """Yield the tasks of all splits. Raise ConfigError if a level has fewer tasks in a split than are asked for."""
        for split in Split:
            for index, (level, key) in enumerate(self.keys(split)):
                yield PoolTask(
                    task_id=f"{self.name}-{self.options.seed}-{split}-{index}",
                    messages=(Message(role="user", content=self.prompt(key)),),
                    tools=self.options.tools,
                    oracle_ref=f"{self.name}:{key}",
                    labels={"level": str(level)},
                    split=split,
                    agent=self.agent(key),
                    scorers=self.scorers(key),
                )

    def keys(self, split: Split) -> Iterator[tuple[int, str]]:
        """Yield (level, key) of each task of one split, in order. Raise ConfigError as `tasks`."""
        options = self.options
        rng = random.Random(f"{self.name}/{options.seed}/{split}")
        weights = options.level_weights or (1.0,) * (options.level_max - options.level_min + 1)
        levels = in_proportion(repeat(weights))
        num_tasks = {
            Split.TRAIN: options.num_train,
            Split.VALIDATION: options.num_validation,
            Split.TEST: options.num_test,
        }[split]
        seen: set[str] = set()
        for _ in range(num_tasks):
            level = options.level_min + next(levels)
            key = self._new_key(split, rng, level, seen)
            seen.add(key)
            yield level, key

    def split(self, key: str) -> Split:
        """Return the split of the task with that key."""
        return split_of(key, validation_share=self.options.validation_share, test_share=self.options.test_share)

    def _new_key(self, split: Split, rng: random.Random, level: int, seen: set[str]) -> str:
        for _ in range(_ATTEMPTS_MAX):
            key = self.make(rng, level)
            if self.split(key) is split and key not in seen:
                return key
        raise ConfigError(
            f"level {level} has no further task in the {split} range after {len(seen)} tasks: "
            f"lower num_{split} or drop the level"
        )
