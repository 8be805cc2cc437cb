"""Errors inside longer replies: `MeshError` to `rollmesh.v1.Failure` and back, with the words of an error status."""

from __future__ import annotations

from rollmesh.shared.errors import Code, MeshError, error_for
from rollmesh.v1 import types_pb2


def encode_failure(err: MeshError) -> types_pb2.Failure:
    return types_pb2.Failure(
        code=err.code.value,
        reason=err.reason,
        message=err.message,
        metadata=err.metadata,
        retry_after_s=err.retry_after_s or 0.0,
    )


def decode_failure(failure: types_pb2.Failure) -> MeshError:
    """The typed error; a peer may be newer than we are, so an unknown reason becomes the class of its code."""
    try:
        code = Code(failure.code)
    except ValueError:
        code = Code.UNKNOWN
    err = error_for(failure.reason, code)(failure.message or failure.reason or "no reason given")
    err.retry_after_s = failure.retry_after_s or None
    err.metadata = dict(failure.metadata)
    return err
