"""A task and the pool it is drawn from.

A task has a public part (what the agent may see) and an `oracle_ref`. The answer key itself never enters this service's
messages: only the reward service resolves a reference. Pools are finite, immutable and addressed by position, so that
"task n" means the same in every process that was given the same configuration.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from rollmesh.shared.trajectory import Message


class Split(StrEnum):
    """Which part of the data a task belongs to. Ranges of a hash of the prompt, so the parts can never overlap."""

    TRAIN = "train"
    VALIDATION = "validation"
    TEST = "test"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolTask:
    """A prompt with a public part and an oracle reference."""

    task_id: str
    messages: tuple[Message, ...]
    """The conversation the episode begins with; the chat template is applied by the rollout agent."""
    tools: tuple[str, ...] = ()
    """Names of the tools the agent may call: sandbox profiles or functions."""
    oracle_ref: str = ""
    """`scheme:rest`; empty = the task has no answer key."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """E.g. `level`; what selectors and evaluations group by."""
    split: Split = Split.TRAIN


class TaskPool(Protocol):
    """The tasks of one split in a fixed order."""

    @property
    def digest(self) -> str:
        """Hex digest of what the pool holds; two pools with one digest give the same task at every position."""

    def __len__(self) -> int: ...

    def task(self, position: int) -> PoolTask:
        """The task at `position` in [0, len). IndexError beyond."""

    def position(self, task_id: str) -> int | None:
        """Where a task stands, or None if this pool does not hold it."""

    def label(self, position: int, name: str) -> str:
        """A label of the task at `position`; empty if it has none of that name."""


def split_of(text: str, *, validation_share: float, test_share: float) -> Split:
    """The split that `text` falls into: the first 8 bytes of its SHA-256, read as a fraction of 2**64.

    [0, test_share) is TEST, the next `validation_share` VALIDATION, the rest TRAIN. It depends on nothing but the text, so
    no seed and no order of the file can move a held-out prompt into training.
    """
    fraction = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2.0**64
    if fraction < test_share:
        return Split.TEST
    return Split.VALIDATION if fraction < test_share + validation_share else Split.TRAIN


def check_shares(validation_share: float, test_share: float) -> None:
    """Raise ValueError unless the shares leave a part for training."""
    if validation_share + test_share >= 1.0:
        raise ValueError(f"`validation_share` must be < 1 - test_share = {1 - test_share:g}, got {validation_share}")
