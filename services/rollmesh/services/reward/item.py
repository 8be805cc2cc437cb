"""The input of a scorer: one sample of a finished episode, its task, and the answer key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from rollmesh.shared.domain.environment_reward import EnvironmentReward
from rollmesh.shared.domain.trajectory import (
    WHOLE_SAMPLE,
    Columns,
    EndpointUse,
    EpisodeKey,
    FinishReason,
    IntArray,
    Message,
    Outcome,
    Reward,
    Role,
    Segment,
    Source,
    ToolOutcome,
    text_view,
)
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import field_error

TEXT_CHARS_MAX = 16_384
"""Maximum length of a text that a pattern searches, in characters; only the end of a longer one is searched. A lazy
pattern without a match takes time quadratic in the length, and the model chooses the text."""
WHOLE_CHARS_MAX = 1 << 20
"""Maximum length of the text of the model for scorers that need all of it, in characters."""

Where = Literal["final", "episode"]
"""`final`: the last assistant message. `episode`: all assistant messages of the path of the sample, one per
paragraph."""


class TaskView(msgspec.Struct, frozen=True, kw_only=True):
    """The public part of the task."""

    task_id: str
    messages: tuple[Message, ...] = ()
    tools: tuple[str, ...] = ()
    split: str = ""
    labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    scorers: tuple[str, ...] = ()
    """Names of the rewards that score it. Empty: all."""
    extras: Mapping[str, object] = msgspec.field(default_factory=dict)
    """Public extras by name: JSON values such as files."""


class AnswerKey(msgspec.Struct, frozen=True, kw_only=True):
    """The private part of the task. It MUST NOT leave the reward service, so a scorer MUST NOT quote it in its
    evidence."""

    answers: tuple[str, ...] = ()
    """Accepted answers. Empty for a task that only hidden tests judge."""
    record: Mapping[str, object] = msgspec.field(default_factory=dict)
    """All fields of the line of a JSONL file, for scorers that need more than an answer."""
    tests: str | Mapping[str, object] = ""
    """Hidden tests: a manifest, or its reference in the oracle store of the sandbox nodes. Empty if there are no
    tests."""


class JudgedSegment(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive tokens on the path of a sample, with one author and, if they were sampled, one version of the
    weights."""

    index: int
    """Index in the episode, for `Reward.segment`."""
    role: Role
    source: Source
    token_ids: IntArray
    """[n] int32."""
    text: str = ""
    """Text of the messages that end here. The text of a turn that several versions sampled is at its last segment."""
    finish: FinishReason = FinishReason.UNFINISHED
    """The reason for which the turn ended; UNFINISHED if the next segment continues it, or if nothing was sampled."""
    version: PolicyVersion | None = None
    """The weights that sampled it; None if it was not sampled."""
    tool: ToolOutcome | None = None
    """How the tool call ended whose result the segment shows; None for other segments, and for a result that the agent
    gave as text."""
    arrays: Columns = msgspec.field(default_factory=dict)
    """The arrays by name that some scorer of the run lists in `columns`, [n] or [n, k]. Empty if it was not sampled."""

    @property
    def sampled(self) -> bool:
        """Whether the policy sampled it."""
        return self.source is Source.POLICY


class JudgedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of the model, as in `TurnSummary`: the segments of one action, and what the model observed after it."""

    segment: int
    """Index of its last segment in the episode, for `Reward.segment`."""
    text: str
    """Text of the model."""
    observations: tuple[JudgedSegment, ...] = ()
    """The segments between it and the next turn, such as the result of a tool. Empty after the last turn."""


class ScoreItem(msgspec.Struct, frozen=True, kw_only=True):
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
    path: tuple[JudgedSegment, ...] = ()
    """The segments of the sample, from the root to its leaf. Empty for a written answer without tokens."""
    endpoints: tuple[EndpointUse, ...] = ()
    """What the agent asked of endpoints in the episode: calls, tokens, price and latency by endpoint."""
    scorers: tuple[str, ...] = ()
    """Names of the rewards that are asked for. Empty: those of the task."""
    request: int = 0
    """Number of its request. An agent may ask for rewards of several branches of an episode at the same time."""
    rewards: Mapping[str, tuple[Reward, ...]] = msgspec.field(default_factory=dict)
    """The rewards that the scorer reads, by the names in its `reads`: of the whole sample and of segments."""
    environment: tuple[EnvironmentReward, ...] = ()
    """The rewards that the environment gave this sample and its turns, in its order."""

    @property
    def turns(self) -> tuple[JudgedTurn, ...]:
        """The turns of the model on the path, in their order."""
        turns: list[JudgedTurn] = []
        text, observed = "", list[JudgedSegment]()
        for segment in self.path:
            if segment.role is not Role.ACTION:
                observed.append(segment)
                continue
            if turns and observed:
                turns[-1] = replace(turns[-1], observations=tuple(observed))
            text, observed = text + segment.text, []
            if segment.finish is not FinishReason.UNFINISHED or segment.index == self.leaf:
                turns.append(JudgedTurn(segment=segment.index, text=text))
                text = ""
        if turns and observed:
            turns[-1] = replace(turns[-1], observations=tuple(observed))
        return tuple(turns)

    def reward(self, name: str) -> float | None:
        """Return the value of a reward of the whole sample; None if it is not applicable to this sample. Raise
        LookupError for a reward that is not in the scorer's `reads`."""
        if name not in self.rewards:
            known = ", ".join(self.rewards) or "none"
            raise LookupError(f"the scorer does not read the reward {name!r} (it reads: {known}); list it in `reads`")
        whole = (reward for reward in self.rewards[name] if reward.segment == WHOLE_SAMPLE)
        return next((reward.value for reward in whole if reward.outcome is Outcome.OK), None)

    @property
    def answer_ids(self) -> IntArray:
        """The tokens of the last turn, [n] int32, with a given beginning."""
        return _joined([segment.token_ids for segment in self._last_turn()])

    @property
    def prompt_ids(self) -> IntArray:
        """The tokens before the last turn, [n] int32."""
        return _joined([segment.token_ids for segment in self.path[: len(self.path) - len(self._last_turn())]])

    def column(self, name: str, where: Where = "episode") -> NDArray[Any]:
        """Return an array of the class's `columns`, [n] or [n, k], over the tokens that the policy sampled in the last
        turn or in all."""
        path = self.path if where == "episode" else self._last_turn()
        found = [segment.arrays[name] for segment in path if segment.sampled and segment.token_ids.size]
        return np.concatenate(found) if found else np.zeros(0, dtype=np.float32)

    def _last_turn(self) -> list[JudgedSegment]:
        return list(takewhile(lambda segment: segment.role is Role.ACTION, reversed(self.path)))[::-1]

    def response(self, where: Where = "final") -> str:
        """Return the text of the model, at most its last TEXT_CHARS_MAX characters. Empty if the model wrote
        nothing."""
        return self._said(where)[-TEXT_CHARS_MAX:]

    def whole_response(self, where: Where = "final") -> str:
        """Return the whole text of the model, for scorers that do not search it by a pattern of the configuration.
        Raise ValueError if it has more than WHOLE_CHARS_MAX characters."""
        text = self._said(where)
        if len(text) > WHOLE_CHARS_MAX:
            raise ValueError(
                f"the text of the model must have at most {WHOLE_CHARS_MAX} characters, got {len(text)}; lower "
                "`rollout.limits.context_tokens_max`"
            )
        return text

    def _said(self, where: Where) -> str:
        said = [message.content for message in self.messages if message.role == "assistant"]
        return "\n\n".join(said if where == "episode" else said[-1:])


def check_task_scorers(names: Sequence[str], known: Sequence[str], field: str = "scorers") -> None:
    """Raise InvalidInput unless the scorers that a task names are different ones of the `known` rewards."""
    if len(set(names)) < len(names) or not set(names).issubset(known):
        raise field_error(
            field,
            f"have different names of rewards among [{', '.join(known)}]",
            ", ".join(names),
            "correct the task source, or add an entry to reward.scorers",
        )


def judged_path(segments: Sequence[Segment], leaf: int) -> tuple[tuple[JudgedSegment, ...], tuple[Message, ...]]:
    """Return the path to `leaf` in the segments of an episode, and its text view."""
    indices = []
    while leaf >= 0:
        indices.append(leaf)
        leaf = segments[leaf].parent
    indices.reverse()
    path = tuple(
        JudgedSegment(
            index=index,
            role=segment.role,
            source=segment.source,
            token_ids=segment.token_ids,
            text="\n\n".join(message.content for message in segment.messages),
            finish=segment.finish,
            version=segment.version,
            tool=segment.tool,
            arrays=segment.arrays if segment.logprobs is None else {**segment.arrays, "logprobs": segment.logprobs},
        )
        for index, segment in ((index, segments[index]) for index in indices)
    )
    return path, text_view(segments[index] for index in indices)


def num_action_tokens(path: Sequence[JudgedSegment]) -> int:
    """Return the number of tokens that the policy sampled. A given beginning of an answer does not count."""
    return sum(segment.token_ids.size for segment in path if segment.role is Role.ACTION and segment.sampled)


def _joined(rows: Sequence[IntArray]) -> IntArray:
    return np.concatenate([np.zeros(0, dtype=np.int32), *rows])
