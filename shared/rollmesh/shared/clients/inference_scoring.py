"""Score given tokens at the inference nodes: in parts that fit a message and share the nodes with generation, never
under a mix of versions.

The first part decides the version, and the others are sent to nodes that serve exactly this one. If the weights change
in between, all parts are sent again. Scoring is repeatable, so a failed call goes to another node, like a failed
generation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from msgspec.structs import replace

from rollmesh.shared.clients.generated import ScoredTokens, Target
from rollmesh.shared.clients.inference_nodes import NodePool, RoutedRequest
from rollmesh.shared.codec.arrays import decode_array, decode_floats, encode_ints
from rollmesh.shared.codec.trajectory import decode_version
from rollmesh.shared.domain.outputs import array_names
from rollmesh.shared.domain.trajectory import IntArray
from rollmesh.shared.errors import (
    DeadlineExceeded,
    EngineFailed,
    InvalidInput,
    MeshError,
    PayloadTooLarge,
    StaleWeights,
)
from rollmesh.v1 import coordinator_pb2, inference_pb2

_RESTARTS_MAX = 4
"""Changes of the weights between the parts of one request after which it fails. Such a request takes longer than an
update."""
_GRACE_S = 1.0
"""The deadline of a call is later than that of the request by this time, so that the latter ends the request, with its
state."""


@dataclass(slots=True, kw_only=True)
class ScoringRequest(RoutedRequest):
    """One call."""

    purpose: ClassVar[str] = "a scoring call"

    def offered(self, can: coordinator_pb2.EngineCapabilities) -> Collection[str]:
        return can.score_outputs

    def lacking(self, can: coordinator_pb2.EngineCapabilities) -> Collection[str]:
        return RoutedRequest.lacking(self, can) if can.scores else {"score"}


class Scoring:
    """The calls for the sequences of one caller."""

    def __init__(
        self, pool: NodePool, *, outputs: tuple[str, ...], num_top: int, deadline_s: float, tokens_max: int
    ) -> None:
        """`deadline_s` is on the clock of the event loop; a call has at most `tokens_max` tokens, or one sequence."""
        self._pool = pool
        self._outputs = outputs
        self._num_top = num_top
        self._deadline_s = deadline_s
        self._tokens_max = tokens_max
        self._last: ScoringRequest | None = None

    async def run(self, sequences: Sequence[IntArray], target: Target) -> list[ScoredTokens]:
        """Return the result of each sequence, in order, all of one version."""
        rows = [np.asarray(sequence) for sequence in sequences]
        for index, row in enumerate(rows):
            if row.ndim != 1 or not row.size or row.dtype.kind not in "iu":
                raise InvalidInput(
                    f"sequence {index} must be a row of at least one token id, got {row.dtype} of shape "
                    f"{list(row.shape)}"
                )
        if not rows:
            return []
        try:
            async with asyncio.timeout_at(self._deadline_s):
                return await self._run([row.astype(np.int32) for row in rows], replace(target, pinned=False))
        except TimeoutError as err:
            raise DeadlineExceeded(f"scoring did not finish before its deadline; {self._state()}") from err

    async def _run(self, rows: Sequence[IntArray], target: Target) -> list[ScoredTokens]:
        num_restarts = 0
        while True:
            parts = list(_parts(rows, self._tokens_max))
            try:
                return await self._all(parts, target)
            except PayloadTooLarge:
                if len(parts) == len(rows):
                    raise
                self._tokens_max //= 2
            except StaleWeights as err:
                if target.exact:
                    raise
                num_restarts += 1
                if num_restarts > _RESTARTS_MAX:
                    raise StaleWeights(
                        f"the weights changed during each of {num_restarts} attempts to score {len(rows)} sequences "
                        "under one version; score fewer sequences at once"
                    ) from err

    async def _all(self, parts: Sequence[Sequence[IntArray]], target: Target) -> list[ScoredTokens]:
        """Raise StaleWeights if no node serves the version of the first part for the others."""
        found = await self._part(parts[0], target)
        version = found[0].version
        calls = [asyncio.create_task(self._part(part, target.of(version))) for part in parts[1:]]
        try:
            for scored in await asyncio.gather(*calls):
                found += scored
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        if any(scored.version != version for scored in found):
            raise StaleWeights(f"two nodes serve different weights as {version}")
        return found

    async def _part(self, rows: Sequence[IntArray], target: Target) -> list[ScoredTokens]:
        request = self._last = ScoringRequest(
            target=target, deadline_s=self._deadline_s, outputs=self._outputs, num_top=self._num_top
        )
        message = inference_pb2.ScoreRequest(
            target=target.encode(),
            token_ids=[encode_ints(row) for row in rows],
            outputs=self._outputs,
            num_top=self._num_top,
        )
        while True:
            node_id, node = await self._pool.take(request)
            left_s = self._deadline_s - asyncio.get_running_loop().time()
            try:
                found = self._decode(await node.scoring.score(message, max(0.0, left_s) + _GRACE_S), rows)
            except InvalidResponse as err:
                self._pool.failed(request, node_id, node, EngineFailed(f"node {node_id}: {err}"))
            except MeshError as err:
                self._pool.failed(request, node_id, node, err)
            else:
                node.num_failures = 0
                return found

    def _decode(self, response: inference_pb2.ScoreResponse, rows: Sequence[IntArray]) -> list[ScoredTokens]:
        """Return the results. Raise InvalidResponse unless they have the shapes and arrays of the request."""
        names = set(array_names(self._outputs))
        num_arrays = len(rows) if names else len(response.arrays)
        if len(response.logprobs) != len(rows) or len(response.arrays) != num_arrays:
            raise InvalidResponse(f"{len(response.logprobs)} results for {len(rows)} sequences")
        found = []
        try:
            version = decode_version(response.version)
            for index, row in enumerate(rows):
                field = f"sequence {index}"
                arrays = response.arrays[index].arrays if names else {}
                columns = {name: decode_array(array, f"{field}.arrays[{name[:80]}]") for name, array in arrays.items()}
                logprobs = decode_floats(response.logprobs[index], f"{field}.logprobs")
                if set(columns) != names:
                    raise InvalidResponse(
                        f"{field} has the arrays [{', '.join(sorted(columns))}], not [{', '.join(sorted(names))}]"
                    )
                if any(len(values) != len(row) for values in (logprobs, *columns.values())):
                    raise InvalidResponse(f"{field} of {len(row)} tokens has arrays of another length")
                if not np.isfinite(logprobs).all():
                    raise InvalidResponse(f"{field} has log-probs that are not finite")
                found.append(ScoredTokens(logprobs=logprobs, version=version, arrays=columns))
        except InvalidInput as err:
            raise InvalidResponse(str(err)) from err
        return found

    def _state(self) -> str:
        if self._last is None:
            return "no call was sent"
        last = f"; last error: {self._last.last_error}" if self._last.last_error is not None else ""
        return f"waiting for {self._last.waiting_for or 'a response of a node'}{last}"


class InvalidResponse(Exception):
    """A node returned something other than what it was asked for."""


def _parts(rows: Sequence[IntArray], tokens_max: int) -> list[list[IntArray]]:
    """Divide the sequences, in order, into parts of at most `tokens_max` tokens; a longer sequence is a part."""
    parts: list[list[IntArray]] = []
    room = 0
    for row in rows:
        if not parts or row.size > room:
            parts.append([])
            room = tokens_max
        parts[-1].append(row)
        room -= row.size
    return parts
