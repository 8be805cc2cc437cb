"""The parts that the mesh gives to the live page: the history of a sample names the record that cannot be read."""

from __future__ import annotations

import pytest

from rollmesh.mesh import live_page
from rollmesh.services.coordinator.fact_codec import encode_record
from rollmesh.shared.bus.bus import StreamRecord
from rollmesh.shared.errors import InvalidInput
from rollmesh.v1 import events_pb2

GOOD = encode_record("d1", 1.0, ())
SPEC = events_pb2.RunSpec(run="r", beyond=events_pb2.BOUND_POLICY_DROP, batch_groups=0)
OUT_OF_RANGE = events_pb2.LedgerRecord(
    record_id="d2", facts=[events_pb2.Fact(run_created=events_pb2.RunCreated(spec=SPEC))]
).SerializeToString()


@pytest.mark.parametrize(
    ("payload", "cause"),
    [(b"\xff", "cannot decode a LedgerRecord from 1 bytes"), (OUT_OF_RANGE, "`spec.batch_groups` must be in")],
    ids=["garbage", "out-of-range"],
)
def test_the_history_names_a_record_that_cannot_be_read(payload: bytes, cause: str) -> None:
    records = [StreamRecord(seq=6, payload=GOOD, msg_id="d1"), StreamRecord(seq=7, payload=payload, msg_id="d2")]
    assert live_page._history(records[:1], "g0.0-0") == []
    with pytest.raises(InvalidInput, match=f"ledger record 7 cannot be decoded: {cause}"):
        live_page._history(records, "g0.0-0")
