"""A leased batch: what the lease says of each sample, with the episode that holds its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollmesh.v1 import run_pb2, types_pb2


@dataclass(frozen=True, slots=True)
class BatchSample:
    """One sample; messages of `rollmesh.v1`, arrays as little-endian bytes (`np.frombuffer(segment.token_ids, "<i4")`)."""

    leased: run_pb2.LeasedSample
    """Metadata, rewards, staleness, `mask_below_step`."""
    episode: types_pb2.Episode

    @property
    def sample_id(self) -> str:
        return self.leased.meta.sample_id

    def path(self) -> list[types_pb2.Segment]:
        """Its segments from the root to the leaf: the sample's tokens, in order."""
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
    """In the order of the lease."""
    unreadable: Mapping[str, str]
    """Reasons (PAYLOAD_LOST, METADATA_MISMATCH) by id of leased samples that cannot be trained on; `Trainer.commit` drops them."""
    groups: Sequence[types_pb2.GroupContext]
    """Rewards of every scored member of every group in the batch, trained or not: what a baseline is taken over."""
