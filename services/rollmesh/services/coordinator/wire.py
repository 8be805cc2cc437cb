"""Requests as inputs of the core, and its answers as replies; the rules of the contract on single fields."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core.records import DroppedSample, PayloadRef, RunSpec, SampleMeta, Version
from rollmesh.services.coordinator.fact_codec import decode, encode_into, known_member
from rollmesh.services.coordinator.lease_names import from_wire, to_wire
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.codec.refusal import refuse_unknown
from rollmesh.shared.errors import FieldViolation, InvalidInput, InvalidSpec
from rollmesh.v1 import coordinator_pb2, events_pb2, run_pb2, types_pb2

DEFAULT_NAME = "main"
WAIT_S_MAX = 60.0
NUM_MAX = 4096
TRACEBACK_CHARS_MAX = 4000
"""The end of a longer one is kept: it says what and where."""


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
    outcome = known_member(i.EpisodeOutcome, message.outcome)
    if outcome is None:
        raise invalid("reports.outcome", f"is {message.outcome}; expected 1 to {len(i.EpisodeOutcome)}")
    if message.key.attempt < 1:
        raise invalid("reports.key.attempt", f"is {message.key.attempt}; expected the lease's, 1 or more")
    return i.EpisodeReport(
        lease_id=from_wire(message.lease_id)[1],
        group=message.key.group,
        episode=message.key.episode,
        attempt=message.key.attempt,
        outcome=outcome,
        payload=decode(PayloadRef, message.payload),
        samples=tuple(_sample_meta(sample) for sample in message.samples),
        cause=message.failure.message or message.failure.reason,
        traceback=message.failure.metadata["traceback"][-TRACEBACK_CHARS_MAX:]
        if "traceback" in message.failure.metadata
        else "",
    )


def _sample_meta(message: types_pb2.SampleMeta) -> SampleMeta:
    meta = decode(SampleMeta, message)
    return meta if meta.policy else msgspec.structs.replace(meta, policy=DEFAULT_NAME)


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


def commit_update(ticket: int, request: run_pb2.CommitUpdateRequest) -> i.CommitUpdate:
    """Raises InvalidInput for a sample named twice, or a disposition or an outcome that is missing."""
    named = [sample.sample_id for sample in request.samples]
    if len(set(named)) != len(named):
        raise invalid("samples", "name a sample twice")
    dropped = []
    for sample in request.samples:
        if sample.disposition == run_pb2.SAMPLE_DISPOSITION_DROPPED:
            dropped.append(DroppedSample(sample_id=sample.sample_id, reason=sample.reason or "DROPPED"))
        elif sample.disposition != run_pb2.SAMPLE_DISPOSITION_USED:
            raise invalid("samples.disposition", f"of {sample.sample_id} is missing; expected USED or DROPPED")
    if request.outcome not in (run_pb2.UPDATE_OUTCOME_APPLIED, run_pb2.UPDATE_OUTCOME_SKIPPED):
        raise invalid("outcome", "is missing; expected APPLIED or SKIPPED")
    return i.CommitUpdate(
        ticket=ticket,
        policy=request.policy or DEFAULT_NAME,
        learner=request.learner or DEFAULT_NAME,
        trainer_epoch=request.trainer_epoch,
        update=request.update,
        lease_ids=tuple(request.lease_ids),
        dropped=tuple(dropped),
        named=tuple(named),
        applied=request.outcome == run_pb2.UPDATE_OUTCOME_APPLIED,
    )


def version_of(request: run_pb2.PublishVersionRequest) -> Version:
    version = decode(Version, request.version)
    if not version.weights_digest:
        raise invalid("version.weights_digest", "is missing; upload the weights and name their manifest's digest")
    return version if version.policy else msgspec.structs.replace(version, policy=DEFAULT_NAME)
