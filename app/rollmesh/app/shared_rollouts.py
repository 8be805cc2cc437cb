"""Finished rollouts of a run as text, for other meshes: groups from its ledger, decoded episodes from their payloads.

Pure, except that it reads payloads from the stream that is given. Collaborator: `exchange` (submits them).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pvariance

import msgspec

from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core.facts import GroupDecision, Purpose, RewardOutcome, SampleEnd
from rollmesh.services.coordinator.core.state import SUBMITTED_SCHEME
from rollmesh.services.coordinator.fact_codec import encode
from rollmesh.shared.bus.bus import StreamLog, UnknownRecord
from rollmesh.shared.codec.trajectory import episode_from_bytes, wire
from rollmesh.shared.domain.trajectory import Episode, FinishReason, Role, Source, text_view
from rollmesh.v1 import types_pb2

_TASK_ID = re.compile(r"[^A-Za-z0-9_.:-]")


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """Which groups are shared."""

    reward: str = ""
    """Reward that the conditions compare. Empty: the success reward of the run."""
    variance_min: float = 0.0
    """Smallest variance of this reward in a group. A group with equal rewards is never shared."""
    mean_min: float | None = None
    """Smallest mean of this reward in a group."""
    mean_max: float | None = None
    """Largest mean of this reward in a group."""
    labels: dict[str, str] = {}
    """Labels that a task has."""

    def admits(self, group: FinishedGroup, success_reward: str) -> bool:
        """Return whether a group is shared."""
        if any(group.task.labels.get(name) != value for name, value in self.labels.items()):
            return False
        name = self.reward or success_reward
        values = [rewards[name] for rewards in group.rewards.values() if name in rewards]
        if len(values) < 2 or not (variance := pvariance(values)) or variance < self.variance_min:
            return False
        mean = fmean(values)
        above = self.mean_min is None or mean >= self.mean_min
        return above and (self.mean_max is None or mean <= self.mean_max)


@dataclass(slots=True)
class FinishedGroup:
    """A group on which the run has decided, or one that is still in progress."""

    group: str
    task: f.Task
    answer_key: f.AnswerKey | None
    num_open: int = 0
    """Episodes that have not ended without a sample."""
    payloads: dict[str, int] = field(default_factory=dict)
    """Sequences of the payloads of its scored episodes."""
    rewards: dict[str, dict[str, float]] = field(default_factory=dict)
    """Rewards of whole samples, by sample and name."""


class FinishedGroups:
    """A fold of the ledger of a run. Groups of submitted samples are omitted, so that nothing goes in
    circles."""

    def __init__(self) -> None:
        self.run = ""
        self.success_reward = ""
        self.step = 0
        """Newest published step."""
        self.ended = ""
        self._open: dict[str, FinishedGroup] = {}
        self._keys: dict[str, f.AnswerKey] = {}
        """Answer keys of submitted tasks, by their reference."""

    def enter(self, facts: Sequence[f.Fact]) -> Iterator[FinishedGroup]:
        """Fold the facts of a record, and yield the groups on which it decides."""
        for fact in facts:
            match fact:
                case f.RunCreated() | f.RunChanged():
                    self.run, self.success_reward, self.ended = fact.spec.run, fact.spec.success_reward, ""
                case f.VersionPublished():
                    self.step = fact.version.step
                case f.TasksSubmitted():
                    place = f"{SUBMITTED_SCHEME}:{self.run}/{fact.submission}"
                    self._keys |= {f"{place}/{key.task_id}": key for key in fact.answer_keys}
                case f.GroupReserved() if fact.purpose is not Purpose.EVAL and not fact.submitted_key:
                    key = self._keys.get(fact.task.oracle_ref)
                    if key is not None or not fact.task.oracle_ref.startswith(f"{SUBMITTED_SCHEME}:"):
                        made = FinishedGroup(fact.group, fact.task, key, num_open=fact.num_episodes)
                        self._open[fact.group] = made
                case f.EpisodesAdded() if fact.group in self._open:
                    self._open[fact.group].num_open += fact.num_episodes
                case f.EpisodeScored() if fact.group in self._open:
                    self._open[fact.group].payloads[fact.episode] = fact.payload.sequence
                    if not fact.samples:
                        self._end_episode(fact.group)
                case f.EpisodeEnded() if fact.group in self._open:
                    self._end_episode(fact.group)
                case f.SamplesEnded() if fact.end is SampleEnd.CANCELLED:
                    self._close(fact.group)
                case f.GroupFinalized() if fact.decision is not GroupDecision.EXTEND and fact.group in self._open:
                    group = self._close(fact.group)
                    assert group is not None, "the guard found it"
                    group.rewards = {member.sample_id: _whole(member.rewards) for member in fact.members}
                    yield group
                case f.RunEnded():
                    self.ended = fact.reason
                    self._open.clear()
                case _:
                    pass

    def _end_episode(self, group: str) -> None:
        """Note an episode without samples. A group of only such ones ends without a decision."""
        self._open[group].num_open -= 1
        if not self._open[group].num_open:
            self._close(group)

    def _close(self, group: str) -> FinishedGroup | None:
        """Forget a group, and the answer key of its task, which is drawn once. A dead letter that is replayed later is
        not shared."""
        found = self._open.pop(group, None)
        if found is not None:
            self._keys.pop(found.task.oracle_ref, None)
        return found


def _whole(rewards: Sequence[f.Reward]) -> dict[str, float]:
    return {one.name: one.value for one in rewards if one.outcome is RewardOutcome.OK and one.segment == -1}


def shared_task(group: FinishedGroup) -> tuple[types_pb2.Task, types_pb2.AnswerKey | None]:
    """Return the task of a group for another mesh, with its answer key if a client had submitted it."""
    task = encode(group.task, types_pb2.Task)
    task.task_id = _TASK_ID.sub("-", task.task_id)[:256]
    task.split, task.agent = "", ""
    if group.answer_key is None:
        return task, None
    task.oracle_ref = ""
    key = encode(group.answer_key, types_pb2.AnswerKey)
    key.task_id = task.task_id
    return task, key


async def decoded_group(log: StreamLog, group: FinishedGroup, key: str) -> list[types_pb2.Episode] | None:
    """Return the episodes of a group as text, one sample of each; None if a payload is gone or an episode is not one
    conversation of turns and results. `key` is that of the group in the other mesh."""
    task, _ = shared_task(group)
    found = []
    for name, sequence in group.payloads.items():
        try:
            record = await log.read_direct(sequence)
        except UnknownRecord:
            return None
        one = decoded(episode_from_bytes(record.payload), num_prompt=len(group.task.messages))
        if one is None:
            return None
        one.key.MergeFrom(types_pb2.EpisodeKey(task=task.task_id, group=key, episode=name))
        found.append(one)
    return found or None


def decoded(episode: Episode, *, num_prompt: int) -> types_pb2.Episode | None:
    """Return the first sample of an episode as turns of text, without its prompt of `num_prompt` messages; None if it
    is not one conversation, or has tokens of other sources."""
    if not episode.samples:
        return None
    sample = episode.samples[0]
    path = episode.path_segments(sample)
    actions = [segment for segment in path if segment.role is Role.ACTION]
    if any(segment.source is not Source.POLICY for segment in actions):
        return None
    messages = text_view(path)[num_prompt:]
    made = types_pb2.Episode()
    for index, message in enumerate(messages):
        is_turn = index % 2 == 0
        if (message.role == "assistant") != is_turn or not message.content:
            return None
        made.segments.add(
            parent=index - 1,
            role=wire(Role.ACTION if is_turn else Role.OBSERVATION),
            source=wire(Source.PEER if is_turn else Source.TOOL),
            finish=wire(FinishReason.STOP if is_turn else FinishReason.UNFINISHED),
            messages=[types_pb2.Message(role=message.role, content=message.content)],
        )
    if len(messages) % 2 == 0:
        return None
    if actions[-1].finish is FinishReason.LENGTH:
        made.segments[-1].finish = types_pb2.FINISH_REASON_LENGTH
    return made


def labels_of(given: Sequence[str]) -> Mapping[str, str]:
    """Return NAME=VALUE texts as labels. Raises ValueError with the text that is not one."""
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise ValueError(f"must be NAME=VALUE, got {text!r}")
        found[name] = value
    return found
