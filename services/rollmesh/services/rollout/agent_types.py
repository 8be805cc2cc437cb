"""The values that an agent exchanges with its environment: task, turn, tool result, limit."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from rollmesh.shared.domain.trajectory import Columns, FinishReason, FloatArray, IntArray, Message, ToolOutcome

MODEL = "policy"
"""The name of the trained model in requests of clients."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a task that an agent may read. The answer key is not one of them."""

    task_id: str
    messages: tuple[Message, ...]
    tools: tuple[str, ...] = ()
    labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    agent: str = ""
    """Name of its agent in `rollout.agents`. Empty: the default agent."""
    scorers: tuple[str, ...] = ()
    """Names of the rewards that score it. Empty: all."""
    extras: Mapping[str, object] = msgspec.field(default_factory=dict)
    """Public extras by name: JSON values such as files. Private ones are `Environment.private_extra`."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One generation of the model."""

    text: str
    """Includes the stop string, and special tokens as text."""
    finish: FinishReason
    """STOP, or LENGTH if the token limit of the turn cut it."""
    token_ids: IntArray
    """[n] int32."""
    logprobs: FloatArray
    """Natural log-prob of each token under the distribution that it was sampled from, [n] float32."""
    arrays: Columns = msgspec.field(default_factory=dict)
    """Arrays of `rollout.outputs` by name, [n] or [n, k], such as `entropy`. Row i is the distribution that token i was
    sampled from."""


class ToolResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a tool call."""

    text: str
    """Text for the model: output and value, or one line with the error."""
    ok: bool
    """False if the call was wrong or reached a limit inside the sandbox. Both count as model failures."""
    name: str = ""
    """Name of the tool."""
    error: str = ""
    """Kind of the error, such as TIME_LIMIT; at most 64 characters of A-Z a-z 0-9 _ . : / -. Empty if `ok`."""
    wall_s: float = 0.0
    """Seconds that the call took."""

    @property
    def outcome(self) -> ToolOutcome:
        """How the call ended, as it is recorded with its result."""
        error = "" if self.ok else self.error or "ERROR"
        return ToolOutcome(name=self.name, ok=self.ok, error=error, wall_s=self.wall_s)


class LimitReached(Exception):
    """The episode has reached the limit `limit`. It ends, and counts as a model failure."""

    def __init__(self, limit: str) -> None:
        super().__init__(f"the episode reached its limit of {limit}")
        self.limit = limit
