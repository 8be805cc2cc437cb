"""The one table from the core's refusals to the mesh's typed errors."""

from __future__ import annotations

from rollmesh.services.coordinator.core.decision_context import Refusal
from rollmesh.shared import errors

BY_REASON: dict[str, type[errors.MeshError]] = {
    "RUN_EXISTS": errors.RunExists,
    "CHANGE_REFUSED": errors.ChangeRefused,
    "UNKNOWN_RUN": errors.UnknownRun,
    "NO_LEARNER": errors.NoLearner,
    "UNKNOWN_LEARNER": errors.UnknownLearner,
    "UNKNOWN_UPDATE": errors.UnknownUpdate,
    "DIGEST_MISMATCH": errors.DigestMismatch,
    "FENCED": errors.Fenced,
    "LEASE_EXPIRED": errors.LeaseExpired,
    "UNKNOWN_LEASE": errors.UnknownLease,
    "RUN_ENDED": errors.RunEnded,
    "WRONG_UPDATE": errors.WrongUpdate,
    "NOT_PUBLISHED": errors.NotPublished,
    "COMMIT_CONFLICT": errors.CommitConflict,
    "LEASE_OUT": errors.LeaseOut,
    "INVALID_INPUT": errors.InvalidInput,
    "UNKNOWN_SAMPLE": errors.InvalidInput,
    "BEYOND_BOUND": errors.BeyondBound,
    "WRONG_VERSION": errors.WrongVersion,
    "VERSION_CONFLICT": errors.VersionConflict,
}


def to_error(refusal: Refusal) -> errors.MeshError:
    """The typed error a refusal stands for; its reason is kept also where a more general class carries it."""
    violations = [errors.FieldViolation(refusal.field, refusal.message)] if refusal.field else []
    error = BY_REASON[refusal.reason](refusal.message, violations=violations)
    error.reason = refusal.reason
    error.metadata = dict(refusal.metadata)
    return error
