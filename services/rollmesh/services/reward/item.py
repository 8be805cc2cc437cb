"""The input of a scorer: one sample of a finished episode, its task, and the answer key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rollmesh.shared.trajectory import EpisodeKey, FinishReason, Message

TEXT_CHARS_MAX = 16_384
"""Maximum length of a text that a pattern searches, in characters; only the end of a longer one is searched. A lazy pattern without a
match takes time quadratic in the length, and the model chooses the text."""

Where = Literal["final", "episode"]
"""`final`: the last assistant message. `episode`: all assistant messages of the path of the sample, one per paragraph."""


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
    """The private part of the task. It MUST NOT leave the reward service, so a scorer MUST NOT quote it in its evidence."""

    answers: tuple[str, ...] = ()
    """Accepted answers. Empty for a task that only hidden tests judge."""
    record: Mapping[str, object] = field(default_factory=dict)
    """All fields of the line of a JSONL file, for scorers that need more than an answer."""
    tests: str | Mapping[str, object] = ""
    """Hidden tests: a manifest, or its reference in the oracle store of the sandbox nodes. Empty if there are no tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreItem:
    """One sample to score."""

    key: EpisodeKey
    task: TaskView
    answer_key: AnswerKey | None
    """None if the task has no oracle reference."""
    messages: tuple[Message, ...]
    """Text view of the path of the sample, from the root to its leaf."""
    sample_id: str
    leaf: int = 0
    """Index of the sample's last segment."""
    role: str = ""
    num_action_tokens: int = 0
    """Number of tokens of this sample that the policy sampled."""
    finish: FinishReason = FinishReason.STOP
    """The reason for which the last action of the sample ended."""

    def response(self, where: Where = "final") -> str:
        """Return the text of the model, at most its last TEXT_CHARS_MAX characters. Empty if the model wrote nothing."""
        said = [message.content for message in self.messages if message.role == "assistant"]
        text = "\n\n".join(said if where == "episode" else said[-1:])
        return text[-TEXT_CHARS_MAX:]
