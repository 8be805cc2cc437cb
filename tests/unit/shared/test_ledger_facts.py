"""The facts of a record as messages, also of a record that a later release wrote."""

from __future__ import annotations

from rollmesh.shared.domain.ledger_facts import facts_of
from rollmesh.v1 import events_pb2


def test_facts_come_in_order_and_one_of_a_later_release_is_skipped() -> None:
    newer = events_pb2.Fact.FromString(b"\xa2\x06\x00")  # field 100, an empty message
    ended = events_pb2.RunEnded(reason="STOPPED")
    spec = events_pb2.RunCreated(spec=events_pb2.RunSpec(run="r"))
    record = events_pb2.LedgerRecord(facts=[events_pb2.Fact(run_created=spec), newer, events_pb2.Fact(run_ended=ended)])
    assert list(facts_of(record)) == [spec, ended]
