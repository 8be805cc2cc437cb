"""What a scorer sees: one sample of a finished episode, its task, and the answer key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rollmesh.shared.trajectory import EpisodeKey, FinishReason, Message

TEXT_CHARS_MAX = 16_384
"""Longest text handed to a pattern; of longer ones the end is taken. A lazy pattern over a text without a match costs the
square of its length, and the text is the model's to choose."""

Where = Literal["final", "episode"]
"""`final`: the last assistant message. `episode`: all assistant messages of the sample's path, one per
paragraph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskView:
    """The public part of the task."""

    task_id: str
    messages: tuple[Message, ...] = ()
    tools: tuple[str, ...] = ()
    split: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerKey:
    """The private part of the task. Never leaves the reward service: no scorer may quote it in its evidence."""

    answers: tuple[str, ...] = ()
    """Accepted answers; none for a task that only hidden tests judge."""
    record: Mapping[str, object] = field(default_factory=dict)
    """The whole line of a JSONL file, for scorers that need more than an answer."""
    tests: str | Mapping[str, object] = ""
    """Hidden tests: their reference in the sandbox nodes' oracle store, or a manifest that is sent along; empty if there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreItem:
    """One sample to score."""

    key: EpisodeKey
    task: TaskView
    answer_key: AnswerKey | None
    """None if the task has no oracle reference."""
    messages: tuple[Message, ...]
    """Text view of the sample's own path, from the root to its leaf."""
    sample_id: str
    leaf: int = 0
    """Index of the sample's last segment."""
    role: str = ""
    num_action_tokens: int = 0
    """Tokens the policy sampled in this sample."""
    finish: FinishReason = FinishReason.STOP
    """Why the sample's last action ended."""

    def response(self, where: Where = "final") -> str:
        """What the model said, at most the last TEXT_CHARS_MAX characters; empty if it said nothing."""
        said = [message.content for message in self.messages if message.role == "assistant"]
        text = "\n\n".join(said if where == "episode" else said[-1:])
        return text[-TEXT_CHARS_MAX:]
