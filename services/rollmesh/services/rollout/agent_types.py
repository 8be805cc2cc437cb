"""The values that an agent exchanges with its environment: task, turn, tool result, limit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rollmesh.shared.trajectory import FinishReason, IntArray, Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What an agent may know of its task; the answer key is not among it."""

    task_id: str
    messages: tuple[Message, ...]
    tools: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the model said."""

    text: str
    """With its stop string, and tags as text."""
    finish: FinishReason
    """STOP, or LENGTH if the turn's own token limit cut it."""
    token_ids: IntArray
    """[n] int32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What a tool answered."""

    text: str
    """For the model: output and value, or one line that says what went wrong."""
    ok: bool
    """False if the call was wrong or hit a limit inside the sandbox: the model's doing."""


class LimitReached(Exception):
    """The episode has used up one of its limits; `limit` names it. The episode ends and counts as the model's doing."""

    def __init__(self, limit: str) -> None:
        super().__init__(f"the episode reached its limit of {limit}")
        self.limit = limit
