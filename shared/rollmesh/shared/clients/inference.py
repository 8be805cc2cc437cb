"""The client-side router over inference nodes: affinity, load, fail-over that keeps the tokens.

    router = InferenceRouter(membership.fleet, token=token)
    answer = await router.generate(prompt, params, target=Target(step=3), session="e7")     # Generated
    async with router.open(prompt, params, target=Target()) as generation:                  # or piece by piece
        async for span in generation: ...

A request goes to the node that had its session last, while that one may be used, else to the least loaded. When the node is lost
or refuses, the request goes on at another one with the received tokens appended to its prefix and `max_tokens` reduced. Sampling
is keyed by (seed, position), so under the same weights the answer equals that of an undisturbed run. A stop string
may straddle the fail-over: the submission says how many tokens of its prefix are the answer so far (`num_resumed`), and the engine looks
for stop strings in those and the new ones together.

Cancelling the awaiting task, or leaving the context, cancels the request at the node.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

import grpc
import msgspec
import numpy as np

from rollmesh.shared.clients.generated import Generated, Span, Target, merged
from rollmesh.shared.clients.inference_stream import NodeStream, Reply, StreamRequest
from rollmesh.shared.clock import Clock, SystemClock
from rollmesh.shared.codec.arrays import decode_floats, decode_ints, encode_ints
from rollmesh.shared.codec.failure import decode_failure
from rollmesh.shared.codec.trajectory import decode_version, encode_sampling_params
from rollmesh.shared.errors import (
    DeadlineExceeded,
    InfraFailure,
    InvalidInput,
    MeshError,
    NotFound,
    PayloadTooLarge,
    PermissionDenied,
    StaleWeights,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from rollmesh.shared.fleet import Fleet
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.trajectory import EpisodeKey, FinishReason, IntArray, SamplingParams
from rollmesh.v1 import coordinator_pb2, inference_pb2

_FINAL = (InvalidInput, NotFound, PayloadTooLarge, PermissionDenied, Unauthenticated, Unimplemented)
"""Errors that every node would answer alike."""


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How requests find their node."""

    deadline_s: float = 600.0
    """Limit of one request, waiting for a node included."""
    failures_max: int = 16
    """Failures in a row, without a new token, after which a request is given up as an infra failure."""
    penalty_s_min: float = 0.1
    """How long a node that failed is passed by; doubles with every failure in a row."""
    penalty_s_max: float = 10.0
    """Longest time a failed node is passed by: how late, at most, it is tried again."""
    sessions_max: int = 65536
    """Sessions whose node is remembered, least recently used out first. Forgetting one costs a prefill."""

    def __post_init__(self) -> None:
        for name in ("deadline_s", "failures_max", "penalty_s_min", "penalty_s_max", "sessions_max"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


@dataclass(slots=True)
class _Node:
    """What the router knows of a node beyond the fleet's view."""

    stream: NodeStream
    failures: int = 0
    usable_from_s: float = 0.0


@dataclass(slots=True)
class _Request:
    """One request over all its tries."""

    token_ids: IntArray
    params: SamplingParams
    target: Target
    session: str
    priority: int
    labels: inference_pb2.RequestLabels
    deadline_s: float
    """Of the event loop's clock."""
    received: list[int] = field(default_factory=list)
    failures: int = 0
    """In a row, without a new token."""
    last_error: MeshError | None = None
    waiting_for: str = ""
    """What it last waited for, while it has no node."""
    avoid_until_s: dict[str, float] = field(default_factory=dict)
    """Nodes that refused just this request."""

    def submission(self) -> inference_pb2.Submission:
        new = np.array(self.received, np.int32)
        params = replace(self.params, max_tokens=self.params.max_tokens - len(self.received))
        return inference_pb2.Submission(
            target=self.target.encode(),
            token_ids=encode_ints(np.concatenate([self.token_ids, new])),
            params=encode_sampling_params(params),
            session=self.session,
            priority=self.priority,
            labels=self.labels,
            num_resumed=len(self.received),
        )

    def ended(self) -> FinishReason | None:
        """How it ended if the received tokens say so by themselves: the node was lost between them and its last word."""
        if self.received and self.received[-1] in self.params.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.received) >= self.params.max_tokens else None


class InferenceRouter:
    """Routes requests of this process. `fleet` is kept up to date by whoever made it. Used on one event loop."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        token: str,
        clock: Clock | None = None,
        config: RouterConfig | None = None,
        open_node: Callable[[str], grpc.aio.Channel] | None = None,
    ) -> None:
        """`open_node` opens a channel to host:port; by default with `token`."""
        self._fleet = fleet
        self._clock = clock or SystemClock()
        self._config = config or RouterConfig()
        self._open_node = open_node or (lambda address: open_channel(address, token=token))
        self._nodes: dict[tuple[str, str], _Node] = {}
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._waiting: Counter[str] = Counter()

    @property
    def waiting_for(self) -> str:
        """What requests wait for that have no node; empty if none waits."""
        return "; ".join(f"{num} requests wait for {cause}" for cause, num in sorted(self._waiting.items()))

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
        """Continues the prefix `token_ids` [n]; `key` labels the request. Raises as `Generation` does."""
        generation = self.open(
            token_ids, params, target=target, session=session, priority=priority, key=key, deadline_s=deadline_s
        )
        async with generation:
            pieces = [piece async for piece in generation]
        return Generated(
            spans=merged(pieces, generation.finish),
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
        """The same piece by piece. Nothing is sent before it is iterated."""
        labels = inference_pb2.RequestLabels()
        if key is not None:
            labels = inference_pb2.RequestLabels(run=key.run, group=key.group, episode=key.episode)
        limit_s = self._config.deadline_s if deadline_s is None else deadline_s
        until_s = asyncio.get_running_loop().time() + limit_s
        return Generation(self, _Request(token_ids, params, target, session, priority, labels, until_s))

    async def close(self) -> None:
        """Closes every stream; what still runs on them ends as Unavailable."""
        for node in self._nodes.values():
            await node.stream.close()
        self._nodes.clear()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # For Generation ---------------------------------------------------------------------------------------------------

    async def _submit(self, request: _Request) -> tuple[str, _Node, StreamRequest]:
        """Sends a request to the best node, waiting for one that may be used."""
        while (found := self._pick(request)) is None:
            await self._wait_for_node(request)
        request.waiting_for = ""
        node = self._node(found)
        if request.session:
            self._sessions[request.session] = found.node_id
            self._sessions.move_to_end(request.session)
            if len(self._sessions) > self._config.sessions_max:
                self._sessions.popitem(last=False)
        return found.node_id, node, node.stream.submit(request.submission())

    def _failed(self, request: _Request, node_id: str, node: _Node, err: MeshError) -> None:
        """Notes a failure: this request passes the node by for a while, and if it was the node's fault, so do all."""
        request.failures += 1
        request.last_error = err
        now_s = self._clock.monotonic_s()
        if isinstance(err, StaleWeights):
            request.avoid_until_s[node_id] = now_s + self._penalty_s(request.failures)
            return
        node.failures += 1
        node.usable_from_s = now_s + max(self._penalty_s(node.failures), err.retry_after_s or 0.0)

    def _penalty_s(self, failures: int) -> float:
        return min(self._config.penalty_s_max, self._config.penalty_s_min * 2.0 ** min(failures - 1, 16))

    # Choosing ---------------------------------------------------------------------------------------------------------

    def _pick(self, request: _Request) -> coordinator_pb2.FleetNode | None:
        usable = {node.node_id: node for node in self._admissible(request.target) if self._usable(request, node)}
        if (last := self._sessions.get(request.session)) in usable and request.session:
            return usable[str(last)]
        return min(usable.values(), key=self._load, default=None)

    def _admissible(self, target: Target) -> list[coordinator_pb2.FleetNode]:
        nodes = self._fleet.nodes(coordinator_pb2.NODE_KIND_INFERENCE)
        ready = [n for n in nodes if n.state == coordinator_pb2.NODE_STATE_READY and n.HasField("active")]
        return [n for n in ready if target.admits(decode_version(n.active))]

    def _usable(self, request: _Request, node: coordinator_pb2.FleetNode) -> bool:
        known = self._nodes.get((node.node_id, node.address))
        usable_from_s = known.usable_from_s if known is not None else 0.0
        return max(usable_from_s, request.avoid_until_s.get(node.node_id, 0.0)) <= self._clock.monotonic_s()

    def _load(self, node: coordinator_pb2.FleetNode) -> tuple[float, float, str]:
        """Own requests first: the fleet's numbers are a heartbeat old, and many requests come between two."""
        known = self._nodes.get((node.node_id, node.address))
        num_own = known.stream.num_live if known is not None else 0
        capacity = max(1, node.capacity)
        return num_own / capacity, node.num_running / capacity, node.node_id

    def _node(self, found: coordinator_pb2.FleetNode) -> _Node:
        place = (found.node_id, found.address)
        if place not in self._nodes:
            self._nodes[place] = _Node(NodeStream(lambda: self._open_node(found.address)))
        return self._nodes[place]

    async def _wait_for_node(self, request: _Request) -> None:
        """Until the fleet changes or a penalty ends."""
        admissible = self._admissible(request.target)
        self._raise_if_hopeless(request.target)
        cause = f"an inference node with {request.target}: " + self._describe(bool(admissible))
        revision = self._fleet.revision
        changed = asyncio.create_task(self._fleet.changed(since=revision))
        waits: list[asyncio.Task[int] | asyncio.Task[None]] = [changed]
        if admissible:
            waits.append(asyncio.create_task(self._clock.sleep(self._penalty_left_s(request, admissible))))
        request.waiting_for = cause
        self._waiting[cause] += 1
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            self._waiting -= Counter([cause])
        if self._fleet.revision != revision:
            request.avoid_until_s.clear()  # a new picture may bring new weights

    def _penalty_left_s(self, request: _Request, nodes: list[coordinator_pb2.FleetNode]) -> float:
        ends = [request.avoid_until_s.get(node.node_id, 0.0) for node in nodes]
        known = [self._nodes[place].usable_from_s for n in nodes if (place := (n.node_id, n.address)) in self._nodes]
        now_s = self._clock.monotonic_s()
        return min((end - now_s for end in [*ends, *known] if end > now_s), default=self._config.penalty_s_min)

    def _raise_if_hopeless(self, target: Target) -> None:
        """An EXACT step that every node has left behind does not come back."""
        nodes = self._fleet.nodes(coordinator_pb2.NODE_KIND_INFERENCE)
        active = [decode_version(node.active) for node in nodes if node.HasField("active")]
        own = [version for version in active if version.policy == target.policy]
        wanted = (target.incarnation, target.step)
        if target.exact and own and all((version.incarnation, version.step) > wanted for version in own):
            raise StaleWeights(f"no node serves {target} any more; all are newer", step=target.step)

    def _describe(self, penalised: bool) -> str:
        if penalised:
            return "those that have it failed just now"
        nodes = self._fleet.nodes(coordinator_pb2.NODE_KIND_INFERENCE)
        states = [f"{n.node_id} {_state_name(n)}" for n in nodes[:8]]
        return f"of {len(nodes)} nodes none is ready with it" + (f" ({', '.join(states)})" if states else "")


class Generation:
    """One request: iterate inside `async with`. After the last piece, `finish` says why it ended.

    Raises `DeadlineExceeded`; `InfraFailure` after too many failures in a row; `StaleWeights` for an exact step that is gone; what every
    node would answer (`InvalidInput`, `UnknownPolicy`, ...).
    """

    def __init__(self, router: InferenceRouter, request: _Request) -> None:
        self.finish = FinishReason.UNFINISHED
        self.num_failovers = 0
        self.num_prompt_cached = 0
        self.num_prompt_prefilled = 0
        self._router = router
        self._request = request
        self._try: tuple[str, _Node, StreamRequest] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._try is not None:
            _, node, stream_request = self._try
            self._try = None
            node.stream.cancel(stream_request, "given up by its caller")

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Span:
        """New tokens of one version, at least one."""
        while self.finish is FinishReason.UNFINISHED:
            try:
                async with asyncio.timeout_at(self._request.deadline_s):
                    piece = await self._step()
            except TimeoutError as err:
                raise DeadlineExceeded(f"no whole answer in time; {self._state()}") from err
            if piece is not None and piece.token_ids.size:
                return piece
        raise StopAsyncIteration

    async def _step(self) -> Span | None:
        """One reply of the node, or one fail-over."""
        if self._try is None:
            self._try = await self._router._submit(self._request)
        node_id, node, stream_request = self._try
        reply: Reply = await stream_request.replies.get()
        if isinstance(reply, MeshError):
            self._fail_over(reply)
            return None
        piece = self._decode(reply)
        if piece.token_ids.size:
            node.failures = self._request.failures = 0
        if piece.finish in (FinishReason.STOP, FinishReason.LENGTH):
            self.finish, self._try = piece.finish, None
        elif piece.finish is not FinishReason.UNFINISHED:
            cancelled = Unavailable(f"node {node_id} gave the request up")  # this side has not asked for it
            self._fail_over(decode_failure(reply.failure) if reply.HasField("failure") else cancelled)
        return replace(piece, finish=self.finish)

    def _fail_over(self, err: MeshError) -> None:
        assert self._try is not None
        node_id, node, _ = self._try
        self._try = None
        if isinstance(err, _FINAL):
            raise err
        if (ended := self._request.ended()) is not None:
            self.finish = ended
            return
        self._router._failed(self._request, node_id, node, err)
        self.num_failovers += 1
        if self._request.failures >= self._router._config.failures_max:
            raise InfraFailure(f"inference failed {self._request.failures} times in a row; the last: {err}") from err

    def _decode(self, delta: inference_pb2.GenerateDelta) -> Span:
        self.num_prompt_cached += delta.num_prompt_cached
        self.num_prompt_prefilled += delta.num_prompt_prefilled
        token_ids = decode_ints(delta.token_ids, "token_ids")
        self._request.received += token_ids.tolist()
        model = decode_floats(delta.logprobs_model, "logprobs_model") if delta.logprobs_model else None
        return Span(
            token_ids=token_ids,
            logprobs=decode_floats(delta.logprobs, "logprobs"),
            logprobs_model=model,
            version=decode_version(delta.version),
            kv_step_oldest=delta.kv_step_oldest,
            finish=FinishReason(delta.finish),
        )

    def _state(self) -> str:
        request = self._request
        last = f"; the last failure: {request.last_error}" if request.last_error is not None else ""
        return (
            f"{len(request.received)} tokens came, it waits for {request.waiting_for or 'a node to answer'}{last}"
        )


def _state_name(node: coordinator_pb2.FleetNode) -> str:
    state = coordinator_pb2.NodeState.Name(node.state).removeprefix("NODE_STATE_")
    return f"{state} at {decode_version(node.active)}" if node.HasField("active") else state
