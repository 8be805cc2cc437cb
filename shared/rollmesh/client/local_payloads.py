"""Read the episodes of a lease from the payload files of this host, at the positions that the lease names.

It saves the path through the gateway and changes nothing else: each episode is compared with the lease. An episode that
is not in a file, that cannot be read, or that contradicts the lease is left to `FetchSamples`, which also records why
it is unreadable.
"""

from __future__ import annotations

import logging

from google.protobuf.message import DecodeError

from rollmesh.client.batch import BatchAssembler, BatchLease
from rollmesh.shared.store.payload_files import NoPayloadFile, PayloadFiles, UnreadableRecord, in_file
from rollmesh.v1 import run_pb2, types_pb2

_log = logging.getLogger(__name__)


def add_local(batch: BatchAssembler, lease: BatchLease, files: PayloadFiles) -> None:
    """Add the episodes that are in files to a batch. Blocks for as long as the disk does."""
    names: dict[int, list[str]] = {}
    for sample in lease.samples:
        if in_file(sample.payload.sequence):
            names.setdefault(sample.payload.sequence, []).append(sample.meta.sample_id)
    for sequence, sample_ids in names.items():
        try:
            episode = types_pb2.Episode.FromString(files.read(sequence))
        except (NoPayloadFile, UnreadableRecord, DecodeError) as error:
            _log.warning("cannot read a payload file, will call the gateway: samples=%s cause=%s", sample_ids, error)
        else:
            batch.add_ahead(run_pb2.PrefetchSamplesResponse(sample_ids=sample_ids, episode=episode))
