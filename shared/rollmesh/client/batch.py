"""A leased batch: the metadata of the lease, joined with the episodes that hold the tokens."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from rollmesh.shared.codec.metadata import check_leased
from rollmesh.shared.errors import MetadataMismatch, PayloadLost
from rollmesh.v1 import run_pb2, types_pb2

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLease:
    """The permission to train one update on a batch. `Trainer.fetch` loads the episodes."""

    update: int
    lease_id: str
    samples: Sequence[run_pb2.LeasedSample]
    groups: Sequence[types_pb2.GroupContext]
    """Rewards of every scored member of every group in the batch, trained or not: the data for a baseline."""


@dataclass(frozen=True, slots=True)
class BatchSample:
    """One sample; messages of `rollmesh.v1`, arrays as little-endian bytes (`np.frombuffer(segment.token_ids,
    "<i4")`)."""

    leased: run_pb2.LeasedSample
    """Metadata, rewards, staleness, `mask_below_step`."""
    episode: types_pb2.Episode

    @property
    def sample_id(self) -> str:
        return self.leased.meta.sample_id

    def path(self) -> list[types_pb2.Segment]:
        """Return its segments from the root to the leaf: the tokens of the sample, in order."""
        found, at = [], self.leased.meta.leaf
        while at >= 0:
            found.append(self.episode.segments[at])
            at = found[-1].parent
        return found[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The batch of one update."""

    update: int
    lease_id: str
    samples: Sequence[BatchSample]
    """Samples in the order of the lease."""
    unreadable: Mapping[str, str]
    """Reasons (PAYLOAD_LOST, METADATA_MISMATCH) by id of leased samples that cannot be trained on; `Trainer.commit`
    drops them."""
    groups: Sequence[types_pb2.GroupContext]
    """As in `BatchLease`."""


class BatchAssembler:
    """Joins a lease with the messages of one FetchSamples call, which may arrive in any order."""

    def __init__(self, lease: BatchLease) -> None:
        self._lease = lease
        self._leased = {sample.meta.sample_id: sample for sample in lease.samples}
        self._found: dict[str, BatchSample] = {}
        self._unreadable: dict[str, str] = {}

    def add(self, message: run_pb2.FetchSamplesResponse) -> None:
        """Add one episode. Samples of it that are not leased are ignored.

        An episode that contradicts the metadata of a leased sample is unreadable, even if the gateway did not notice.
        """
        names = [name for name in message.sample_ids if name in self._leased]
        reason, cause = message.failure.reason, message.failure.message
        if not message.HasField("failure"):
            try:
                for name in names:
                    check_leased(message.episode, self._leased[name])
            except MetadataMismatch as error:
                reason, cause = error.reason, error.message
            else:
                self._found.update({name: BatchSample(self._leased[name], message.episode) for name in names})
                return
        self._unreadable.update(dict.fromkeys(names, reason or "UNREADABLE"))
        _log.warning("samples are unreadable and will be dropped: ids=%s reason=%s cause=%s", names, reason, cause)

    def add_ahead(self, message: run_pb2.PrefetchSamplesResponse) -> None:
        """Add one episode that was loaded before the lease. One that contradicts the lease is omitted, hence fetched
        again."""
        names = [name for name in message.sample_ids if name in self._leased]
        with suppress(MetadataMismatch):
            for name in names:
                check_leased(message.episode, self._leased[name])
            self._found.update({name: BatchSample(self._leased[name], message.episode) for name in names})

    def missing(self) -> list[str]:
        """Return the leased samples that did not arrive yet."""
        return [name for name in self._leased if name not in self._found and name not in self._unreadable]

    def finish(self) -> Batch:
        """Return the batch in the order of the lease. Raises `PayloadLost` if a sample did not arrive."""
        names = list(self._leased)
        if missing := self.missing():
            raise PayloadLost(
                f"{len(missing)} leased samples did not arrive, first {missing[0]}; release the batch and lease again",
                sample_id=missing[0],
            )
        return Batch(
            update=self._lease.update,
            lease_id=self._lease.lease_id,
            samples=[self._found[name] for name in names if name in self._found],
            unreadable=self._unreadable,
            groups=self._lease.groups,
        )
