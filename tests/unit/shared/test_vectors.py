"""The test vectors beside run.proto agree with the code."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from rollmesh.shared.codec.trajectory import decode_segment, encode_segment
from rollmesh.shared.domain.digest import INITIAL_DIGEST, next_digest
from rollmesh.v1 import types_pb2

VECTORS = json.loads((Path(__file__).parents[3] / "protos/rollmesh/v1/vectors.json").read_text())


def test_digests_follow_from_the_used_samples() -> None:
    digest = INITIAL_DIGEST
    for vector in VECTORS["digests"]:
        digest = next_digest(digest, vector["update"], vector["used"])
        assert digest == vector["digest"]


def test_segment_has_the_listed_fields_and_the_bytes() -> None:
    vector = VECTORS["segment"]
    data = bytes.fromhex(vector["hex"])
    message = types_pb2.Segment(
        parent=vector["parent"],
        role=types_pb2.SegmentRole.Value(vector["role"]),
        source=types_pb2.SegmentSource.Value(vector["source"]),
        token_ids=struct.pack("<3i", *vector["token_ids"]),
        logprobs=struct.pack("<3f", *vector["logprobs"]),
        loss_mask=bytes(vector["loss_mask"]),
        version=types_pb2.PolicyVersion(**vector["version"]),
        kv_step_oldest=vector["kv_step_oldest"],
        sampling=vector["sampling"],
        finish=types_pb2.FinishReason.Value(vector["finish"]),
    )
    assert message.SerializeToString(deterministic=True) == data
    known = decode_segment(types_pb2.Segment.FromString(data))
    assert encode_segment(known).SerializeToString(deterministic=True) == data
