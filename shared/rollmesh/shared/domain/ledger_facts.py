"""Read the facts of a ledger record as typed messages, for the coordinator and for every service that follows a ledger.

A reader matches the class of a fact (`case events_pb2.GroupReserved()`), so that the type checker finds a misspelled
one. What a fact means for a run is defined by the coordinator's `apply`; other readers fold only what they show or draw
by.
"""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.message import DecodeError, Message

from rollmesh.shared.domain.formats import check_format
from rollmesh.shared.domain.ledger_head import RECORD_FORMAT
from rollmesh.shared.errors import DataLoss
from rollmesh.v1 import events_pb2


def read_record(payload: bytes, run: str, position: int) -> events_pb2.LedgerRecord:
    """Return the record of a run's ledger that the bytes contain. Raises DataLoss if they are not one, and NewerFormat
    for one of a later release."""
    what = f"ledger record {position} of {run}"
    try:
        record = events_pb2.LedgerRecord.FromString(payload)
    except DecodeError as error:
        raise DataLoss(f"{what} cannot be read: {error}; audit the run", seq=position) from error
    check_format(what, record.format, RECORD_FORMAT)
    return record


def fact_of(fact: events_pb2.Fact) -> Message | None:
    """Return the message that is set in a fact; None for a fact of a later release."""
    name = fact.WhichOneof("fact")
    message: Message | None = None if name is None else getattr(fact, name)
    return message


def facts_of(record: events_pb2.LedgerRecord) -> Iterator[Message]:
    """Yield the facts of a record that this release knows, in their order."""
    return (known for fact in record.facts if (known := fact_of(fact)) is not None)
