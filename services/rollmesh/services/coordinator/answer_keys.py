"""Read the answer keys of submitted tasks from the ledger, for the reward service.

A ledger is the only place of a key. The reference of its task names the run, the position of the record, and a random
part that distinguishes ledgers of runs with the same name, so that the key is found without an index.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rollmesh.services.coordinator.core.state import SUBMITTED_SCHEME
from rollmesh.shared.bus.archive_bus import open_ledger
from rollmesh.shared.bus.bus import Bus, UnknownRecord, UnknownStream
from rollmesh.shared.domain.ledger_facts import facts_of, read_record
from rollmesh.shared.errors import InvalidInput, MeshError, UnknownOracle, field_error
from rollmesh.shared.store.sized_cache import SizedCache
from rollmesh.v1 import events_pb2, types_pb2

REFS_MAX = 256
_SUBMISSIONS = (events_pb2.TasksSubmitted, events_pb2.SamplesSubmitted)
_POSITION = re.compile(r"[1-9][0-9]{0,17}")
"""Sequences of a stream, which begin at 1."""
BYTES_MAX = 4 * 1024 * 1024
"""Maximum size of the keys of a response, bytes. One larger key is returned alone."""

KEPT_BYTES_MAX = 8 * 1024 * 1024
"""Maximum size of the submissions whose keys are kept, bytes. Tasks are drawn in order, so that requests name few of
them."""


class AnswerKeys:
    """Finds the keys of all runs on a bus."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._newest: SizedCache[str, dict[str, types_pb2.AnswerKey]] = SizedCache(KEPT_BYTES_MAX)
        """Keys of the submissions that were read last."""

    async def find(self, refs: Sequence[str]) -> list[types_pb2.AnswerKey]:
        """Return the keys in the order of the references, as many as fit. Raises UnknownOracle."""
        if not 1 <= len(refs) <= REFS_MAX:
            raise field_error("oracle_refs", f"have 1 to {REFS_MAX} entries", len(refs))
        found: list[types_pb2.AnswerKey] = []
        num_bytes = 0
        for ref in refs:
            place, _, task_id = ref.partition(":")[2].rpartition("/")
            keys = await self._of_submission(ref, place)
            if task_id not in keys:
                raise _unknown(ref, f"this submission has no answer key of task `{task_id[:100]}`")
            num_bytes += keys[task_id].ByteSize()
            if found and num_bytes > BYTES_MAX:
                break
            found.append(keys[task_id])
        return found

    async def _of_submission(self, ref: str, place: str) -> dict[str, types_pb2.AnswerKey]:
        if (kept := self._newest.get(place)) is not None:
            return kept
        run, _, submission = place.partition("/")
        position = submission.partition("-")[0]
        if not ref.startswith(f"{SUBMITTED_SCHEME}:") or not _POSITION.fullmatch(position):
            raise _unknown(ref, f"expected {SUBMITTED_SCHEME}:RUN/POSITION-RANDOM/TASK_ID")
        for fact in await self._facts(ref, run, int(position)):
            if isinstance(fact, _SUBMISSIONS) and fact.submission == submission:
                keys = {key.task_id: key for key in fact.answer_keys}
                if self._newest.get(place) is None:  # another call may have read it
                    self._newest.put(place, keys, fact.ByteSize())
                return keys
        raise _unknown(ref, f"record {position} of run `{run}` is not this submission")

    async def _facts(self, ref: str, run: str, position: int) -> Iterator[object]:
        try:
            ledger = await open_ledger(self._bus, run)
            record = await ledger.read(position)
        except (InvalidInput, UnknownStream, UnknownRecord) as error:
            raise _unknown(ref, str(error)) from error
        return facts_of(read_record(record.payload, run, position))


def _unknown(ref: str, cause: str) -> MeshError:
    return UnknownOracle(f"oracle `{ref[:200]}`: {cause}", oracle_ref=ref)
