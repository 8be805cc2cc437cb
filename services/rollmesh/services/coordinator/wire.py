"""Requests as inputs of the core, and its answers as replies; the rules of the contract on single fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from rollmesh.services.coordinator import validation
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core.facts import DroppedSample, PayloadRef, SampleMeta
from rollmesh.services.coordinator.core.records import RunSpec
from rollmesh.services.coordinator.fact_codec import decode, encode_into, known_member
from rollmesh.services.coordinator.lease_names import from_wire, to_wire
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.codec.refusal import refuse_unknown
from rollmesh.shared.errors import FieldViolation, InvalidInput, InvalidSpec
from rollmesh.shared.versions import PolicyVersion
from rollmesh.v1 import coordinator_pb2, events_pb2, run_pb2, types_pb2

DEFAULT_NAME = "main"
WAIT_S_MAX = 60.0
NUM_MAX = 4096
TRACEBACK_CHARS_MAX = 4000
"""The end of a longer one is kept: it says what and where."""
EVIDENCE_CHARS_MAX = 4096
"""The ledger keeps this much of a reward's evidence; the payload has all of it."""


def invalid(field: str, what: str) -> InvalidInput:
    return InvalidInput(f"{field} {what}", violations=[FieldViolation(field, what)])


def run_spec(message: events_pb2.RunSpec) -> RunSpec:
    """The spec with the contract's defaults filled in. Raises InvalidSpec naming the field."""
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
    except (ValueError, InvalidInput) as error:
        field = str(error).split(" ", 1)[0]
        raise InvalidSpec(f"spec.{error}", violations=[FieldViolation(f"spec.{field}", str(error))]) from error


def wait_s(asked: float, remaining_s: float) -> float:
    """A long poll's wait: within the contract, and a little shorter than the caller's deadline, so that an answer is heard."""
    if not 0.0 <= asked <= WAIT_S_MAX:
        raise invalid("wait_s", f"is {asked}; expected 0 to {WAIT_S_MAX:g}")
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
    )
    message.key.run = run
    message.key.task = lease.task.task_id
    message.key.group = lease.group
    message.key.episode = lease.episode
    message.key.attempt = lease.attempt
    encode_into(lease.task, message.task)
    return message


def episode_report(message: coordinator_pb2.EpisodeReport) -> i.EpisodeReport:
    """A report that is not valid becomes a failed attempt, with the reason; see `EpisodeReport.invalid`."""
    invalid = validation.why_invalid_report(message)
    completed = not invalid and message.outcome == coordinator_pb2.EPISODE_OUTCOME_COMPLETED
    run, lease_id = from_wire(message.lease_id)
    return i.EpisodeReport(
        lease_id=lease_id if run == message.key.run else "",
        group=message.key.group,
        episode=message.key.episode,
        attempt=message.key.attempt,
        outcome=i.EpisodeOutcome.INFRA_FAILURE if invalid else i.EpisodeOutcome(message.outcome),
        payload=decode(PayloadRef, message.payload) if completed else i.NO_PAYLOAD,
        samples=tuple(_sample_meta(sample) for sample in message.samples) if completed else (),
        cause=(message.failure.message or message.failure.reason)[: validation.TEXT_CHARS_MAX],
        traceback=message.failure.metadata["traceback"][-TRACEBACK_CHARS_MAX:]
        if "traceback" in message.failure.metadata
        else "",
        invalid=invalid,
    )


def _sample_meta(message: types_pb2.SampleMeta) -> SampleMeta:
    for reward in message.rewards:
        reward.evidence = reward.evidence[:EVIDENCE_CHARS_MAX]
    message.policy = message.policy or DEFAULT_NAME
    return decode(SampleMeta, message)


# Batches --------------------------------------------------------------------------------------------------------------


def lease_batch(ticket: int, request: run_pb2.LeaseBatchRequest, wait: float) -> i.LeaseBatch:
    unit = known_member(i.GeometryUnit, request.geometry.unit or run_pb2.BatchGeometry.UNIT_GROUPS)
    if unit is None:
        raise invalid("geometry.unit", f"is {request.geometry.unit}; expected 1 to {len(i.GeometryUnit)}")
    if request.HasField("geometry") and request.geometry.amount < 1:
        raise invalid("geometry.amount", f"is {request.geometry.amount}; expected at least 1")
    return i.LeaseBatch(
        ticket=ticket,
        policy=request.policy or DEFAULT_NAME,
        learner=request.learner or DEFAULT_NAME,
        trainer_epoch=request.trainer_epoch,
        update=request.update,
        unit=unit,
        amount=request.geometry.amount,
        wait_s=wait,
    )


def leased_samples(samples: Sequence[i.LeasedSample]) -> list[run_pb2.LeasedSample]:
    messages = []
    for sample in samples:
        message = run_pb2.LeasedSample()
        encode_into(sample, message)
        messages.append(message)
    return messages


def batch_response(batch: i.Batch) -> run_pb2.LeaseBatchResponse:
    message = run_pb2.LeaseBatchResponse(lease_id=batch.lease_id, waiting_for=batch.waiting_for, lease_s=batch.lease_s)
    message.samples.extend(leased_samples(batch.samples))
    for group in batch.groups:
        encode_into(group, message.groups.add())
    return message


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
    )


def version_of(request: run_pb2.PublishVersionRequest) -> PolicyVersion:
    version = decode(PolicyVersion, request.version)
    return version if version.policy else dataclasses.replace(version, policy=DEFAULT_NAME)
