"""Convert typed errors to `google.rpc.Status` and back. Only this module defines the wire format of errors.

A status carries ErrorInfo (domain `rollmesh`, reason, metadata), RetryInfo where waiting helps, and BadRequest where
fields are wrong, in the `grpc-status-details-bin` trailer. The class is restored by its reason, so `except
StaleWeights` works on both sides. Errors that gRPC itself raises (no ErrorInfo) become the class of their code, except
one that stands for any status (`_STATUS_LOST`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from rollmesh.shared.errors import (
    DOMAIN,
    Code,
    ConnectionLost,
    FieldViolation,
    MeshError,
    Overloaded,
    PayloadTooLarge,
    error_for,
)

MESSAGE_CHARS_MAX = 1500
"""Trailers share one 8 KiB metadata budget, which contains the message twice; beyond it the call fails with another
error."""
METADATA_CHARS_MAX = 200
_STATUS_LOST = "Internal error from Core"
"""Details that grpc.aio sets in place of the status of a call whose client was writing when the call ended."""


def to_status(err: MeshError) -> status_pb2.Status:
    """Return `err` as a status with details. Long texts are cut, see `MESSAGE_CHARS_MAX`."""
    metadata = {key: value[:METADATA_CHARS_MAX] for key, value in list(err.metadata.items())[:10]}
    details: list[Any] = [error_details_pb2.ErrorInfo(reason=err.reason, domain=DOMAIN, metadata=metadata)]
    if err.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(err.retry_after_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    if err.violations:
        details.append(_bad_request(err.violations))
    status = status_pb2.Status(code=err.code.value, message=err.message[:MESSAGE_CHARS_MAX])
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def from_status(status: status_pb2.Status) -> MeshError:
    """Return the typed error of a status; the class of its code if the reason is unknown here."""
    info, retry, bad = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo(), error_details_pb2.BadRequest()
    for detail in status.details:
        for message in (info, retry, bad):
            if detail.Is(message.DESCRIPTOR):
                detail.Unpack(message)
    return _build(
        Code(status.code),
        info.reason,
        status.message,
        dict(info.metadata),
        retry_after_s=retry.retry_delay.ToNanoseconds() / 1e9 if retry.HasField("retry_delay") else None,
        violations=[FieldViolation(v.field, v.description) for v in bad.field_violations],
    )


def from_rpc_error(err: grpc.aio.AioRpcError, sent_to: str = "") -> MeshError:
    """Return the typed error of a failed call, also if gRPC itself failed it. `sent_to` is the address that a connected
    channel sent it to."""
    call: Any = err  # grpc-stubs leave out code() and details()
    try:
        status = rpc_status.from_call(call)
    except ValueError:  # details of another status than the call's own: a proxy rewrote one of the two
        status = None
    if status is not None:
        return from_status(status)
    text = call.details() or ""
    code = call.code()
    if code is grpc.StatusCode.INTERNAL and text == _STATUS_LOST:
        # A write fails if the server ends a bidirectional call, or its connection breaks, during the write. Then
        # grpc.aio sets this status in place of the one that the server may have sent. It does not report a bug of the
        # server, so the caller retries, and gets the status of the server if the call fails again.
        code, text = grpc.StatusCode.UNAVAILABLE, "the call ended while a message was sent, and its status is not known"
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in text:
        return PayloadTooLarge(f"{text}; send less at once, or raise message_bytes_max on both sides")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "Concurrent RPC limit" in text:
        return Overloaded(f"{text}; retry later, or raise concurrent_rpcs_max")
    if sent_to and code is grpc.StatusCode.UNAVAILABLE:
        return ConnectionLost(
            f"the connection to {sent_to} was lost during the call ({text or code.name}); it may have been executed; "
            "see the log of that node if its process ended",
            address=sent_to,
        )
    return _build(Code[code.name], "", text or code.name, {}, retry_after_s=None, violations=[])


@contextmanager
def typed_errors(sent_to: str = "") -> Iterator[None]:
    """Wrap client calls: raise the `MeshError` of a failed call. `sent_to` is the result of
    `rpc.channel.connected_address`."""
    try:
        yield
    except grpc.aio.AioRpcError as err:
        raise from_rpc_error(err, sent_to) from err


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], err: MeshError) -> NoReturn:
    """End the call on the server with `err`'s status and details."""
    status: Any = rpc_status.to_status(to_status(err))
    try:
        await context.abort(status.code, status.details, status.trailing_metadata)
    except grpc.aio.AbortError as aborted:
        drop_tracebacks_later(aborted)
        raise
    raise AssertionError("abort returned")  # unreachable, for mypy


def drop_tracebacks_later(aborted: BaseException) -> None:
    """Drop the tracebacks of the error that ends this call, and of its causes, when the task of the call has ended.

    An error refers to its frames, these to the request and the call, and the call to the error that aborted it. Until
    the next garbage collection this cycle would keep a request of any size, and the call would count against the
    connection's limit.
    """
    task = asyncio.current_task()
    assert task is not None
    task.add_done_callback(lambda _: _drop_tracebacks(aborted))


def _drop_tracebacks(error: BaseException | None) -> None:
    pending, seen = [error], set[int]()
    while pending:
        one = pending.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            pending += [one.__cause__, one.__context__]


def _build(
    code: Code,
    reason: str,
    message: str,
    metadata: dict[str, str],
    *,
    retry_after_s: float | None,
    violations: list[FieldViolation],
) -> MeshError:
    err = error_for(reason, code)(message, retry_after_s=retry_after_s, violations=violations)
    # Set, not passed: keys come from the peer and could collide with parameter names.
    err.metadata = metadata
    err.code = code
    err.reason = reason or err.reason
    return err


def _bad_request(violations: tuple[FieldViolation, ...]) -> error_details_pb2.BadRequest:
    entry = error_details_pb2.BadRequest.FieldViolation
    cut = [
        entry(field=v.field[:METADATA_CHARS_MAX], description=v.description[:METADATA_CHARS_MAX]) for v in violations
    ]
    return error_details_pb2.BadRequest(field_violations=cut[:5])
