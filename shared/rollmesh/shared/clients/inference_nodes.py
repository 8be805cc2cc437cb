"""Keep the inference nodes that a router can use, with their streams and versions, and temporarily skip failed
nodes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Protocol

import grpc
import numpy as np
from msgspec import Meta
from msgspec.structs import replace

from rollmesh.shared.clients.generated import Target
from rollmesh.shared.clients.inference_stream import GenerateLink, ScoreLink
from rollmesh.shared.clients.prefix_index import BLOCK_TOKENS, PrefixIndex, prefix_blocks
from rollmesh.shared.clock import Clock
from rollmesh.shared.codec.arrays import encode_ints
from rollmesh.shared.codec.trajectory import decode_version, encode_sampling_params
from rollmesh.shared.config.settings import NonNegativeInt, PositiveFloat, PositiveInt, Settings
from rollmesh.shared.domain.outputs import NUM_TOP
from rollmesh.shared.domain.text import count_of
from rollmesh.shared.domain.trajectory import FinishReason, IntArray, SamplingParams
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import (
    InfraFailure,
    InvalidInput,
    MeshError,
    NotFound,
    PayloadTooLarge,
    PermissionDenied,
    ResourceExhausted,
    StaleWeights,
    Unauthenticated,
    Unimplemented,
)
from rollmesh.shared.membership.fleet import KnownFleet
from rollmesh.shared.net.retry import pause_after
from rollmesh.v1 import coordinator_pb2, inference_pb2

_FINAL = (InvalidInput, NotFound, PayloadTooLarge, PermissionDenied, Unauthenticated, Unimplemented)
"""Errors that every node would return."""


LOAD_S_MAX = 2.0
"""Time after which a reported load of a node no longer counts, in seconds. A node without requests of this client sends
no report."""
PINNED_NEEDS = "responses under one version (an engine with `versions_max` >= 2, such as torch, or `rollout.pin` none)"
"""What an engine with one set of weights lacks for a pinned response, as errors name it."""


HoldSeconds = Annotated[float, Meta(ge=0, le=1)]


class RouterConfig(Settings):
    """Settings for routing requests to nodes."""

    deadline_s: PositiveFloat = 600.0
    """Timeout of one request, including the wait for a node, in seconds."""
    failures_max: PositiveInt = 16
    """Consecutive failures without a new token after which a request fails as an infra failure."""
    penalty_s_min: PositiveFloat = 0.1
    """Time for which a failed node is skipped, in seconds; doubles with every consecutive failure."""
    penalty_s_max: PositiveFloat = 10.0
    """Maximum time for which a failed node is skipped, in seconds."""
    session_moves_at: PositiveInt = 4
    """A session moves to another node if its node has at least this many requests of this client and the other node,
    relative to its capacity, at most half as many. A new node thus gets its share immediately, at the cost of a prefill
    per session."""
    request_tokens: NonNegativeInt = 128
    """Cost of one request that already runs at a node, in prefix tokens. A request without a session goes to the node
    with the lowest sum of this cost and the tokens that the node has not computed. A larger value balances more, a
    smaller one computes fewer prefixes."""
    prefix_tokens_max: NonNegativeInt = 524288
    """Maximum number of sent tokens that are remembered per node and version, to find prefixes there; about 5 bytes
    each. The least recently used sequences are evicted first. 0: only load decides."""
    hold_s: HoldSeconds = 0.05
    """Longest time for which a node keeps the tokens of an unfinished response, so that they arrive in one message, in
    seconds. The last tokens are never kept back. 0: tokens arrive as the engine emits them. A node that is lost loses
    the tokens that it kept."""
    sessions_max: PositiveInt = 65536
    """Maximum number of sessions with a stored node; the least recently used is evicted first. An eviction costs a
    prefill."""
    score_tokens_max: PositiveInt = 4096
    """Maximum number of tokens in one scoring call; a longer sequence is sent alone. Larger requests are split. An
    engine may compute a call between two steps of generation, so that a larger value delays these steps."""
    score_calls_max: PositiveInt = 2
    """Maximum number of concurrent scoring calls of this process; further ones wait, so that they do not displace
    generation."""


@dataclass(slots=True, eq=False)
class KnownNode:
    """An inference node of the fleet, and the state that the router keeps of it."""

    node_id: str
    address: str
    stream: GenerateLink
    scoring: ScoreLink
    capacity: int = 1
    """Most sequences that it runs at once."""
    served: list[tuple[PolicyVersion, PrefixIndex]] = field(default_factory=list)
    """The versions that it serves, the active one first, with the prefixes that it was sent under each."""
    num_failures: int = 0
    usable_from_s: float = 0.0

    @property
    def num_live(self) -> int:
        """Number of requests of this process that run at the node."""
        return self.stream.num_live + self.scoring.num_live

    def num_requests(self, now_s: float) -> int:
        """Return the number of requests of this process, and of those that others had there at the last report of the
        node."""
        others = self.stream.num_others if now_s - self.stream.load_s < LOAD_S_MAX else 0
        return self.num_live + others

    def kv_pressure(self, now_s: float) -> float:
        """Return the share of the key-value cache that running requests hold; 0 if the node did not report it
        lately."""
        return self.stream.load.kv_pressure if now_s - self.stream.load_s < LOAD_S_MAX else 0.0

    def prefixes(self, target: Target) -> PrefixIndex | None:
        """Return the prefixes under the version that serves `target`; None if no version does."""
        if not target.exact:
            return self.served[0][1] if self.served else None
        return next((prefixes for version, prefixes in self.served if target.admits(version)), None)

    def serve(self, versions: Sequence[PolicyVersion]) -> None:
        """Note the versions that the node serves now. The cache of dropped ones is gone, under every policy for the
        cache."""
        known = dict(self.served)
        self.served = [(version, known.get(version) or PrefixIndex()) for version in versions]

    async def close(self) -> None:
        """Close the connections. Running requests end with an error."""
        await self.stream.close()
        await self.scoring.close()


@dataclass(slots=True, kw_only=True)
class RoutedRequest:
    """What the choice of a node needs to know of a request over all its attempts: its target, its failures and its
    current wait."""

    purpose: ClassVar[str]
    """Kind of the request, for messages."""
    target: Target
    deadline_s: float
    """Time on the event loop's clock, in seconds."""
    session: str = ""
    outputs: tuple[str, ...] = ()
    num_top: int = NUM_TOP
    num_failures: int = 0
    """Consecutive infrastructure failures without a new token."""
    num_stale: int = 0
    """Rejections because of stale weights."""
    last_error: MeshError | None = None
    waiting_for: str = ""
    """Cause of the last wait while it has no node."""
    avoid_until_s: dict[str, float] = field(default_factory=dict)
    """Nodes that rejected only this request, with the time until which they are skipped."""

    def offered(self, can: coordinator_pb2.EngineCapabilities) -> Collection[str]:
        """Return the outputs that an engine can return for a request of this kind."""
        raise NotImplementedError

    def lacking(self, can: coordinator_pb2.EngineCapabilities) -> Collection[str]:
        """Return the outputs that the request needs and an engine cannot return."""
        return set(self.outputs) - set(self.offered(can))

    @property
    def num_blocks(self) -> int:
        """Number of whole blocks of the prefix; 0 if the engine reuses nothing of it."""
        return 0

    def blocks(self) -> Sequence[int]:
        """Return the hashes of these blocks."""
        return ()

    def may_use(self, node: KnownNode, now_s: float) -> bool:
        """Return whether neither the node nor the request is in a penalty."""
        return node.usable_from_s <= now_s and self.avoid_until_s.get(node.node_id, 0.0) <= now_s


@dataclass(slots=True, kw_only=True)
class PendingRequest(RoutedRequest):
    """One generation with the tokens that it has received."""

    purpose: ClassVar[str] = "a generation"

    token_ids: IntArray
    params: SamplingParams
    priority: int
    labels: inference_pb2.RequestLabels
    hold_s: float = 0.0
    received: list[int] = field(default_factory=list)
    hashed: Sequence[int] | None = None
    """Blocks of `token_ids`, once they are computed."""

    @property
    def num_blocks(self) -> int:
        return len(self.token_ids) // BLOCK_TOKENS

    def blocks(self) -> Sequence[int]:
        if self.hashed is None:
            self.hashed = prefix_blocks(self.token_ids)
        return self.hashed

    def offered(self, can: coordinator_pb2.EngineCapabilities) -> Collection[str]:
        return can.outputs

    def lacking(self, can: coordinator_pb2.EngineCapabilities) -> Collection[str]:
        pinned = self.target.pinned and not self.target.exact and can.versions_max < 2
        return set(RoutedRequest.lacking(self, can)) | ({PINNED_NEEDS} if pinned else set())

    def submission(self) -> inference_pb2.Submission:
        token_ids, params = self.token_ids, self.params
        if self.received:
            token_ids = np.concatenate([token_ids, np.array(self.received, np.int32)])
            params = replace(params, max_tokens=params.max_tokens - len(self.received))
        return inference_pb2.Submission(
            target=self.target.encode(),
            token_ids=encode_ints(token_ids),
            params=encode_sampling_params(params),
            session=self.session,
            priority=self.priority,
            labels=self.labels,
            num_resumed=len(self.received),
            outputs=self.outputs,
            num_top=self.num_top,
            hold_s=self.hold_s,
        )

    def ended(self) -> FinishReason | None:
        """The finish reason if the received tokens determine it, because the node was lost before its final message."""
        if self.received and self.received[-1] in self.params.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.received) >= self.params.max_tokens else None


class NodeChoice(Protocol):
    """Policy of a router. `rollmesh.shared.clients.inference_choice` has the one in use."""

    def choose(self, request: RoutedRequest, nodes: Collection[KnownNode], now_s: float) -> KnownNode | None:
        """Return one of `nodes`, which can all serve the request; None if all of them are skipped at `now_s`."""
        ...

    def sent(self, request: RoutedRequest, node: KnownNode) -> None:
        """Record that a request goes to a node."""
        ...


_Nodes = dict[KnownNode, coordinator_pb2.FleetNode]
_Key = tuple[type[RoutedRequest], Target, tuple[str, ...]]
"""What decides which nodes can serve a request."""


class NodePool:
    """Find the nodes that can serve a request, let `choice` choose one, and skip failed ones."""

    def __init__(
        self,
        fleet: KnownFleet,
        clock: Clock,
        config: RouterConfig,
        open_node: Callable[[str], grpc.aio.Channel],
        choice: NodeChoice,
        kind: coordinator_pb2.NodeKind.ValueType = coordinator_pb2.NODE_KIND_INFERENCE,
    ) -> None:
        self._fleet = fleet
        self._kind = kind
        self._clock = clock
        self._config = config
        self._open_node = open_node
        self._choice = choice
        self._score_slots = asyncio.Semaphore(config.score_calls_max)
        self._nodes: dict[tuple[str, str], KnownNode] = {}
        """By id and address."""
        self._lost: list[KnownNode] = []
        """Nodes without requests that left the fleet and are not closed yet."""
        self._waiting: Counter[tuple[str, str]] = Counter()
        self._ready: _Nodes = {}
        """READY nodes with weights, as of the fleet's revision `_revision`."""
        self._capable_nodes: dict[_Key, _Nodes] = {}
        """READY nodes that can serve requests of one kind."""
        self._waited: set[_Key] = set()
        """Kinds of requests that may wait for a change of this view of the fleet."""
        self._revision = -1
        self._digests: dict[tuple[str, str, int, int], str] = {}
        """Digest by node, policy, step and incarnation, of the fleet's revision `_digests_revision`."""
        self._digests_revision = -1

    @property
    def waiting_for(self) -> str:
        """A description of the waits of requests without a node; empty if no request waits."""
        return "; ".join(
            f"{node} ({count_of(num, 'request')}): {why}" for (node, why), num in sorted(self._waiting.items())
        )

    async def take(self, request: RoutedRequest) -> tuple[str, KnownNode]:
        """Return the best node for a request, and wait for a usable one. The caller's deadline bounds the wait."""
        while self._lost:
            await self._lost.pop().close()
        while (node := self._choice.choose(request, self._capable(request), self._clock.monotonic_s())) is None:
            await self._wait_for_node(request)
        request.waiting_for = ""
        self._choice.sent(request, node)
        return node.node_id, node  # without an await since the choice, so that the node cannot be closed in between

    def failed(self, request: RoutedRequest, node_id: str, node: KnownNode, err: MeshError) -> None:
        """Record a failure. Stale weights concern only this request; an overloaded or failed node is skipped for all.

        Raise the error if every node would return it, and InfraFailure after `failures_max` consecutive failures of the
        request.
        """
        if isinstance(err, _FINAL):
            raise err
        request.last_error = err
        now_s = self._clock.monotonic_s()
        if isinstance(err, StaleWeights):
            request.num_stale += 1
            request.avoid_until_s[node_id] = now_s + self._penalty_s(request.num_stale)
        elif isinstance(err, ResourceExhausted):
            node.usable_from_s = now_s + (err.retry_after_s or self._config.penalty_s_min)
        else:
            request.num_failures += 1
            node.num_failures += 1
            node.usable_from_s = now_s + self._penalty_s(node.num_failures)
            for _, prefixes in node.served:
                prefixes.clear()
        if request.num_failures >= self._config.failures_max:
            raise InfraFailure(
                f"inference failed {self._config.failures_max} consecutive times; last error: {err}"
            ) from err

    def check_stamp(self, node_id: str, version: PolicyVersion) -> None:
        """Raise InvalidInput if the coordinator lists the node with the same step and incarnation, but another
        digest."""
        if self._digests_revision != self._fleet.revision:
            self._digests_revision = self._fleet.revision
            self._digests = {
                (node.node_id, held.policy, held.step, held.incarnation): held.weights_digest
                for node in self._fleet.nodes(self._kind)
                for held in (*node.held, *([node.active] if node.HasField("active") else []))
            }
        listed = self._digests.get((node_id, version.policy, version.step, version.incarnation), "")
        if listed and listed != version.weights_digest:
            raise InvalidInput(
                f"the node sampled from {version} with digest {version.weights_digest!r}, but the fleet lists "
                f"{listed!r}; restart the node"
            )

    async def close(self) -> None:
        """Close every stream. Running requests end with Unavailable."""
        for node in (*self._nodes.values(), *self._lost):
            await node.close()
        self._nodes.clear()
        self._lost.clear()

    def _penalty_s(self, failures: int) -> float:
        return pause_after(failures, self._config.penalty_s_min, self._config.penalty_s_max)

    def _capable(self, request: RoutedRequest) -> _Nodes:
        """Return the READY nodes that serve the target and can return what the request needs."""
        if self._revision != self._fleet.revision:
            self._revision = self._fleet.revision
            self._follow_fleet()
        key = _key(request)
        if (nodes := self._capable_nodes.get(key)) is None:
            nodes = self._capable_nodes[key] = {
                known: node
                for known, node in self._ready.items()
                if any(request.target.admits(version) for version in _serving(node, request.target))
                and not request.lacking(_capabilities(node))
            }
        return nodes

    def _follow_fleet(self) -> None:
        """Take over a new view of the fleet. A restarted node is a new node."""
        self._capable_nodes.clear()
        self._waited.clear()
        self._ready = {}
        seen = set()
        for node in self._fleet.nodes(self._kind):
            seen.add(place := (node.node_id, node.address))
            if node.state != coordinator_pb2.NODE_STATE_READY or not node.HasField("active"):
                continue
            known = self._nodes.get(place)
            if known is None:
                known = self._nodes[place] = self._connected(node)
            known.capacity = max(1, node.capacity)
            known.serve([decode_version(version) for version in (node.active, *node.held)])
            self._ready[known] = node
        for place in [place for place, node in self._nodes.items() if place not in seen]:
            if not self._nodes[place].stream.is_open and not self._nodes[place].num_live:
                self._lost.append(self._nodes.pop(place))
                self._lost[-1].served.clear()

    def _connected(self, node: coordinator_pb2.FleetNode) -> KnownNode:
        """Return a node whose connections open with the first request."""

        def connect() -> grpc.aio.Channel:
            return self._open_node(node.address)

        return KnownNode(
            node.node_id, node.address, GenerateLink(connect, self._clock), ScoreLink(connect, self._score_slots)
        )

    async def _wait_for_node(self, request: RoutedRequest) -> None:
        """Wait until the fleet changes or a penalty ends."""
        admissible = self._capable(request)
        if (key := _key(request)) not in self._waited:
            self._raise_if_unable(request)
            self._raise_if_fatal(request.target)
            self._waited.add(key)
        cause = (f"a node that serves {request.target}", self._describe(bool(admissible)))
        revision = self._fleet.revision
        request.waiting_for = ": ".join(cause)
        self._waiting[cause] += 1
        try:
            if admissible:
                await self._changed_within(revision, self._penalty_left_s(request, admissible))
            else:
                await self._fleet.changed(since=revision)
        finally:
            self._waiting[cause] -= 1
            if not self._waiting[cause]:
                del self._waiting[cause]
        if self._fleet.revision != revision:
            request.avoid_until_s.clear()  # a fleet change may include new weights

    async def _changed_within(self, revision: int, limit_s: float) -> None:
        """Wait until the fleet changes, at most `limit_s`."""
        waits = [
            asyncio.ensure_future(self._fleet.changed(since=revision)),
            asyncio.ensure_future(self._clock.sleep(limit_s)),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _penalty_left_s(self, request: RoutedRequest, nodes: Collection[KnownNode]) -> float:
        now_s = self._clock.monotonic_s()
        ends = [end for n in nodes for end in (request.avoid_until_s.get(n.node_id, 0.0), n.usable_from_s)]
        return min((end - now_s for end in ends if end > now_s), default=self._config.penalty_s_min)

    def _raise_if_unable(self, request: RoutedRequest) -> None:
        """Raise if there are inference nodes, and the engine of none of them can do what the request needs."""
        engines = {
            (can.engine or node.node_id): can for node in self._fleet.nodes(self._kind) for can in [_capabilities(node)]
        }
        lacking = [request.lacking(can) for can in engines.values()]
        if not engines or not all(lacking):
            return
        wanted = sorted(set().union(*lacking))
        have = "; ".join(f"{engine} returns [{', '.join(request.offered(can))}]" for engine, can in engines.items())
        raise InvalidInput(
            f"no inference node can do what {request.purpose} asks for: {', '.join(wanted)}. Engines of the fleet: "
            f"{have}. Request less, or set `inference.engine` to one that can: `rollmesh check` names the built-in "
            "ones, docs/engines.md lists them"
        )

    def _raise_if_fatal(self, target: Target) -> None:
        """Raise if every node has passed the requested exact step and none holds it, because it will not be served
        again."""
        nodes = self._fleet.nodes(self._kind)
        active = [decode_version(node.active) for node in nodes if node.HasField("active")]
        own = [version for version in active if version.policy == target.policy]
        wanted = (target.incarnation, target.step)
        held = any(target.admits(version) for node in nodes for version in _serving(node, target))
        if target.exact and own and not held and all((version.incarnation, version.step) > wanted for version in own):
            raise StaleWeights(f"no node serves {target}, because all have newer weights", step=target.step)

    def _describe(self, penalised: bool) -> str:
        if penalised:
            return "all nodes that do have just failed"
        nodes = self._fleet.nodes(self._kind)
        states = [f"{n.node_id} {_state_name(n)}" for n in nodes[:8]]
        return "no node does" + (f" ({', '.join(states)})" if states else "")


def _key(request: RoutedRequest) -> _Key:
    return type(request), request.target, request.outputs


def _serving(node: coordinator_pb2.FleetNode, target: Target) -> list[PolicyVersion]:
    """Return the versions of a node that may serve `target`. Older ones serve only requests that name them."""
    return [decode_version(version) for version in ((node.active, *node.held) if target.exact else (node.active,))]


def _capabilities(node: coordinator_pb2.FleetNode) -> coordinator_pb2.EngineCapabilities:
    """Return what the engine of a node can do. A node of an older release reports nothing, has no outputs, and
    scores."""
    return node.capabilities if node.HasField("capabilities") else coordinator_pb2.EngineCapabilities(scores=True)


def _state_name(node: coordinator_pb2.FleetNode) -> str:
    state = coordinator_pb2.NodeState.Name(node.state).removeprefix("NODE_STATE_")
    return f"{state} at {decode_version(node.active)}" if node.HasField("active") else state
