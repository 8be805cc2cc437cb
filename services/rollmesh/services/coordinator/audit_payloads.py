"""Check that every scored episode has its own payload, and that the metadata in the ledger agrees with the engine's
stamps in it.

The bound is proven from `SampleMeta.steps`, which a worker reported. Only the comparison with the payloads verifies
this report. Payloads of ended samples are purged, so a comparison covers only the remaining ones. Records that a
coordinator before protocol 1.1 wrote have no numbers of trained tokens of other sources, so these are not compared, but
counted.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from google.protobuf.message import DecodeError

from rollmesh.services.coordinator.audit_repeats import Repeats, key_of
from rollmesh.services.coordinator.audit_report import Complain, PayloadCounts
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.fact_codec import encode
from rollmesh.shared.bus.bus import Bus, BusUnavailable, StreamLog, UnknownRecord, UnknownStream
from rollmesh.shared.bus.payload_bus import SampleStream, WrongHost
from rollmesh.shared.codec.metadata import check_key, check_leased, sample_meta
from rollmesh.shared.domain.formats import NewerFormat
from rollmesh.shared.domain.protocol import PROTOCOL, ProtocolVersion
from rollmesh.shared.errors import MetadataMismatch
from rollmesh.shared.store.payload_files import UnreadableRecord, file_of, in_file
from rollmesh.v1 import run_pb2, types_pb2

READS_MAX = 16
"""Number of payloads that are read at once."""
_EXTERNAL_SINCE = ProtocolVersion(major=1, minor=1)
"""The protocol that added `SampleMeta.external`."""


class _Scored(NamedTuple):
    """An episode, and the record with its score."""

    fact: f.EpisodeScored
    position: int
    key: types_pb2.EpisodeKey
    protocol: ProtocolVersion


class Payloads:
    """The payload references of a run. `complain` receives violations."""

    def __init__(self, complain: Complain, *, keep: bool = False) -> None:
        """`keep`: keep what `compare` needs of every episode in memory."""
        self._complain = complain
        self._keep = keep
        self._sequences = Repeats()
        """Payloads of all scored episodes."""
        self._scored: dict[int, _Scored] = {}
        """Scored episodes by the sequence of their payloads, if they are kept."""
        self._num_unreported = 0
        """Compared samples that train tokens of other sources, in records that cannot report them."""
        self._run = ""
        self._tasks: dict[str, str] = {}
        """Task ids by group."""
        self._attempts: dict[str, int] = {}
        """Newest attempts of episodes that are not scored."""

    def enter(self, fact: f.Fact, position: int, protocol: ProtocolVersion = PROTOCOL) -> None:
        """Fold one fact of the record at `position`, which a coordinator of this protocol wrote."""
        if isinstance(fact, f.RunCreated):
            self._run = fact.spec.run
        elif isinstance(fact, f.GroupReserved) and self._keep:
            self._tasks[fact.group] = fact.task.task_id
        elif isinstance(fact, f.EpisodeLeased) and self._keep:
            self._attempts[fact.episode] = fact.attempt
        elif isinstance(fact, f.EpisodeScored):
            self._score(fact, position, protocol)

    def _score(self, fact: f.EpisodeScored, position: int, protocol: ProtocolVersion) -> None:
        sequence = fact.payload.sequence
        if sequence < 1:
            self._complain("payloads", f"episode {fact.episode} was scored without a payload")
            return
        self._sequences.add(sequence, position, key_of(fact.episode))
        if not self._keep:
            return
        key = types_pb2.EpisodeKey(
            run=self._run,
            task=self._tasks.get(fact.group, ""),
            group=fact.group,
            episode=fact.episode,
            attempt=self._attempts.pop(fact.episode, 0),
        )
        self._scored.setdefault(sequence, _Scored(fact, position, key, protocol))

    def finish(self) -> None:
        """Report payloads of several episodes, when all facts are entered."""
        for repeat in self._sequences.found():
            what = f"an episode has payload {repeat.key}, which belongs to an episode of record {repeat.first_position}"
            self._complain("payloads", what, repeat.position)

    async def compare(self, bus: Bus, stream: str) -> PayloadCounts:
        """Compare every payload in the sample stream with its reported metadata."""
        try:
            log = await bus.open(stream)
            info = await log.info()
            there = sorted(sequence for sequence in self._scored if sequence >= info.first_seq)
            files = log.files if isinstance(log, SampleStream) else None
            newest_file = max(await asyncio.to_thread(files.sizes), default=0) if files else 0
            found: list[bool] = []
            for at in range(0, len(there), READS_MAX):
                some = there[at : at + READS_MAX]
                found += await asyncio.gather(*(self._check(log, n, info.last_seq, newest_file) for n in some))
        except UnknownStream:
            return PayloadCounts(compared=0, purged=len(self._scored))
        except BusUnavailable as error:
            self._complain("payloads", f"{error.message}; the payloads could not be compared", 0)
            return PayloadCounts(compared=0, purged=0)
        compared = sum(found)
        return PayloadCounts(
            compared=compared, purged=len(self._scored) - compared, external_unreported=self._num_unreported
        )

    async def _check(self, log: StreamLog, sequence: int, last_seq: int, newest_file: int) -> bool:
        """Return whether the payload exists."""
        scored = self._scored[sequence]
        fact, position = scored.fact, scored.position
        try:
            payload = (await log.read_direct(sequence)).payload
        except (NewerFormat, UnreadableRecord, WrongHost) as error:
            self._complain(
                "payloads", f"the payload of episode {fact.episode} cannot be read: {error.message}", position
            )
            return True
        except UnknownRecord:
            what = ""
            if in_file(sequence):
                if 0 < newest_file < file_of(sequence):
                    what = f"payload {sequence} in file {file_of(sequence)}, but the newest file is {newest_file}"
            elif sequence > last_seq:
                what = f"payload {sequence}, but {log.name} ends at {last_seq}"
            if what:
                self._complain("payloads", f"episode {fact.episode} has {what}", position)
            return False
        try:
            self._compare(scored, types_pb2.Episode.FromString(payload), len(payload))
        except DecodeError:
            what = f"record {sequence} of {log.name} is not an episode: {len(payload)} bytes"
            self._complain("payloads", f"the payload of episode {fact.episode} cannot be read: {what}", position)
        except MetadataMismatch as error:
            self._complain("payloads", error.message, position)
        return True

    def _compare(self, scored: _Scored, episode: types_pb2.Episode, num_bytes: int) -> None:
        """Compare metadata and payload. Raises MetadataMismatch for the first difference."""
        fact, key = scored.fact, scored.key
        if fact.payload.size_bytes != num_bytes:
            raise MetadataMismatch(
                f"payload {fact.payload.sequence} of episode {fact.episode}: the ledger says `size_bytes` "
                f"{fact.payload.size_bytes}, the payload has {num_bytes}"
            )
        check_key(episode, key)
        for meta in fact.samples:
            encoded = encode(meta, types_pb2.SampleMeta)
            if scored.protocol < _EXTERNAL_SINCE and not encoded.external:
                for sample in episode.samples:
                    if sample.sample_id == meta.sample_id:
                        encoded.external.extend(sample_meta(episode, sample).external)
                self._num_unreported += bool(encoded.external)
            check_leased(episode, run_pb2.LeasedSample(meta=encoded, key=key, rewards_as_reported=True))
