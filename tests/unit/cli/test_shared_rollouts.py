"""Which groups of a ledger are shared with other meshes, and how an episode becomes text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollmesh.app.shared_rollouts import FinishedGroup, FinishedGroups, Selection, decoded, labels_of, shared_task
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core.facts import (
    AnswerKey,
    GroupDecision,
    Purpose,
    Reward,
    SampleEnd,
    SampleRewards,
    Task,
)
from rollmesh.shared.domain.trajectory import (
    Episode,
    EpisodeKey,
    FinishReason,
    Message,
    Role,
    Sample,
    Segment,
    Source,
)
from rollmesh.v1 import types_pb2
from tests.sim.world import endless_spec

TOKENS = np.zeros(2, dtype=np.int32)


def segment(role: Role, text: str, source: Source = Source.POLICY, **fields: Any) -> Segment:
    speaker = {Role.ACTION: "assistant", Role.OBSERVATION: "tool", Role.CONTEXT: "user"}[role]
    messages = (Message(role=speaker, content=text),) if text else ()
    return Segment(parent=-1, role=role, source=source, token_ids=TOKENS, messages=messages, **fields)


def episode(*segments: Segment) -> Episode:
    chain = tuple(
        Segment(**{name: getattr(one, name) for name in one.__struct_fields__} | {"parent": index - 1})
        for index, one in enumerate((segment(Role.CONTEXT, "1+1?", Source.PROMPT), *segments))
    )
    samples = (Sample(sample_id="s", leaf=len(chain) - 1),)
    return Episode(key=EpisodeKey(run="r", task="t", group="g", episode="e"), segments=chain, samples=samples)


def test_turns_and_results_alternate_and_pieces_of_a_turn_are_one() -> None:
    made = decoded(
        episode(
            segment(Role.ACTION, ""),
            segment(Role.ACTION, "call", finish=FinishReason.STOP),
            segment(Role.OBSERVATION, "2", Source.TOOL),
            segment(Role.ACTION, "it is 2", finish=FinishReason.LENGTH),
        ),
        num_prompt=1,
    )
    assert made is not None
    assert [(one.parent, one.messages[0].content) for one in made.segments] == [(-1, "call"), (0, "2"), (1, "it is 2")]
    assert [one.source for one in made.segments] == [
        types_pb2.SEGMENT_SOURCE_PEER, types_pb2.SEGMENT_SOURCE_TOOL, types_pb2.SEGMENT_SOURCE_PEER,
    ]  # fmt: skip
    assert made.segments[2].finish == types_pb2.FINISH_REASON_LENGTH
    assert not any(one.token_ids for one in made.segments)


@pytest.mark.parametrize(
    "segments",
    [
        (segment(Role.ACTION, "given", Source.DATASET),),
        (segment(Role.ACTION, "call"), segment(Role.OBSERVATION, "2", Source.TOOL)),
        (segment(Role.ACTION, "a"), segment(Role.ACTION, "b")),
        (segment(Role.CONTEXT, "a hint", Source.HINT), segment(Role.ACTION, "b")),
    ],
)
def test_other_shapes_are_not_shared(segments: tuple[Segment, ...]) -> None:
    assert decoded(episode(*segments), num_prompt=1) is None


def group(*values: float, **labels: str) -> FinishedGroup:
    rewards = {f"s{number}": {"correct": value} for number, value in enumerate(values)}
    return FinishedGroup("g", Task(task_id="t", labels=labels), None, rewards=rewards)


@pytest.mark.parametrize(
    ("selection", "of", "admits"),
    [
        (Selection(), group(0, 1), True),
        (Selection(), group(1, 1), False),
        (Selection(), group(1), False),
        (Selection(reward="other"), group(0, 1), False),
        (Selection(variance_min=0.2), group(0, 1), True),
        (Selection(variance_min=0.2), group(0, 0, 0, 0, 0, 1), False),
        (Selection(mean_min=0.6), group(0, 1), False),
        (Selection(mean_max=0.4), group(0, 1), False),
        (Selection(mean_min=0.5, mean_max=0.5), group(0, 1), True),
        (Selection(labels={"level": "1"}), group(0, 1, level="1"), True),
        (Selection(labels={"level": "1"}), group(0, 1, level="2"), False),
    ],
)
def test_the_selection_decides_by_rewards_and_labels(selection: Selection, of: FinishedGroup, admits: bool) -> None:
    assert selection.admits(of, "correct") is admits


def reserved(name: str, task: Task, **fields: Any) -> f.GroupReserved:
    return f.GroupReserved(group=name, purpose=Purpose.TRAIN, task=task, num_episodes=1, **fields)


def scored(name: str, sequence: int = 1) -> f.EpisodeScored:
    sample = f.SampleMeta(sample_id=f"{name}.0.0", policy="main")
    payload = f.PayloadRef(sequence=sequence)
    return f.EpisodeScored(group=name, episode=f"{name}.0", payload=payload, samples=(sample,))


def finalized(name: str) -> f.GroupFinalized:
    members = (SampleRewards(sample_id=f"{name}.0", rewards=(Reward(name="correct", value=1.0, segment=-1),)),)
    return f.GroupFinalized(group=name, decision=GroupDecision.KEEP, members=members)


def test_own_groups_are_shared_once_decided_with_the_keys_of_submitted_tasks() -> None:
    ref = "submitted:r/3-ab/a/b"
    own, private = Task(task_id="a/b c", oracle_ref="calc:1", agent="mine"), Task(task_id="a/b", oracle_ref=ref)
    key = AnswerKey(task_id="a/b", answers=("2",))
    story = FinishedGroups()
    facts: list[f.Fact] = [
        f.RunCreated(spec=endless_spec(run="r")),
        f.TasksSubmitted(submission="3-ab", tasks=(private,), answer_keys=(key,)),
        reserved("g0", own),
        reserved("g1", private),
        reserved("g2", own, submitted_key="south/g1"),
        scored("g0", sequence=7),
        finalized("g2"),
        finalized("g0"),
        finalized("g1"),
    ]
    first, second = story.enter(facts)
    assert (first.group, first.payloads, first.rewards) == ("g0", {"g0.0": 7}, {"g0.0": {"correct": 1.0}})
    task, no_key = shared_task(first)
    assert (task.task_id, task.oracle_ref, task.agent, no_key) == ("a-b-c", "calc:1", "", None)
    task, given = shared_task(second)
    assert given is not None
    assert (task.task_id, task.oracle_ref, given.task_id, list(given.answers)) == ("a-b", "", "a-b", ["2"])
    assert list(story.enter([f.RunEnded(reason="STOPPED")])) == []
    assert story.ended == "STOPPED"


@pytest.mark.parametrize(
    "ends",
    [
        [finalized("g0")],
        [f.EpisodeEnded(group="g0", episode="g0.0", end=SampleEnd.FAILED, reason="x")],
        [scored("g0"), f.SamplesEnded(group="g0", sample_ids=("g0.0.0",), end=SampleEnd.CANCELLED, reason="x")],
    ],
)
def test_an_ended_group_and_its_key_are_forgotten(ends: list[f.Fact]) -> None:
    task, key = Task(task_id="t", oracle_ref="submitted:r/3-ab/t"), AnswerKey(task_id="t")
    story = FinishedGroups()
    begun: list[f.Fact] = [
        f.RunCreated(spec=endless_spec(run="r")),
        f.TasksSubmitted(submission="3-ab", tasks=(task,), answer_keys=(key,)),
        reserved("g0", task),
    ]
    list(story.enter(begun))
    assert (len(story._keys), len(story._open)) == (1, 1)
    list(story.enter(ends))
    assert (story._keys, story._open) == ({}, {})
    assert list(story.enter([reserved("g1", task), finalized("g1")])) == [], "its reference means nothing elsewhere"


def test_labels_are_name_and_value() -> None:
    assert labels_of(["level=1", "kind=a=b"]) == {"level": "1", "kind": "a=b"}
    with pytest.raises(ValueError, match="NAME=VALUE, got '=x'"):
        labels_of(["=x"])
