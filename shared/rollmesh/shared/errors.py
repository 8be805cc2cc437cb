"""Typed errors of the mesh: one class per condition.

Every error has a `reason` (UPPER_SNAKE, for programs), a `code` (for the retry decision), a message that ends with the
remedy (for display), `metadata` (facts of this occurrence) and, if waiting helps, `retry_after_s`. Direct subclasses of
`MeshError` represent a code. Their subclasses represent a condition, so `except NotFound` catches every unknown name.

    MeshError
      InvalidInput        INVALID_ARGUMENT     ConfigError, CorruptSnapshot
      NotFound            NOT_FOUND            UnknownRun, UnknownLease, UnknownNode, UnknownBlob, ...
      AlreadyExists       ALREADY_EXISTS       CommitConflict
      FailedPrecondition  FAILED_PRECONDITION  StaleWeights, LeaseExpired, BeyondBound, NotPrepared, ...
      Aborted             ABORTED              Fenced
      ResourceExhausted   RESOURCE_EXHAUSTED   Overloaded, PayloadTooLarge, DiskFull
      Unavailable         UNAVAILABLE          NotReady, CatchingUp, Draining, InfraFailure (EngineFailed, ...)
      OutOfRange, DataLoss, DeadlineExceeded, Cancelled, Unauthenticated, PermissionDenied, Unimplemented, Internal

A subclass registers itself by its reason and code; `rollmesh.shared.rpc.status` turns errors into `google.rpc.Status`
and back. This module imports no networking, so that pure code can raise its errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rollmesh.shared.error_base import (
    BY_CODE,
    CONDITIONS,
    DOMAIN,
    Aborted,
    AlreadyExists,
    Cancelled,
    Code,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    FieldViolation,
    Internal,
    InvalidInput,
    MeshError,
    NotFound,
    OutOfRange,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    Unimplemented,
    error_for,
)

# fmt: off
__all__ = [
    "BY_CODE", "CONDITIONS", "DOMAIN", "Aborted", "AddressTaken", "AlreadyExists", "BeyondBound", "BrokenOracle",
    "Cancelled", "CatchingUp", "ChangeRefused", "Code",
    "CommitConflict", "ConfigError", "ConnectionLost", "CorruptSnapshot", "DataLoss", "DeadlineExceeded",
    "DigestMismatch",
    "DiskFull", "Draining", "EndpointFailed", "EngineFailed", "EpisodeConflict", "EpisodeLost", "EpisodeOver",
    "EpisodesNotServed", "FailedPrecondition", "Fenced", "FieldViolation",
    "GroupCodeFailed", "HasLearner", "HashMismatch",
    "InfraFailure", "Internal", "InvalidInput", "InvalidSpec", "LearnerCodeFailed", "LeaseExpired", "LeaseOut",
    "LedgerFull", "LossFailed", "MeshError", "MetadataMismatch", "NoLearner", "NoNode", "NodeDraining", "NotFound",
    "NotPrepared", "NotPublished", "NotReady", "NotUploaded", "OutOfRange", "Overloaded", "PayloadLost",
    "PayloadTooLarge", "PermissionDenied", "Phrase", "PriceLimit", "ProbeMismatch", "RankFailed", "RanksDisagree",
    "ResourceExhausted", "RunEnded", "RunExists", "RunLive",
    "RunStopped", "SampleConflict", "SampleQuota", "SamplesNotAccepted", "SandboxFailed", "ScorerFailed",
    "StaleWeights", "TaskConflict", "TaskQuota", "TasksNotAccepted", "TokenizerMismatch",
    "Unauthenticated", "Unavailable",
    "UndecodableRequest",
    "Unimplemented", "UnknownBlob", "UnknownEndpoint", "UnknownEpisode", "UnknownLearner", "UnknownLease",
    "UnknownNode",
    "UnknownOracle", "UnknownPolicy", "UnknownProfile", "UnknownRun", "UnknownSample", "UnknownSession",
    "UnknownSplit", "UnknownTask", "UnknownUpdate", "UnknownVersion", "UnleasedGroup", "UnleasedSample",
    "VersionConflict", "VersionRefused", "WeightsRejected", "WrongUpdate",
    "WrongVersion", "at_key", "described_field_error", "error_for", "field_error", "located_at",
]
# fmt: on


# Invalid input --------------------------------------------------------------------------------------------------------


class Phrase(str):
    """A description of what a field has, such as "3 entries". `field_error` shows it without quotes."""


def field_error(
    field: str,
    must: str,
    got: object,
    remedy: str = "",
    *,
    of: type[MeshError] = InvalidInput,
    **metadata: Any,
) -> MeshError:
    """Return the error of a field, of class `of`: "`FIELD` must MUST, got GOT; REMEDY".

    `got` is shown as Python writes it, at most 100 characters. None is shown as "none", an exception as its message,
    and a `Phrase` as it is.
    """
    what = f"must {must}, got {_shown(got)}" + (f"; {remedy}" if remedy else "")
    return described_field_error(field, what, of=of, **metadata)


def described_field_error(field: str, what: str, *, of: type[MeshError] = InvalidInput, **metadata: Any) -> MeshError:
    """Return the error of a field of which another check has described the requirement and the value: "`FIELD`
    WHAT"."""
    return of(f"`{field}` {what}", violations=[FieldViolation(field, what)], **metadata)


def _shown(got: object) -> str:
    if got is None:
        return "none"
    if isinstance(got, BaseException):
        return f"an error: {got}"
    if isinstance(got, Phrase):
        return got
    text = repr(got)
    return text if len(text) <= 100 else f"{text[:100]}... ({len(text)} characters)"


class ConfigError(InvalidInput):
    """The configuration is invalid. The message contains the key, the expected and the found value, and where it was
    read."""

    reason = "INVALID_CONFIG"


def at_key(error: InvalidInput, key: str) -> ConfigError:
    """Return the error with the key of the configuration at which it occurred, for an error that does not name one.

    The key of an option is that of its extension with `.options.NAME`.
    """
    option = f".options.{error.violations[0].field}" if len(error.violations) == 1 else ""
    return ConfigError(f"`{key}`: {error.message}", violations=error.violations, key=key + option)


@contextmanager
def located_at(key: str) -> Iterator[None]:
    """Add the key to an InvalidInput that is raised in the block and does not name it or a key below it."""
    try:
        yield
    except InvalidInput as error:
        if f"{error.metadata.get('key', '')}.".startswith(f"{key}."):
            raise
        raise at_key(error, key) from error


class InvalidSpec(InvalidInput):
    """The spec of a run is invalid; the message names the field."""

    reason = "INVALID_SPEC"


class UndecodableRequest(InvalidInput):
    """The bytes of a request are not a message of the method's request type."""

    reason = "UNDECODABLE_REQUEST"


class ContextLengthExceeded(InvalidInput):
    """The messages of a request have more tokens than the context."""

    reason = "CONTEXT_LENGTH_EXCEEDED"


class UnleasedSample(InvalidInput):
    """A commit names a sample that is not in its leases."""

    reason = "UNKNOWN_SAMPLE"


class UnleasedGroup(InvalidInput):
    """A commit names a group that is not in its leases."""

    reason = "UNKNOWN_GROUP"


class CorruptSnapshot(InvalidInput):
    """The bytes are not a snapshot of this state."""

    reason = "CORRUPT_SNAPSHOT"


# Unknown names --------------------------------------------------------------------------------------------------------


class UnknownRun(NotFound):
    """The run does not exist on this server."""

    reason = "UNKNOWN_RUN"


class UnknownPolicy(NotFound):
    """The run has no such policy."""

    reason = "UNKNOWN_POLICY"


class UnknownLearner(NotFound):
    """The run has no such learner, or it has not attached."""

    reason = "UNKNOWN_LEARNER"


class UnknownLease(NotFound):
    """The lease was never issued, or ended so long ago that it was removed."""

    reason = "UNKNOWN_LEASE"


class UnknownEpisode(NotFound):
    """No episode of an application has this lease, or it ended long ago."""

    reason = "UNKNOWN_EPISODE"


class UnknownNode(NotFound):
    """The node has not joined, or was removed as dead; join again."""

    reason = "UNKNOWN_NODE"


class UnknownEndpoint(NotFound):
    """The endpoint is not configured."""

    reason = "UNKNOWN_ENDPOINT"


class UnknownVersion(NotFound):
    """The policy version does not exist here."""

    reason = "UNKNOWN_VERSION"


class UnknownBlob(NotFound):
    """The blob is not stored here; ask another source."""

    reason = "UNKNOWN_BLOB"


class UnknownSample(NotFound):
    """The ledger does not contain the sample."""

    reason = "UNKNOWN_SAMPLE"


class UnknownSession(NotFound):
    """The sandbox session was closed, reaped, or never opened here."""

    reason = "UNKNOWN_SESSION"


class SessionNotSaved(InvalidInput):
    """The program of a sandbox session prevents that its state is saved or loaded; the metadata `ended` says that it
    has also ended."""

    reason = "SESSION_NOT_SAVED"
    code = Code.INVALID_ARGUMENT


class UnknownProfile(NotFound):
    """The sandbox profile is not configured."""

    reason = "UNKNOWN_PROFILE"


class UnknownSnapshot(NotFound):
    """The sandbox snapshot was dropped, expired, or never taken on this node."""

    reason = "UNKNOWN_SNAPSHOT"


class UnknownSplit(NotFound):
    """The task source has no such split."""

    reason = "UNKNOWN_SPLIT"


class UnknownTask(NotFound):
    """The split has no such task; the data service and the run have different sources."""

    reason = "UNKNOWN_TASK"


class UnknownOracle(NotFound):
    """The oracle reference does not resolve; the task and the reward service's sources disagree."""

    reason = "UNKNOWN_ORACLE"


# Preconditions and conflicts ------------------------------------------------------------------------------------------


class StaleWeights(FailedPrecondition):
    """The node's active weights are older than the request admits; another node may serve it."""

    reason = "STALE_WEIGHTS"


class LeaseExpired(FailedPrecondition):
    """The lease ran out before the request; its work is void."""

    reason = "LEASE_EXPIRED"


class NodeDraining(FailedPrecondition):
    """The node that requests work is draining, so it gets no more; do not call again."""

    reason = "DRAINING"


class BeyondBound(FailedPrecondition):
    """A sample is older than the staleness bound allows at its update."""

    reason = "BEYOND_BOUND"


class AddressTaken(FailedPrecondition):
    """Another process listens at the address; the message names it."""

    reason = "ADDRESS_TAKEN"


class NotPrepared(FailedPrecondition):
    """The version must be prepared before it is activated."""

    reason = "NOT_PREPARED"


class WeightsRejected(FailedPrecondition):
    """Names, shapes, dtypes or values of the weights do not fit the model."""

    reason = "WEIGHTS_REJECTED"


class ProbeMismatch(FailedPrecondition):
    """The engine serves something other than what was uploaded; the node is quarantined."""

    reason = "PROBE_MISMATCH"


class RunStopped(FailedPrecondition):
    """The run has ended; it can be read but not changed."""

    reason = "RUN_STOPPED"


class BrokenOracle(FailedPrecondition):
    """The oracle's code does not load or run, so it cannot judge until it is fixed."""

    reason = "BROKEN_ORACLE"


class GroupCodeFailed(FailedPrecondition):
    """The estimator or the finalizer raised on a group. It is pure, so it raises again for the same group."""

    reason = "GROUP_CODE_FAILED"


class LossFailed(FailedPrecondition):
    """A term of the loss raised; the message has its error and the lines of the user's code."""

    reason = "LOSS_FAILED"


class LearnerCodeFailed(FailedPrecondition):
    """The estimator or the update rule raised, or returned what an update cannot use; the message names it and has the
    lines of the user's code."""

    reason = "LEARNER_CODE_FAILED"


class NoLearner(FailedPrecondition):
    """The run exports its samples, so it does not lease or commit batches."""

    reason = "NO_LEARNER"


class HasLearner(FailedPrecondition):
    """The learner of the run trains on its samples, so they are not streamed."""

    reason = "HAS_LEARNER"


class ChangeRefused(FailedPrecondition):
    """The setting cannot change during a run."""

    reason = "CHANGE_REFUSED"


class VersionRefused(FailedPrecondition):
    """Canary nodes could not load published weights, or scored their probes wrong."""

    reason = "VERSION_REFUSED"


class TasksNotAccepted(FailedPrecondition):
    """The run takes no tasks from clients: its data service has them, or a client has declared that none follow."""

    reason = "TASKS_NOT_ACCEPTED"


class EpisodesNotServed(FailedPrecondition):
    """The agent of the task does not serve episodes to applications."""

    reason = "EPISODES_NOT_SERVED"


class EpisodeOver(FailedPrecondition):
    """The episode of an application has ended; the metadata `end` has its end."""

    reason = "EPISODE_OVER"


class SamplesNotAccepted(FailedPrecondition):
    """The run takes no samples of this source from clients, because `run.foreign` has no bound for it."""

    reason = "SAMPLES_NOT_ACCEPTED"


class TokenizerMismatch(FailedPrecondition):
    """The token ids of submitted samples are of another tokenizer than that of the run."""

    reason = "TOKENIZER_MISMATCH"


class WrongUpdate(FailedPrecondition):
    """The update is not the next one, which the metadata contains."""

    reason = "WRONG_UPDATE"


class LeaseOut(FailedPrecondition):
    """A batch of this update is leased, and the commit does not name its lease."""

    reason = "LEASE_OUT"


class NotPublished(FailedPrecondition):
    """The current weights must be published first."""

    reason = "NOT_PUBLISHED"


class WrongVersion(FailedPrecondition):
    """The version is not the newest committed step of the current incarnation."""

    reason = "WRONG_VERSION"


class NotUploaded(FailedPrecondition):
    """The depot lacks the manifest of a version or one of its chunks."""

    reason = "NOT_UPLOADED"


class DigestMismatch(FailedPrecondition):
    """The trainer's commit digest belongs to a different history than the ledger's."""

    reason = "DIGEST_MISMATCH"


class RanksDisagree(FailedPrecondition):
    """The processes of a trainer have different settings, weights or data; the message says which ranks and what."""

    reason = "RANKS_DISAGREE"


class MeshBusy(FailedPrecondition):
    """The mesh's inference nodes serve another live run."""

    reason = "MESH_BUSY"


class RunLive(FailedPrecondition):
    """The run has not ended, so it cannot be deleted."""

    reason = "RUN_LIVE"


class RunExists(AlreadyExists):
    """The run exists with another spec."""

    reason = "RUN_EXISTS"


class VersionConflict(AlreadyExists):
    """This (step, incarnation) was published with another weights digest."""

    reason = "VERSION_CONFLICT"


class TaskConflict(AlreadyExists):
    """A task of this id was submitted with other content."""

    reason = "TASK_CONFLICT"


class EpisodeConflict(AlreadyExists):
    """An application has finished the episode with other rewards."""

    reason = "EPISODE_CONFLICT"


class SampleConflict(AlreadyExists):
    """Samples with this key were submitted with other content."""

    reason = "SAMPLE_CONFLICT"


class CommitConflict(AlreadyExists):
    """The update is committed already, with other dispositions; the first commit stands."""

    reason = "COMMIT_CONFLICT"


class Fenced(Aborted):
    """A newer epoch or writer has taken over; this one must stop."""

    reason = "FENCED"


class EpisodeLost(Aborted):
    """The worker of an application's episode was lost, or the episode failed; it can be opened again."""

    reason = "EPISODE_LOST"


class RunEnded(OutOfRange):
    """The run has ended, so no batch is left to lease."""

    reason = "RUN_ENDED"


class UnknownUpdate(OutOfRange):
    """The ledger does not contain the update."""

    reason = "UNKNOWN_UPDATE"


# Limits ---------------------------------------------------------------------------------------------------------------


class Overloaded(ResourceExhausted):
    """A queue is full; retry after `retry_after_s`."""

    reason = "OVERLOADED"
    retry_after_s_default = 1.0


class PayloadTooLarge(ResourceExhausted):
    """A message is over the size limit; send less at once, or raise the limit on both sides."""

    reason = "PAYLOAD_TOO_LARGE"

    @property
    def retryable(self) -> bool:
        """Never, because the same message has the same size when it is retried."""
        return False


class TaskQuota(ResourceExhausted):
    """A run has as many submitted tasks as it may; retry after `retry_after_s` if it is set."""

    reason = "TASK_QUOTA"

    @property
    def retryable(self) -> bool:
        """Whether tasks of the quota can be drawn."""
        return self.retry_after_s is not None


class SampleQuota(ResourceExhausted):
    """A run has as many submitted samples as it may; retry after `retry_after_s` if it is set."""

    reason = "SAMPLE_QUOTA"

    @property
    def retryable(self) -> bool:
        """Whether samples of the quota can be admitted."""
        return self.retry_after_s is not None


class DiskFull(ResourceExhausted):
    """The disk quota is used up."""

    reason = "DISK_FULL"


class LedgerFull(ResourceExhausted):
    """The ledger of the run has no room for the record of this request; raise its limit and resume the run, or delete
    the run."""

    reason = "LEDGER_FULL"

    @property
    def retryable(self) -> bool:
        """Never, because a ledger only grows."""
        return False


class PriceLimit(ResourceExhausted):
    """The run has spent what it may at an endpoint; raise the limit and resume it."""

    reason = "PRICE_LIMIT"

    @property
    def retryable(self) -> bool:
        """Never, because the sum of a run does not decrease."""
        return False


# Availability and infrastructure --------------------------------------------------------------------------------------


class NotReady(Unavailable):
    """The service is starting, or waits for another service."""

    reason = "NOT_READY"


class NoNode(NotReady):
    """No node of a kind serves: none has joined, or none can be reached. An attempt that ends with it does not count
    towards `tries_max`."""

    reason = "NO_NODE"


class CatchingUp(Unavailable):
    """The state has not yet been folded up to the requested position."""

    reason = "CATCHING_UP"


class Draining(Unavailable):
    """The node accepts no new work because it is about to stop."""

    reason = "DRAINING"


class InfraFailure(Unavailable):
    """A machine, process or network failed. The work is retried and does not count as a failure of the model."""

    reason = "INFRA_FAILURE"


class ConnectionLost(InfraFailure):
    """The connection ended after the request was sent. The peer may have executed it, and may have exited because of
    it."""

    reason = "CONNECTION_LOST"


class EngineFailed(InfraFailure):
    """The inference engine failed."""

    reason = "ENGINE_FAILED"


class RankFailed(InfraFailure):
    """A process of the trainer exited or did not respond; the message names its rank and has its last output."""

    reason = "RANK_FAILED"


class SandboxFailed(InfraFailure):
    """The jail could not be created or was lost."""

    reason = "SANDBOX_FAILED"


class ScorerFailed(InfraFailure):
    """A scorer raised or ran out of time."""

    reason = "SCORER_FAILED"


class EndpointFailed(InfraFailure):
    """An endpoint did not answer, or not as its protocol says; the message names the endpoint."""

    reason = "ENDPOINT_FAILED"


class HashMismatch(DataLoss):
    """The bytes do not match their digest and were not stored; send them again."""

    reason = "HASH_MISMATCH"


class PayloadLost(DataLoss):
    """The sample stream no longer holds a payload."""

    reason = "PAYLOAD_LOST"


class MetadataMismatch(DataLoss):
    """The reported metadata of a sample contradicts the stamps in its payload."""

    reason = "METADATA_MISMATCH"
