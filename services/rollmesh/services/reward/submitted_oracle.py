"""The oracle of submitted tasks: the coordinator has their answer keys, in the ledger of their run.

An oracle resolves without waiting. So the service fetches the keys of a request before. Some of them are held here
for later requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from rollmesh.services.reward.item import AnswerKey
from rollmesh.services.reward.oracles import Oracle
from rollmesh.shared.errors import UnknownOracle
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.v1 import coordinator_pb2, coordinator_pb2_grpc, types_pb2

SCHEME = "submitted"
KEYS_HELD_MAX = 1024
"""Maximum number of keys that are held, the newest ones. The episodes of a group are scored one after the other. A
request has fewer."""
BYTES_HELD_MAX = 64 * 1024 * 1024
"""Maximum size of the keys that are held for later requests, bytes."""
CALL_S_MAX = 30.0


class FindsKeys(Protocol):
    """The source of answer keys: the coordinator."""

    async def find(self, refs: Sequence[str]) -> Sequence[types_pb2.AnswerKey]:
        """Return the keys of the first references, at least one. Raise UnknownOracle, or Unavailable."""


class CoordinatorKeys:
    """Asks the coordinator. Connects on the first call."""

    def __init__(self, coordinator: str, access: Access) -> None:
        self._channel = open_channel(coordinator, access=access)

    async def find(self, refs: Sequence[str]) -> Sequence[types_pb2.AnswerKey]:
        stub: coordinator_pb2_grpc.CoordinatorServiceAsyncStub = coordinator_pb2_grpc.CoordinatorServiceStub(
            self._channel
        )
        with typed_errors():
            answer = await stub.GetAnswerKeys(
                coordinator_pb2.GetAnswerKeysRequest(oracle_refs=refs), timeout=CALL_S_MAX
            )
        return answer.answer_keys

    async def close(self) -> None:
        await self._channel.close()


class SubmittedOracle(Oracle):
    """See the module. Without a source, outside a mesh, it knows no key."""

    def __init__(self, source: FindsKeys | None = None) -> None:
        self._source = source
        self._held: dict[str, tuple[AnswerKey, int]] = {}
        """Key and size by reference, the newest last."""
        self._num_bytes = 0

    def resolve(self, rest: str) -> AnswerKey:
        raise UnknownOracle(
            f"oracle `{SCHEME}:{rest[:200]}`: only the mesh to which the task was submitted has its answer key",
            oracle_ref=f"{SCHEME}:{rest}",
        )

    async def fetch(self, rests: Sequence[str]) -> dict[str, AnswerKey]:
        """Return the keys of these references, and hold them for later requests; drop the oldest beyond the limits."""
        found = {rest: self._held[rest] for rest in rests if rest in self._held}
        missing = [rest for rest in rests if rest not in found]
        while missing and self._source is not None:
            keys = await self._source.find([f"{SCHEME}:{rest}" for rest in missing])
            found |= {rest: (_answer_key(key), key.ByteSize()) for rest, key in zip(missing, keys, strict=False)}
            missing = missing[len(keys) :]
        for rest, held in found.items():
            self._drop(rest)
            self._held[rest] = held
            self._num_bytes += held[1]
        while len(self._held) > KEYS_HELD_MAX or self._num_bytes > BYTES_HELD_MAX:
            self._drop(next(iter(self._held)))
        return {rest: key for rest, (key, _) in found.items()}

    def _drop(self, rest: str) -> None:
        if rest in self._held:
            self._num_bytes -= self._held.pop(rest)[1]


def _answer_key(key: types_pb2.AnswerKey) -> AnswerKey:
    tests = msgspec.json.decode(key.tests) if key.tests.lstrip().startswith("{") else key.tests
    record = msgspec.json.decode(key.record) if key.record else {}
    return AnswerKey(answers=tuple(key.answers), tests=tests, record=record)
