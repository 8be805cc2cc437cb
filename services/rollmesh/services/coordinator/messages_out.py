"""What the core asks of others and tells them, as messages, and their answers as its inputs."""

from __future__ import annotations

from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core.decision_context import DeadLetter, DrawTasks, FinalizeGroup
from rollmesh.services.coordinator.core.facts import GroupDecision, SampleEnd, SampleRewards, Task
from rollmesh.services.coordinator.core.records import RunSpec
from rollmesh.services.coordinator.core.reports import is_finite
from rollmesh.services.coordinator.core.state import EpisodeStatus, GroupPhase, SampleState, State
from rollmesh.services.coordinator.fact_codec import decode, encode_into, known_member
from rollmesh.shared.errors import ScorerFailed
from rollmesh.v1 import data_pb2, events_pb2, reward_pb2, types_pb2


def next_tasks_request(spec: RunSpec, effect: DrawTasks, position: int) -> data_pb2.NextTasksRequest:
    """Tasks for the draws of `effect`; the selector must have seen the ledger up to `position`."""
    return data_pb2.NextTasksRequest(
        run=spec.run,
        policy=spec.policy,
        purpose=types_pb2.Purpose.ValueType(effect.purpose),
        split=effect.split,
        first_draw=effect.first_draw,
        num=effect.num,
        ledger_position=position,
    )


def tasks_drawn(effect: DrawTasks, answer: data_pb2.NextTasksResponse) -> i.TasksDrawn:
    return i.TasksDrawn(
        purpose=effect.purpose,
        tasks=tuple((drawn.draw, decode(Task, drawn.task)) for drawn in answer.tasks),
        step=effect.step,
        incarnation=effect.incarnation,
    )


def finalize_request(state: State, effect: FinalizeGroup) -> reward_pb2.FinalizeGroupRequest | None:
    """The question about a group; None if it no longer waits for a decision."""
    group = state.groups.get(effect.group)
    if group is None or group.phase is not GroupPhase.FINALIZING:
        return None
    request = reward_pb2.FinalizeGroupRequest(
        run=state.the_spec.run,
        num_unscored=sum(e.status is EpisodeStatus.ENDED for e in group.episodes.values()),
        deadline_passed=effect.deadline_passed,
    )
    encode_into(group.task, request.task)
    request.group.group = group.group
    request.group.task = group.task.task_id
    for sample in group.samples.values():
        member = request.group.members.add(sample_id=sample.sample_id, end=_end(sample), episode=sample.episode)
        for reward in sample.rewards:
            encode_into(reward, member.rewards.add())
    return request


def _end(sample: SampleState) -> str:
    return "ready" if sample.end is SampleEnd.LIVE else f"{sample.end.name.lower()}/{sample.reason}"


def group_decided(group: str, answer: reward_pb2.FinalizeGroupResponse) -> i.GroupDecided:
    """The decision as an input. Raises ScorerFailed for an answer that decides nothing."""
    decision = known_member(GroupDecision, answer.decision)
    if decision is None:
        raise ScorerFailed(
            f"the finaliser answered decision {answer.decision} for group {group}; see the reward service's log"
        )
    adjusted = tuple(decode(SampleRewards, adjusted) for adjusted in answer.adjusted)
    if broken := [r for a in adjusted for r in a.rewards if not is_finite(r)]:
        raise ScorerFailed(
            f"the finalizer changed reward {broken[0].name!r} of group {group} to {broken[0].value}, expected a finite number"
        )
    return i.GroupDecided(
        group=group,
        decision=decision,
        reason=answer.reason,
        num_extend=answer.num_extend,
        adjusted=adjusted,
    )


def dead_letter(letter: DeadLetter, time_unix_s: float) -> events_pb2.DeadLetter:
    """The letter of a task whose episode used up its tries."""
    message = events_pb2.DeadLetter(
        kind=events_pb2.DEAD_KIND_TASK,
        subject=letter.episode,
        cause=letter.cause,
        who="coordinator",
        time_unix_s=time_unix_s,
        draw=letter.draw,
        group=letter.group,
        tries=letter.tries,
        purpose=types_pb2.Purpose.ValueType(letter.purpose),
        traceback=letter.traceback,
    )
    encode_into(letter.task, message.task)
    return message
