"""Route requests to inference nodes, with session affinity, load balancing and fail-over that keeps the tokens.

    router = InferenceRouter(membership.fleet, access=access)
    answer = await router.generate(prompt, params, target=Target(step=3), session="e7")     # Generated
    async with router.open(prompt, params, target=Target()) as generation:                  # or piece by piece
        async for segment in generation: ...
    scored = await router.score([tokens], target=Target(), outputs=["entropy"])             # [ScoredTokens]

A request goes to the last node of its session if that node is usable, else to the node with the lowest cost in prefix
tokens to compute and load (`inference_choice`). If the node is lost or rejects the request, it continues at another
node with the received tokens appended to its prefix and `max_tokens` reduced. Sampling is keyed by (seed, position), so
with the same weights the result equals that of an undisturbed run. A stop string may span the fail-over: the submission
contains the number of generated tokens in its prefix (`num_resumed`), and the engine searches for stop strings in these
and the new tokens together.

A request to a pinned target asks for exactly the version of its first tokens from then on. If no node holds that
version any more, it raises StaleWeights.

Cancelling the awaiting task, or leaving the context, cancels the request at the node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import grpc

from rollmesh.shared.clients.generated import Generated, ScoredTokens, Target, merged
from rollmesh.shared.clients.inference_choice import PrefixAffinity
from rollmesh.shared.clients.inference_nodes import KnownNode, NodeChoice, NodePool, PendingRequest, RouterConfig
from rollmesh.shared.clients.inference_scoring import Scoring
from rollmesh.shared.clients.inference_stream import Reply, StreamRequest
from rollmesh.shared.clock import Clock, SystemClock
from rollmesh.shared.codec import checks
from rollmesh.shared.codec.failure import decode_failure
from rollmesh.shared.codec.trajectory import decode_segment
from rollmesh.shared.domain.outputs import NUM_TOP, array_names
from rollmesh.shared.domain.trajectory import EpisodeKey, FinishReason, IntArray, SamplingParams, Segment
from rollmesh.shared.errors import (
    DeadlineExceeded,
    EngineFailed,
    InvalidInput,
    MeshError,
    Unavailable,
)
from rollmesh.shared.membership.fleet import KnownFleet
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.v1 import coordinator_pb2, inference_pb2, types_pb2


class InferenceRouter:
    """Route the requests of this process. The owner of `fleet` updates it. Use it on one event loop."""

    def __init__(
        self,
        fleet: KnownFleet,
        *,
        access: Access,
        clock: Clock | None = None,
        config: RouterConfig | None = None,
        open_node: Callable[[str], grpc.aio.Channel] | None = None,
        outputs: Sequence[str] = (),
        num_top: int = NUM_TOP,
        choice: NodeChoice | None = None,
        kind: coordinator_pb2.NodeKind.ValueType = coordinator_pb2.NODE_KIND_INFERENCE,
    ) -> None:
        """`open_node` opens a channel to host:port, by default with `access`. Every request includes the engine
        `outputs`.

        `choice` replaces the policy, e.g. to compare it with others. `kind` is that of the nodes: INFERENCE or
        ENDPOINT.
        """
        self._outputs, self._num_top = tuple(outputs), num_top
        self._config = config or RouterConfig()
        open_node = open_node or (lambda address: open_channel(address, access=access))
        choice = choice or PrefixAffinity(self._config)
        self._pool = NodePool(fleet, clock or SystemClock(), self._config, open_node, choice, kind)

    @property
    def waiting_for(self) -> str:
        """A description of the waits of requests without a node; empty if no request waits."""
        return self._pool.waiting_for

    async def generate(
        self,
        token_ids: IntArray,
        params: SamplingParams,
        *,
        target: Target,
        session: str = "",
        priority: int = 0,
        key: EpisodeKey | None = None,
        deadline_s: float | None = None,
    ) -> Generated:
        """Continue the prefix `token_ids` [n]. `key` labels the request. Raise the errors of `Generation`."""
        generation = self.open(
            token_ids, params, target=target, session=session, priority=priority, key=key, deadline_s=deadline_s
        )
        async with generation:
            pieces = [piece async for piece in generation]
        return Generated(
            segments=merged(pieces, generation.finish),
            finish=generation.finish,
            num_failovers=generation.num_failovers,
            num_prompt_cached=generation.num_prompt_cached,
            num_prompt_prefilled=generation.num_prompt_prefilled,
        )

    def open(
        self,
        token_ids: IntArray,
        params: SamplingParams,
        *,
        target: Target,
        session: str = "",
        priority: int = 0,
        key: EpisodeKey | None = None,
        deadline_s: float | None = None,
    ) -> Generation:
        """Continue as `generate`, but return the pieces. The request is sent when the iteration starts."""
        names = {} if key is None else {"run": key.run, "group": key.group, "episode": key.episode}
        limit_s = self._config.deadline_s if deadline_s is None else deadline_s
        until_s = asyncio.get_running_loop().time() + limit_s
        request = PendingRequest(
            token_ids=token_ids,
            params=params,
            target=target,
            session=session,
            priority=priority,
            labels=inference_pb2.RequestLabels(**names),
            deadline_s=until_s,
            outputs=self._outputs,
            num_top=self._num_top,
            hold_s=self._config.hold_s,
        )
        return Generation(self._pool, request)

    async def score(
        self,
        sequences: Sequence[IntArray],
        *,
        target: Target,
        outputs: Sequence[str] = (),
        num_top: int | None = None,
        deadline_s: float | None = None,
    ) -> list[ScoredTokens]:
        """Return log-probs and `outputs` of given sequences, each [n] with n >= 1, all under one version that `target`
        admits.

        A large request is sent in parts, possibly to several nodes. `num_top` is that of the router if None. Raise the
        errors of `Generation`.
        """
        limit_s = self._config.deadline_s if deadline_s is None else deadline_s
        scoring = Scoring(
            self._pool,
            outputs=tuple(outputs),
            num_top=self._num_top if num_top is None else num_top,
            deadline_s=asyncio.get_running_loop().time() + limit_s,
            tokens_max=self._config.score_tokens_max,
        )
        return await scoring.run(sequences, target)

    async def close(self) -> None:
        """Close every stream. Running requests end with Unavailable."""
        await self._pool.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class Generation:
    """One request. Iterate inside `async with`. After the last piece, `finish` is the finish reason.

    Raise `DeadlineExceeded`; `InfraFailure` after too many consecutive failures; `StaleWeights` for an exact step, or
    the version of a pinned response, that no node holds any more; and errors that every node would return
    (`InvalidInput`, `UnknownPolicy`, ...).
    """

    def __init__(self, pool: NodePool, request: PendingRequest) -> None:
        self.finish = FinishReason.UNFINISHED
        self.num_failovers = 0
        self.num_prompt_cached = 0
        self.num_prompt_prefilled = 0
        self._pool = pool
        self._request = request
        self._try: tuple[str, KnownNode, StreamRequest] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._try is not None:
            _, node, stream_request = self._try
            self._try = None
            node.stream.cancel(stream_request, "cancelled by its caller")

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Segment:
        """Return at least one new token, all of one version."""
        while self.finish is FinishReason.UNFINISHED:
            try:
                async with asyncio.timeout_at(self._request.deadline_s):
                    piece = await self._step()
            except TimeoutError as err:
                raise DeadlineExceeded(f"the generation did not finish before its deadline; {self._state()}") from err
            if piece is not None:
                return piece
        raise StopAsyncIteration

    async def _step(self) -> Segment | None:
        """Process one reply of the node, or one fail-over."""
        if self._try is None:
            node_id, node = await self._pool.take(self._request)
            self._try = node_id, node, node.stream.submit(self._request.submission())
        node_id, node, stream_request = self._try
        reply: Reply = await stream_request.get()
        if isinstance(reply, MeshError):
            self._fail_over(reply)
            return None
        self.num_prompt_cached += reply.num_prompt_cached
        self.num_prompt_prefilled += reply.num_prompt_prefilled
        try:
            segment = self._decode(reply.segment, node_id) if reply.HasField("segment") else None
        except InvalidInput as err:
            node.stream.cancel(stream_request, "malformed delta")
            self._fail_over(EngineFailed(f"node {node_id} sent a malformed delta: {err}"))
            return None
        if segment is not None:
            node.num_failures = self._request.num_failures = 0
        finish = FinishReason(reply.finish)
        if finish in (FinishReason.STOP, FinishReason.LENGTH):
            self.finish, self._try = finish, None
        elif finish is not FinishReason.UNFINISHED:
            cancelled = Unavailable(f"node {node_id} cancelled the request without a cancellation by this client")
            self._fail_over(decode_failure(reply.failure) if reply.HasField("failure") else cancelled)
        return segment

    def _fail_over(self, err: MeshError) -> None:
        assert self._try is not None
        node_id, node, _ = self._try
        self._try = None
        if (ended := self._request.ended()) is not None:
            self.finish = ended
            return
        self.num_failovers += 1
        self._pool.failed(self._request, node_id, node, err)

    def _decode(self, message: types_pb2.Segment, node_id: str) -> Segment:
        """Return the new tokens. Raises InvalidInput for a malformed segment, and for another version or other arrays
        than requested."""
        segment = decode_segment(message, "segment")
        checks.check_segment(segment, "segment", index=0, num_params=0)
        expected = array_names(self._request.outputs)
        if set(segment.arrays) != set(expected):
            names = (", ".join(sorted(names)) for names in (segment.arrays, expected))
            raise InvalidInput("the node returned the arrays [{}], expected [{}]".format(*names))
        request = self._request
        if segment.version is not None:
            self._pool.check_stamp(node_id, segment.version)
        if request.target.exact and (segment.version is None or not request.target.admits(segment.version)):
            raise InvalidInput(f"the node sampled {segment.version}, requested was exactly {request.target}")
        if request.target.pinned and segment.version is not None:
            request.target = request.target.of(segment.version)
        request.received += segment.token_ids.tolist()
        return segment

    def _state(self) -> str:
        request = self._request
        last = f"; last error: {request.last_error}" if request.last_error is not None else ""
        return (
            f"received {len(request.received)} tokens, waiting for "
            f"{request.waiting_for or 'a response of a node'}{last}"
        )
