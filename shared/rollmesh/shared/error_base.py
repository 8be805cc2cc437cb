"""The base of all typed errors, and one class per status code. Users import `rollmesh.shared.errors`, which has the conditions too.

A subclass registers itself by its reason: `BY_REASON` is the table by which a client finds the class of an error it was sent.
This module imports no networking, so that pure code can raise its errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import ClassVar, NamedTuple

DOMAIN = "rollmesh"
MESSAGE_CHARS_MAX = 8_192
"""Longest message kept. Requests bring texts of any length, and a message that quotes one must not keep all of it."""
METADATA_CHARS_MAX = 1_024
"""Longest value of the metadata kept."""


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
        message = message[:MESSAGE_CHARS_MAX]
        super().__init__(message)
        self.message = message
        self.retry_after_s = self.retry_after_s_default if retry_after_s is None else retry_after_s
        self.violations = tuple(
            FieldViolation(v.field[:METADATA_CHARS_MAX], v.description[:METADATA_CHARS_MAX]) for v in violations
        )
        self.metadata = {key: str(value)[:METADATA_CHARS_MAX] for key, value in metadata.items()}

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
