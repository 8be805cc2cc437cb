"""Typed errors of the mesh: one class per condition, and the one table that maps them to the wire.

Every error has a `reason` (UPPER_SNAKE, for programs), a `code` (for the retry decision), a message that ends in the remedy
(for people), `metadata` (facts of this occurrence) and, where waiting helps, `retry_after_s`. Direct subclasses of `MeshError`
stand for a code; their subclasses for a condition, so `except NotFound` catches every unknown name.

    MeshError
      InvalidInput        INVALID_ARGUMENT     ConfigError, CorruptSnapshot
      NotFound            NOT_FOUND            UnknownRun, UnknownLease, UnknownNode, UnknownBlob, ...
      AlreadyExists       ALREADY_EXISTS       CommitConflict
      FailedPrecondition  FAILED_PRECONDITION  StaleWeights, LeaseExpired, BeyondBound, NotPrepared, ...
      Aborted             ABORTED              Fenced
      ResourceExhausted   RESOURCE_EXHAUSTED   Overloaded, PayloadTooLarge, DiskFull
      Unavailable         UNAVAILABLE          NotReady, CatchingUp, Draining, InfraFailure (EngineFailed, ...)
      OutOfRange, DataLoss, DeadlineExceeded, Cancelled, Unauthenticated, PermissionDenied, Unimplemented, Internal

A subclass registers itself by its reason; `rollmesh.shared.rpc.status` turns errors into `google.rpc.Status` and back.
This module imports no networking, so that pure code can raise its errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import ClassVar, NamedTuple

DOMAIN = "rollmesh"


class Code(Enum):
    """Canonical status codes; names and numbers equal `google.rpc.Code` and `grpc.StatusCode`."""

    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class FieldViolation(NamedTuple):
    """One wrong field of a request: its dotted path, and what is wrong with it."""

    field: str
    description: str


BY_REASON: dict[str, type[MeshError]] = {}
"""Every error class by its reason. Filled by `MeshError.__init_subclass__`."""


class MeshError(Exception):
    """Base of all errors that cross a boundary of the mesh.

    `message` is for people and ends in the remedy. Keyword arguments become `metadata`: short facts, stringified.
    """

    reason: str = "INTERNAL"
    code: Code = Code.INTERNAL
    retry_after_s_default: ClassVar[float | None] = None

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: float | None = None,
        violations: Sequence[FieldViolation] = (),
        **metadata: object,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = self.retry_after_s_default if retry_after_s is None else retry_after_s
        self.violations = tuple(violations)
        self.metadata = {key: str(value) for key, value in metadata.items()}

    def __init_subclass__(cls) -> None:
        assert "reason" in cls.__dict__, f"{cls.__name__} must name its own reason"
        assert cls.reason not in BY_REASON, f"{cls.__name__} and {BY_REASON[cls.reason].__name__} share {cls.reason}"
        BY_REASON[cls.reason] = cls

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed later or elsewhere."""
        return self.code in (Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED) or self.retry_after_s is not None

    def __str__(self) -> str:
        return self.message


def error_for(reason: str, code: Code) -> type[MeshError]:
    """The class of `reason` if its code agrees, else the class that stands for `code`: a peer may be newer than we are."""
    exact = BY_REASON.get(reason)
    if exact is not None and exact.code is code:
        return exact
    return BY_CODE.get(code, Internal)


# One class per code ---------------------------------------------------------------------------------------------------


class Internal(MeshError):
    """A bug on the other side; its log has the traceback."""

    reason = "INTERNAL"


class InvalidInput(MeshError):
    """The request can never succeed as it is; `violations` name the fields."""

    reason = "INVALID_INPUT"
    code = Code.INVALID_ARGUMENT


class NotFound(MeshError):
    """Something named in the request does not exist."""

    reason = "NOT_FOUND"
    code = Code.NOT_FOUND


class AlreadyExists(MeshError):
    """The name is taken by something else."""

    reason = "ALREADY_EXISTS"
    code = Code.ALREADY_EXISTS


class FailedPrecondition(MeshError):
    """The state of the system forbids the request; change that state before sending it again."""

    reason = "FAILED_PRECONDITION"
    code = Code.FAILED_PRECONDITION


class Aborted(MeshError):
    """Somebody else won; start again from fresh state."""

    reason = "ABORTED"
    code = Code.ABORTED


class OutOfRange(MeshError):
    """Past the end."""

    reason = "EXHAUSTED"
    code = Code.OUT_OF_RANGE


class ResourceExhausted(MeshError):
    """A limit is reached; free something or wait."""

    reason = "RESOURCE_EXHAUSTED"
    code = Code.RESOURCE_EXHAUSTED


class Unavailable(MeshError):
    """Not now, or not here: retry after `retry_after_s`, or elsewhere."""

    reason = "UNAVAILABLE"
    code = Code.UNAVAILABLE
    retry_after_s_default = 1.0


class DeadlineExceeded(MeshError):
    """No answer within the deadline; the request may or may not have been carried out."""

    reason = "DEADLINE_EXCEEDED"
    code = Code.DEADLINE_EXCEEDED


class Cancelled(MeshError):
    """The other side cancelled the call."""

    reason = "CANCELLED"
    code = Code.CANCELLED


class DataLoss(MeshError):
    """Data is damaged beyond repair."""

    reason = "DATA_LOSS"
    code = Code.DATA_LOSS


class Unauthenticated(MeshError):
    """No token, or the wrong one."""

    reason = "UNAUTHENTICATED"
    code = Code.UNAUTHENTICATED


class PermissionDenied(MeshError):
    """The caller is known and may not do this."""

    reason = "PERMISSION_DENIED"
    code = Code.PERMISSION_DENIED


class Unimplemented(MeshError):
    """The verb exists in the contract but not in this server."""

    reason = "UNIMPLEMENTED"
    code = Code.UNIMPLEMENTED


BY_CODE: dict[Code, type[MeshError]] = {cls.code: cls for cls in MeshError.__subclasses__()}
"""The class that stands for each code, for reasons this side does not know."""


# Invalid input --------------------------------------------------------------------------------------------------------


class ConfigError(InvalidInput):
    """A configuration that cannot be used: names the key, what was expected, what was found, and where it was read."""

    reason = "INVALID_CONFIG"


class InvalidSpec(InvalidInput):
    """The spec of a run cannot work; the message names the field."""

    reason = "INVALID_SPEC"


class CorruptSnapshot(InvalidInput):
    """Bytes that are no snapshot of what they are given to."""

    reason = "CORRUPT_SNAPSHOT"


# Unknown names --------------------------------------------------------------------------------------------------------


class UnknownRun(NotFound):
    """No such run on this server."""

    reason = "UNKNOWN_RUN"


class UnknownPolicy(NotFound):
    """The run has no such policy."""

    reason = "UNKNOWN_POLICY"


class UnknownLearner(NotFound):
    """The run has no such learner, or it has not attached."""

    reason = "UNKNOWN_LEARNER"


class UnknownLease(NotFound):
    """Never issued, or ended so long ago that it was forgotten."""

    reason = "UNKNOWN_LEASE"


class UnknownNode(NotFound):
    """The node has not joined, or was declared dead; join again."""

    reason = "UNKNOWN_NODE"


class UnknownEndpoint(NotFound):
    """No such endpoint is configured."""

    reason = "UNKNOWN_ENDPOINT"


class UnknownVersion(NotFound):
    """No such policy version here."""

    reason = "UNKNOWN_VERSION"


class UnknownBlob(NotFound):
    """The blob is not stored here; ask another source."""

    reason = "UNKNOWN_BLOB"


class UnknownSample(NotFound):
    """No such sample in the ledger."""

    reason = "UNKNOWN_SAMPLE"


class UnknownSession(NotFound):
    """The sandbox session was closed, reaped, or never opened here."""

    reason = "UNKNOWN_SESSION"


class UnknownProfile(NotFound):
    """No such sandbox profile is configured."""

    reason = "UNKNOWN_PROFILE"


class UnknownSplit(NotFound):
    """The task source has no such split."""

    reason = "UNKNOWN_SPLIT"


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


class BeyondBound(FailedPrecondition):
    """A sample is older than the staleness bound allows at its update."""

    reason = "BEYOND_BOUND"


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
    """The run has ended; it can be read but no longer driven."""

    reason = "RUN_STOPPED"


class WrongUpdate(FailedPrecondition):
    """Not the update that comes next; the metadata says which does."""

    reason = "WRONG_UPDATE"


class NotPublished(FailedPrecondition):
    """The present weights must be published first."""

    reason = "NOT_PUBLISHED"


class WrongVersion(FailedPrecondition):
    """Not the newest committed step of the present incarnation."""

    reason = "WRONG_VERSION"


class NotUploaded(FailedPrecondition):
    """The depot lacks the manifest of a version or one of its chunks."""

    reason = "NOT_UPLOADED"


class DigestMismatch(FailedPrecondition):
    """A trainer's commit digest is of another history than the ledger's."""

    reason = "DIGEST_MISMATCH"


class RunExists(AlreadyExists):
    """The run exists with another spec."""

    reason = "RUN_EXISTS"


class VersionConflict(AlreadyExists):
    """This (step, incarnation) was published with another weights digest."""

    reason = "VERSION_CONFLICT"


class CommitConflict(AlreadyExists):
    """The update is committed already, with other dispositions; the first commit stands."""

    reason = "COMMIT_CONFLICT"


class Fenced(Aborted):
    """A newer epoch or writer has taken over; this one must stop."""

    reason = "FENCED"


class RunEnded(OutOfRange):
    """The run has ended: there is nothing left to lease."""

    reason = "RUN_ENDED"


class UnknownUpdate(OutOfRange):
    """An update that the ledger does not hold."""

    reason = "UNKNOWN_UPDATE"


# Limits ---------------------------------------------------------------------------------------------------------------


class Overloaded(ResourceExhausted):
    """A queue is full; retry after `retry_after_s`."""

    reason = "OVERLOADED"
    retry_after_s_default = 1.0


class PayloadTooLarge(ResourceExhausted):
    """A message is over the size limit; send less at once, or raise the limit on both sides."""

    reason = "PAYLOAD_TOO_LARGE"


class DiskFull(ResourceExhausted):
    """The disk quota is used up."""

    reason = "DISK_FULL"


# Availability and infrastructure --------------------------------------------------------------------------------------


class NotReady(Unavailable):
    """Still starting, or waiting for a part it needs."""

    reason = "NOT_READY"


class CatchingUp(Unavailable):
    """The state has not yet been folded up to the position asked for."""

    reason = "CATCHING_UP"


class Draining(Unavailable):
    """Takes no new work because it is about to stop."""

    reason = "DRAINING"


class InfraFailure(Unavailable):
    """A machine, process or network failed: retried, never held against the model."""

    reason = "INFRA_FAILURE"


class EngineFailed(InfraFailure):
    """The inference engine failed."""

    reason = "ENGINE_FAILED"


class SandboxFailed(InfraFailure):
    """The jail could not be made or was lost."""

    reason = "SANDBOX_FAILED"


class ScorerFailed(InfraFailure):
    """A scorer raised or ran out of time."""

    reason = "SCORER_FAILED"


class HashMismatch(DataLoss):
    """Bytes do not hash to their digest; nothing was stored; send again."""

    reason = "HASH_MISMATCH"


class PayloadLost(DataLoss):
    """The sample stream no longer holds a payload."""

    reason = "PAYLOAD_LOST"
