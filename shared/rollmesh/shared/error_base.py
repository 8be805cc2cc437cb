"""The base of all typed errors, and one class per status code. Users import `rollmesh.shared.errors`, which has the
conditions too.

A subclass registers itself by its reason and code: `CONDITIONS` is the table in which a client finds the class of a
received error. One reason may have several codes, such as DRAINING of a node that is called and of one that calls. This
module imports no networking, so that pure code can raise its errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import ClassVar, NamedTuple

DOMAIN = "rollmesh"
MESSAGE_CHARS_MAX = 8_192
"""Maximum length of a message, in characters. A message may quote a text of a request, which has any length."""
METADATA_CHARS_MAX = 1_024
"""Maximum length of a metadata value, in characters."""


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
    """One wrong field of a request: its dotted path and the error."""

    field: str
    description: str


CONDITIONS: dict[tuple[str, Code], type[MeshError]] = {}
"""Every error class by its reason and code. Filled by `MeshError.__init_subclass__`."""


class MeshError(Exception):
    """Base of all errors that cross a boundary of the mesh.

    `message` is for display and ends with the remedy. Keyword arguments become `metadata`: short facts, converted to
    strings.
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
        other = CONDITIONS.setdefault((cls.reason, cls.code), cls)
        assert other is cls, f"{cls.__name__} and {other.__name__} share {cls.reason} ({cls.code.name})"

    @property
    def retryable(self) -> bool:
        """Return whether the same request may succeed later or elsewhere."""
        return self.code in (Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED) or self.retry_after_s is not None

    def __str__(self) -> str:
        return self.message


def error_for(reason: str, code: Code) -> type[MeshError]:
    """Return the class of `reason` with this code, else the class of `code`, because a peer may be newer than this
    process."""
    return CONDITIONS.get((reason, code)) or BY_CODE.get(code, Internal)


# One class per code ---------------------------------------------------------------------------------------------------


class Internal(MeshError):
    """The peer has a bug; its log contains the traceback."""

    reason = "INTERNAL"


class InvalidInput(MeshError):
    """The request is invalid and can never succeed; `violations` name the fields."""

    reason = "INVALID_INPUT"
    code = Code.INVALID_ARGUMENT


class NotFound(MeshError):
    """Something named in the request does not exist."""

    reason = "NOT_FOUND"
    code = Code.NOT_FOUND


class AlreadyExists(MeshError):
    """The name is already in use."""

    reason = "ALREADY_EXISTS"
    code = Code.ALREADY_EXISTS


class FailedPrecondition(MeshError):
    """The state of the system forbids the request; change that state before sending it again."""

    reason = "FAILED_PRECONDITION"
    code = Code.FAILED_PRECONDITION


class Aborted(MeshError):
    """A concurrent request won; retry from current state."""

    reason = "ABORTED"
    code = Code.ABORTED


class OutOfRange(MeshError):
    """The position is past the end."""

    reason = "EXHAUSTED"
    code = Code.OUT_OF_RANGE


class ResourceExhausted(MeshError):
    """A limit is reached; free something or wait."""

    reason = "RESOURCE_EXHAUSTED"
    code = Code.RESOURCE_EXHAUSTED


class Unavailable(MeshError):
    """The service is unavailable; retry after `retry_after_s`, or elsewhere."""

    reason = "UNAVAILABLE"
    code = Code.UNAVAILABLE
    retry_after_s_default = 1.0


class DeadlineExceeded(MeshError):
    """No response within the deadline; the request may or may not have been executed."""

    reason = "DEADLINE_EXCEEDED"
    code = Code.DEADLINE_EXCEEDED


class Cancelled(MeshError):
    """The peer cancelled the call."""

    reason = "CANCELLED"
    code = Code.CANCELLED


class DataLoss(MeshError):
    """Data is damaged beyond repair."""

    reason = "DATA_LOSS"
    code = Code.DATA_LOSS


class Unauthenticated(MeshError):
    """The token is missing or wrong."""

    reason = "UNAUTHENTICATED"
    code = Code.UNAUTHENTICATED


class PermissionDenied(MeshError):
    """The caller is authenticated but not permitted to do this."""

    reason = "PERMISSION_DENIED"
    code = Code.PERMISSION_DENIED


class Unimplemented(MeshError):
    """The method exists in the contract but not in this server."""

    reason = "UNIMPLEMENTED"
    code = Code.UNIMPLEMENTED


BY_CODE: dict[Code, type[MeshError]] = {cls.code: cls for cls in MeshError.__subclasses__()}
"""Class of each code, for reasons that this process does not know."""
