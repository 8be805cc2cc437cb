"""Each condition has one class, one reason, one code, and survives the wire."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from google.rpc import code_pb2

from rollmesh.shared import errors
from rollmesh.shared.rpc.status import from_rpc_error, from_status, to_status
from rollmesh.shared.store.records import RecordError


def test_codes_agree_with_google_rpc_and_grpc() -> None:
    for code in errors.Code:
        assert code_pb2.Code.Value(code.name) == code.value
        assert grpc.StatusCode[code.name].value[0] == code.value


@pytest.mark.parametrize("cls", errors.CONDITIONS.values(), ids=lambda cls: cls.__name__)
def test_every_error_survives_the_round_trip(cls: type[errors.MeshError]) -> None:
    err = from_status(to_status(cls("what to do", retry_after_s=1.5, step=7)))
    assert type(err) is cls
    assert (err.message, err.retry_after_s, err.metadata, err.code) == ("what to do", 1.5, {"step": "7"}, cls.code)


def test_an_error_defined_beside_its_use_is_restored_too() -> None:
    err = from_status(to_status(RecordError.at(Path("tasks.jsonl"), 3, "is not a number", field="answer")))
    assert type(err) is RecordError
    assert err.message == 'tasks.jsonl:3: field "answer": is not a number'


def test_a_reason_of_a_newer_peer_becomes_the_class_of_its_code() -> None:
    status = to_status(errors.UnknownLease("gone"))
    status.details[0].value = status.details[0].value.replace(b"UNKNOWN_LEASE", b"UNKNOWN_MOOSE")
    err = from_status(status)
    assert type(err) is errors.NotFound
    assert err.reason == "UNKNOWN_MOOSE"


@pytest.mark.parametrize(
    ("code", "details", "sent_to", "expected"),
    [
        (grpc.StatusCode.INTERNAL, "Internal error from Core", "", errors.Unavailable),
        (grpc.StatusCode.INTERNAL, "Internal error from Core", "h:1", errors.ConnectionLost),
        (grpc.StatusCode.INTERNAL, "Exception deserializing response!", "h:1", errors.Internal),
        (grpc.StatusCode.UNAVAILABLE, "Socket closed", "", errors.Unavailable),
        (grpc.StatusCode.UNAVAILABLE, "Socket closed", "h:1", errors.ConnectionLost),
    ],
)
def test_what_grpc_reports_of_a_connection_is_retried_and_no_other_error_is(
    code: grpc.StatusCode, details: str, sent_to: str, expected: type[errors.MeshError]
) -> None:
    none = grpc.aio.Metadata()
    err = from_rpc_error(grpc.aio.AioRpcError(code, none, none, details, ""), sent_to)
    assert type(err) is expected
    assert err.code is expected.code
    assert err.retryable is (expected is not errors.Internal)
    assert "Internal error" not in str(err)
    assert err.metadata == ({"address": sent_to} if expected is errors.ConnectionLost else {})


def test_metadata_keys_of_a_peer_cannot_break_the_error() -> None:
    err = errors.Overloaded("full")
    err.metadata = {"message": "a", "retry_after_s": "b"}
    assert from_status(to_status(err)).metadata == {"message": "a", "retry_after_s": "b"}


def test_two_errors_of_one_code_cannot_share_a_reason() -> None:
    with pytest.raises(AssertionError, match="Other and StaleWeights share STALE_WEIGHTS"):
        type("Other", (errors.FailedPrecondition,), {"reason": "STALE_WEIGHTS"})
    assert errors.error_for("STALE_WEIGHTS", errors.Code.FAILED_PRECONDITION) is errors.StaleWeights


def test_the_code_decides_between_two_errors_of_one_reason() -> None:
    for cls in (errors.Draining, errors.NodeDraining, errors.UnknownSample, errors.UnleasedSample):
        assert errors.error_for(cls.reason, cls.code) is cls


@pytest.mark.parametrize(
    ("got", "shown"),
    [
        (None, "none"),
        (1.5, "1.5"),
        ("a b", "'a b'"),
        ("x" * 200, f"'{'x' * 99}... (202 characters)"),
        (ValueError("not a number"), "an error: not a number"),
        (errors.Phrase("3 bytes"), "3 bytes"),
    ],
)
def test_the_error_of_a_field_names_it_and_what_it_must_be(got: object, shown: str) -> None:
    err = errors.field_error("a.b", "be in [0, 1]", got, "lower it", of=errors.UnknownPolicy, limit=1)
    assert type(err) is errors.UnknownPolicy
    assert err.message == f"`a.b` must be in [0, 1], got {shown}; lower it"
    assert err.violations == (errors.FieldViolation("a.b", f"must be in [0, 1], got {shown}; lower it"),)
    assert err.metadata == {"limit": "1"}
    assert type(errors.field_error("a", "be set", got)) is errors.InvalidInput


def test_an_error_keeps_the_key_that_it_names() -> None:
    with pytest.raises(errors.ConfigError, match="^`inner`: wrong$") as inner, errors.located_at("outer"):
        raise errors.ConfigError("`inner`: wrong", key="inner")
    assert inner.value.metadata["key"] == "inner"
    with pytest.raises(errors.ConfigError, match="^`outer`: wrong$") as outer, errors.located_at("outer"):
        raise errors.InvalidInput("wrong")
    assert outer.value.metadata["key"] == "outer"
