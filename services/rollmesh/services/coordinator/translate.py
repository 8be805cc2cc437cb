"""Messages of the contract to inputs of the core, and its results and effects to messages. No other module knows both
shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from google.protobuf.message import Message
from msgspec import structs

from rollmesh.services.coordinator import validation
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core import messages as m
from rollmesh.services.coordinator.core.batches import group_members
from rollmesh.services.coordinator.core.decision_context import DeadLetter, DrawTasks, FinalizeGroup
from rollmesh.services.coordinator.core.facts import (
    AnswerKey,
    DroppedSample,
    GroupDecision,
    PayloadRef,
    Purpose,
    SampleMeta,
    SampleRewards,
    Task,
    TrainedGroup,
)
from rollmesh.services.coordinator.core.group_plans import why_too_large
from rollmesh.services.coordinator.core.records import RunSpec, TrainerRequest
from rollmesh.services.coordinator.core.rollouts import num_extend_max
from rollmesh.services.coordinator.core.state import EpisodeStatus, GroupPhase, State
from rollmesh.services.coordinator.fact_codec import decode, decode_request, encode, encode_into, known_member
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.codec.refusal import refuse_unknown
from rollmesh.shared.config.settings import SettingError
from rollmesh.shared.domain.plans import Plan
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import (
    InvalidInput,
    InvalidSpec,
    NoNode,
    ScorerFailed,
    described_field_error,
    field_error,
)
from rollmesh.v1 import coordinator_pb2, data_pb2, events_pb2, reward_pb2, run_pb2, types_pb2

M = TypeVar("M", bound=Message)
Q = TypeVar("Q", bound=TrainerRequest[Any])
DEFAULT_NAME = "main"
WAIT_S_MAX = 60.0
PIECE_BYTES = 1 << 20
"""Size of the parts into which long lists are split, bytes."""
NUM_MAX = 4096
TRACEBACK_CHARS_MAX = 4000
"""Maximum length of a traceback. The end of a longer one is kept, because it has the error and its line."""
EVIDENCE_CHARS_MAX = 4096
"""Maximum length of a reward's evidence in the ledger. The payload has all of it."""


def run_spec(message: events_pb2.RunSpec) -> RunSpec:
    """Return the spec with the defaults of the contract. Raises InvalidSpec with the field."""
    filled = events_pb2.RunSpec()
    filled.CopyFrom(message)
    filled.policy = message.policy or DEFAULT_NAME
    filled.learner = message.learner or DEFAULT_NAME
    filled.eval_split = message.eval_split or "test"
    filled.export_split = message.export_split or "test"
    filled.beyond = message.beyond or events_pb2.BOUND_POLICY_DROP
    try:
        refuse_unknown(message, "fields")
        run_streams(message.run)
        return decode(RunSpec, filled)
    except SettingError as error:
        raise described_field_error(f"spec.{error.field}", error.what, of=InvalidSpec) from error
    except InvalidInput as error:
        (found,) = error.violations
        raise described_field_error(f"spec.{found.field}", found.description, of=InvalidSpec) from error


def wait_s(asked: float, remaining_s: float) -> float:
    """Return the wait of a long poll: within the contract, and a little shorter than the caller's deadline, so that the
    reply arrives."""
    if not 0.0 <= asked <= WAIT_S_MAX:
        raise field_error("wait_s", f"be in [0, {WAIT_S_MAX:g}]", asked)
    return max(0.0, min(asked, remaining_s - min(1.0, remaining_s / 5)))


# Episodes -------------------------------------------------------------------------------------------------------------


def episode_lease(run: str, lease: i.EpisodeLease) -> coordinator_pb2.EpisodeLease:
    message = coordinator_pb2.EpisodeLease(
        lease_id=to_wire(run, lease.lease_id),
        purpose=types_pb2.Purpose.ValueType(lease.purpose),
        policy=lease.policy,
        step_min=lease.step_min,
        incarnation_min=lease.incarnation_min,
        lease_s=lease.lease_s,
        seed=lease.seed,
        index=lease.index,
        submitted=lease.submitted,
    )
    if lease.given_source:
        message.given.MergeFromString(lease.given)
        message.given_source = types_pb2.SegmentSource.Value(f"SEGMENT_SOURCE_{lease.given_source.upper()}")
    if lease.variant is not None:
        encode_into(lease.variant, message.variant)
    message.key.run = run
    message.key.task = lease.task.task_id
    message.key.group = lease.group
    message.key.episode = lease.episode
    message.key.attempt = lease.attempt
    encode_into(lease.task, message.task)
    return message


def episode_report(message: coordinator_pb2.EpisodeReport) -> i.EpisodeReport:
    """Return the report. An invalid report becomes a failed attempt with the reason; see `EpisodeReport.invalid`."""
    invalid = validation.why_invalid_report(message)
    completed = not invalid and message.outcome == coordinator_pb2.EPISODE_OUTCOME_COMPLETED
    run, lease_id = from_wire(message.lease_id)
    return i.EpisodeReport(
        lease_id=lease_id if run == message.key.run else "",
        group=message.key.group,
        episode=message.key.episode,
        attempt=message.key.attempt,
        outcome=m.EpisodeOutcome.INFRA_FAILURE if invalid else m.EpisodeOutcome(message.outcome),
        payload=decode(PayloadRef, message.payload) if completed else i.NO_PAYLOAD,
        samples=tuple(_sample_meta(sample) for sample in message.samples) if completed else (),
        num_tool_calls=message.num_tool_calls,
        num_tool_calls_failed=message.num_tool_calls_failed,
        cause=(message.failure.message or message.failure.reason)[: validation.TEXT_CHARS_MAX],
        traceback=message.failure.metadata["traceback"][-TRACEBACK_CHARS_MAX:]
        if "traceback" in message.failure.metadata
        else "",
        reason=message.failure.reason if completed and not message.samples else "",
        invalid=invalid,
        counts=message.failure.reason != NoNode.reason,
    )


def _sample_meta(message: types_pb2.SampleMeta) -> SampleMeta:
    for reward in message.rewards:
        reward.evidence = reward.evidence[:EVIDENCE_CHARS_MAX]
    message.policy = message.policy or DEFAULT_NAME
    return decode(SampleMeta, message)


# Batches --------------------------------------------------------------------------------------------------------------


def lease_batch(ticket: int, request: run_pb2.LeaseBatchRequest, wait: float, bytes_max: int) -> i.LeaseBatch:
    """`bytes_max` is the maximum size of the reply, bytes."""
    unit, amount = _geometry(request)
    return i.LeaseBatch(
        ticket=ticket,
        policy=request.policy or DEFAULT_NAME,
        learner=request.learner or DEFAULT_NAME,
        trainer_epoch=request.trainer_epoch,
        update=request.update,
        unit=unit,
        amount=amount,
        wait_s=wait,
        size_of=lambda grant: encode(grant, run_pb2.LeaseBatchResponse).ByteSize(),
        bytes_max=bytes_max,
    )


def watch_ready(request: coordinator_pb2.WatchReadyRequest) -> i.WatchReady:
    unit, amount = _geometry(request)
    return i.WatchReady(
        ticket=0,
        policy=request.policy or DEFAULT_NAME,
        learner=request.learner or DEFAULT_NAME,
        trainer_epoch=request.trainer_epoch,
        unit=unit,
        amount=amount,
    )


def _geometry(
    request: run_pb2.LeaseBatchRequest | coordinator_pb2.WatchReadyRequest,
) -> tuple[i.GeometryUnit, int]:
    unit = known_member(i.GeometryUnit, request.geometry.unit or run_pb2.BatchGeometry.UNIT_GROUPS)
    if unit is None:
        raise field_error("geometry.unit", f"be in [1, {len(i.GeometryUnit)}]", request.geometry.unit)
    if request.HasField("geometry") and request.geometry.amount < 1:
        raise field_error("geometry.amount", "be >= 1", request.geometry.amount)
    return unit, request.geometry.amount


def leased_samples(samples: Sequence[m.LeasedSample]) -> list[run_pb2.LeasedSample]:
    return [encode(sample, run_pb2.LeasedSample) for sample in samples]


def pieces(messages: Sequence[M], bytes_max: int = PIECE_BYTES) -> list[list[M]]:
    """Split messages into parts of about `bytes_max`. Return at least one part."""
    found: list[list[M]] = [[]]
    num_bytes = 0
    for message in messages:
        num_bytes += message.ByteSize()
        if found[-1] and num_bytes > bytes_max:
            found.append([])
            num_bytes = message.ByteSize()
        found[-1].append(message)
    return found


def submit_tasks(
    ticket: int, request: run_pb2.SubmitTasksRequest, submission: str, limits: i.SubmissionLimits
) -> i.SubmitTasks:
    return i.SubmitTasks(
        ticket=ticket,
        submission=submission,
        tasks=tuple(structs.replace(decode(Task, task), split="train") for task in request.tasks),
        answer_keys=tuple(decode(AnswerKey, key) for key in request.answer_keys),
        finish=request.finish,
        limits=limits,
    )


def application_task(request: run_pb2.OpenEpisodeRequest) -> types_pb2.Task:
    """Return the task of an episode that an application opens. Without a prompt it gets an empty one, because the
    requests of the application have their own messages."""
    task = types_pb2.Task()
    task.CopyFrom(request.task)
    task.task_id = request.key
    if not task.messages:
        task.messages.add(role="user")
    return task


def trainer_request(type_: type[Q], ticket: int, request: M) -> Q:
    """Return a trainer's request that the core takes as it is."""
    message: Any = request
    message.policy = message.policy or DEFAULT_NAME
    message.learner = message.learner or DEFAULT_NAME
    return decode_request(type_, ticket, message)


def attach_trainer(ticket: int, request: run_pb2.AttachTrainerRequest) -> i.AttachTrainer:
    return i.AttachTrainer(
        ticket=ticket,
        policy=request.policy or DEFAULT_NAME,
        learner=request.learner or DEFAULT_NAME,
        last_update=request.last_update,
        digest=request.digest,
        holder=request.holder,
        keeps_no_checkpoints=request.keeps_no_checkpoints,
        dropped=_dropped(request.samples),
        named=_named(request.samples),
        applied=request.outcome != run_pb2.UPDATE_OUTCOME_SKIPPED,
    )


def _named(samples: Iterable[run_pb2.DisposedSample]) -> tuple[str, ...]:
    return tuple(sample.sample_id for sample in samples)


def _dropped(samples: Iterable[run_pb2.DisposedSample]) -> tuple[DroppedSample, ...]:
    return tuple(
        DroppedSample(sample_id=sample.sample_id, reason=sample.reason or "DROPPED")
        for sample in samples
        if sample.disposition == run_pb2.SAMPLE_DISPOSITION_DROPPED
    )


def commit_update(ticket: int, request: run_pb2.CommitUpdateRequest) -> i.CommitUpdate:
    return i.CommitUpdate(
        ticket=ticket,
        policy=request.policy or DEFAULT_NAME,
        learner=request.learner or DEFAULT_NAME,
        trainer_epoch=request.trainer_epoch,
        update=request.update,
        lease_ids=tuple(request.lease_ids),
        dropped=_dropped(request.samples),
        named=_named(request.samples),
        applied=request.outcome == run_pb2.UPDATE_OUTCOME_APPLIED,
        groups=tuple(decode(TrainedGroup, group) for group in request.groups),
    )


def version_of(request: run_pb2.PublishVersionRequest) -> PolicyVersion:
    version = decode(PolicyVersion, request.version)
    return version if version.policy else structs.replace(version, policy=DEFAULT_NAME)


# Calls to other services ----------------------------------------------------------------------------------------------


def next_tasks_request(spec: RunSpec, effect: DrawTasks, position: int) -> data_pb2.NextTasksRequest:
    """Return the request for the draws of `effect`. The selector must have folded the ledger up to `position`."""
    return data_pb2.NextTasksRequest(
        run=spec.run,
        policy=spec.policy,
        purpose=types_pb2.Purpose.ValueType(effect.purpose),
        split=effect.split,
        first_draw=effect.first_draw,
        num=effect.num,
        ledger_position=position,
    )


def tasks_drawn(spec: RunSpec, effect: DrawTasks, answer: data_pb2.NextTasksResponse) -> i.TasksDrawn:
    """Return the tasks of a draw with their plans. Raises InvalidInput for a plan that does not fit the run."""
    planned = [drawn for drawn in answer.tasks if drawn.HasField("plan") and effect.purpose is Purpose.TRAIN]
    return i.TasksDrawn(
        purpose=effect.purpose,
        tasks=tuple((drawn.draw, decode(Task, drawn.task)) for drawn in answer.tasks),
        step=effect.step,
        incarnation=effect.incarnation,
        plans={drawn.draw: _plan(spec, drawn) for drawn in planned},
    )


def _plan(spec: RunSpec, drawn: data_pb2.DrawnTask) -> Plan:
    try:
        plan = decode(Plan, drawn.plan)
        why = why_too_large(spec, plan)
    except SettingError as error:
        why = str(error)
    if why:
        raise InvalidInput(
            f"the selector's plan for draw {drawn.draw}, task {drawn.task.task_id}, does not fit the run: {why}; "
            "correct the selector or its options",
            draw=drawn.draw,
        )
    return plan


def finalize_request(state: State, effect: FinalizeGroup) -> reward_pb2.FinalizeGroupRequest | None:
    """Return the request about a group; None if the group no longer waits for a decision."""
    group = state.groups.get(effect.group)
    if group is None or group.phase is not GroupPhase.FINALIZING:
        return None
    request = reward_pb2.FinalizeGroupRequest(
        run=state.the_spec.run,
        num_unscored=sum(e.status is EpisodeStatus.ENDED for e in group.episodes.values()),
        deadline_passed=effect.deadline_passed,
        num_extend_max=num_extend_max(group),
    )
    encode_into(group.task, request.task)
    encode_into(group_members(group), request.group)
    return request


def group_decided(group: str, answer: reward_pb2.FinalizeGroupResponse) -> i.GroupDecided:
    """Return the decision as an input, without the evidence of its rewards. Raises ScorerFailed if it is out of
    range."""
    try:
        validation.check_decision(answer)
    except InvalidInput as error:
        raise ScorerFailed(
            f"the finalizer's decision on group {group} is rejected: {error.message}; correct the finalizer that the "
            "reward service runs"
        ) from error
    for sample in answer.adjusted:
        for reward in sample.rewards:
            reward.evidence = ""
    return i.GroupDecided(
        group=group,
        decision=GroupDecision(answer.decision),
        reason=answer.reason,
        num_extend=answer.num_extend,
        adjusted=tuple(decode(SampleRewards, adjusted) for adjusted in answer.adjusted),
        dropped={one.sample_id: one.reason for one in answer.dropped},
    )


def dead_letter(letter: DeadLetter, time_unix_s: float) -> events_pb2.DeadLetter:
    """Return the letter of a task whose episode used up its attempts."""
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
        submitted_key=letter.submitted_key,
    )
    encode_into(letter.task, message.task)
    return message


# Lease ids ------------------------------------------------------------------------------------------------------------


SEPARATOR = "/"


def to_wire(run: str, lease_id: str) -> str:
    return f"{run}{SEPARATOR}{lease_id}"


def from_wire(name: str) -> tuple[str, str]:
    """Return (run, lease id of the core). A name without a run gets an empty run, which does not exist."""
    run, found, lease_id = name.partition(SEPARATOR)
    return (run, lease_id) if found else ("", name)
