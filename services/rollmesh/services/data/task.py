"""A task and the pool that contains it.

A task has a public part, which the agent may see, an `oracle_ref`, and private extras. The answer key is never in a
message of this service, because only the reward service resolves references. Private extras are in no task message; a
rollout worker requests them by name. Pools are finite, immutable and addressed by position, so
"task n" is the same in every process with the same configuration.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from rollmesh.shared.domain.extras import PRIVATE_BYTES_MAX, PUBLIC_BYTES_MAX, check_extras
from rollmesh.shared.domain.trajectory import Message


class Split(StrEnum):
    """The part of the data that contains a task. Parts are ranges of a hash of the prompt, so they never overlap."""

    TRAIN = "train"
    VALIDATION = "validation"
    TEST = "test"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolTask:
    """A prompt with a public part and an oracle reference."""

    task_id: str
    messages: tuple[Message, ...]
    """Conversation at the start of the episode. The rollout worker applies the chat template."""
    tools: tuple[str, ...] = ()
    """Names of the tools that the agent may call, as in `rollout.tools`."""
    oracle_ref: str = ""
    """`scheme:rest`. Empty if the task has no answer key."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels such as `level`, by which selectors and evaluations group tasks."""
    split: Split = Split.TRAIN
    agent: str = ""
    """Name of the agent that works on it, an entry of `rollout.agents`. Empty: the default agent."""
    scorers: tuple[str, ...] = ()
    """Names of the rewards of `reward.scorers` that score it, each once. Empty: all."""
    extras: Mapping[str, object] = field(default_factory=dict)
    """Public extras by name: JSON values such as files or a prefix, which the ledger stores and every process may
    read."""
    private_extras: Mapping[str, object] = field(default_factory=dict, repr=False)
    """Private extras by name: JSON values such as a solution, which only agents get that `rollout.private_extras`
    permits to read them."""

    def __post_init__(self) -> None:
        if not isinstance(self.agent, str):
            raise TypeError(f"`agent` must be the name of an agent or empty, got {self.agent!r}")
        if not _are_different_names(self.scorers):
            raise ValueError(f"`scorers` must be a tuple of different names of rewards, got {self.scorers!r}")
        check_extras(self.extras, PUBLIC_BYTES_MAX)
        check_extras(self.private_extras, PRIVATE_BYTES_MAX)


def _are_different_names(names: object) -> bool:
    return (
        isinstance(names, (tuple, list))
        and all(isinstance(name, str) and name for name in names)
        and len(set(names)) == len(names)
    )


class TaskPool(Protocol):
    """The tasks of one split in a fixed order."""

    @property
    def digest(self) -> str:
        """Hex digest of the tasks. Pools with the same digest have the same task at every position."""

    def __len__(self) -> int: ...

    def task(self, position: int) -> PoolTask:
        """Return the task at `position` in [0, len). Raise IndexError beyond it."""

    def position(self, task_id: str) -> int | None:
        """Return the position of a task, or None if the pool does not contain it."""

    def label(self, position: int, name: str) -> str:
        """Return a label of the task at `position`, without a read of files. Empty if the task does not have it. Raise
        ConfigError if the label has too many values."""


class StoredPool(TaskPool, ABC):
    """A pool that reads its tasks from files when they are drawn, or may contain such a pool."""

    @abstractmethod
    def read(self, positions: Sequence[int]) -> list[PoolTask]:
        """Return the tasks at `positions`, in their order, as they are drawn: without private extras, which `task` also
        reads. Raise IndexError beyond the pool, and FileChanged if a file has changed since it was opened. Both block,
        so an event loop calls them in a thread."""


def read_tasks(pool: TaskPool, positions: Sequence[int]) -> list[PoolTask]:
    """Return the tasks at `positions`, as they are drawn. It blocks if the pool is stored."""
    return pool.read(positions) if isinstance(pool, StoredPool) else [pool.task(position) for position in positions]


def split_of(text: str, *, validation_share: float, test_share: float) -> Split:
    """Return the split of `text` by the first 8 bytes of its SHA-256, read as a fraction of 2**64.

    [0, test_share) is TEST, the next `validation_share` is VALIDATION, and the rest is TRAIN. The split depends only on
    the text, so neither a seed nor the order of the file can move a held-out prompt into training.
    """
    fraction = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2.0**64
    if fraction < test_share:
        return Split.TEST
    return Split.VALIDATION if fraction < test_share + validation_share else Split.TRAIN


def check_shares(validation_share: float, test_share: float) -> None:
    """Raise ValueError unless the shares leave a part for training."""
    if validation_share + test_share >= 1.0:
        raise ValueError(f"`validation_share` must be < 1 - test_share = {1 - test_share:g}, got {validation_share}")
