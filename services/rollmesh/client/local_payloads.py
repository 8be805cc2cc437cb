"""Read the episodes of a lease from the payload files of this host, at the positions that the lease names.

It saves the way through the gateway and changes nothing else: the same comparison with the lease follows. A payload that is not in a
file, or that cannot be read, is left to `FetchSamples`, which also records why it is unreadable.
"""

from __future__ import annotations

import logging

from google.protobuf.message import DecodeError

from rollmesh.client.batch import Batch, BatchAssembler, BatchLease
from rollmesh.shared.bus.payload_files import PayloadFiles, UnreadableRecord, in_file
from rollmesh.v1 import run_pb2

_log = logging.getLogger(__name__)


def read_local(files: PayloadFiles, lease: BatchLease) -> Batch | None:
    """Return the batch of a lease, or None if one of its payloads cannot be read here. Blocks for as long as the disk does."""
    names: dict[int, list[str]] = {}
    for sample in lease.samples:
        names.setdefault(sample.payload.sequence, []).append(sample.meta.sample_id)
    batch = BatchAssembler(lease)
    for sequence, sample_ids in names.items():
        if not in_file(sequence):
            return None
        message = run_pb2.FetchSamplesResponse(sample_ids=sample_ids)
        try:
            message.episode.ParseFromString(files.read(sequence))
        except (UnreadableRecord, DecodeError) as error:
            _log.warning("cannot read a payload file, will ask the gateway: samples=%s cause=%s", sample_ids, error)
            return None
        if not batch.add(message):
            return None
    return batch.finish()
