"""The streams of the nodes, and the pure Fleet behind them: reports in, commands and fleet views out.

A node has one stream; a new join replaces it. Commands wait in a bounded queue per stream. The coordinator disconnects
a node that does not drain its queue; the node joins again and gets the full state. A changed fleet view is sent to all
nodes. The fleet is updated every `PLAN_S`, and at once when a version is announced or a node has followed a weight
command, because each of these is a step on the way of a version to the fleet.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Protocol

from rollmesh.services.coordinator import validation
from rollmesh.services.coordinator.core import fleet as fl
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core.fleet import (
    Fleet,
    FleetConfig,
    FleetEvent,
    Node,
    NodeKind,
    NodeState,
    WeightGoal,
)
from rollmesh.services.coordinator.fact_codec import decode, encode_into, known_member
from rollmesh.services.coordinator.metrics import NODE_CHANGES
from rollmesh.shared.clock import Clock, clock_warning, time_limit
from rollmesh.shared.domain.engine_capabilities import EngineCapabilities
from rollmesh.shared.domain.protocol import PROTOCOL, ProtocolMismatch, ProtocolVersion, check_protocol
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import (
    MeshError,
    NodeDraining,
    NotReady,
    Overloaded,
    UnknownNode,
    WeightsRejected,
    field_error,
)
from rollmesh.shared.membership.membership import reported_protocol
from rollmesh.shared.process.process_info import ProcessInfo, installed_version
from rollmesh.shared.rpc.addresses import is_address
from rollmesh.shared.telemetry.metrics import count
from rollmesh.v1 import coordinator_pb2 as pb

PLAN_S = 0.05
"""Longest time between two updates of the fleet, in seconds."""
VARIANTS_SINCE = ProtocolVersion(major=1, minor=1)
"""First protocol whose workers read the variant of a lease."""
_log = logging.getLogger(__name__)


class FleetUser(Protocol):
    """The methods of a run's driver that the keeper uses."""

    async def enqueue(self, request: i.Input) -> None: ...


class NodeStream:
    """Commands to one node. Ends when the node leaves, is replaced, or does not drain its queue."""

    def __init__(self, node_id: str, commands_max: int) -> None:
        self.node_id = node_id
        self._queue: asyncio.Queue[pb.JoinResponse | None] = asyncio.Queue(commands_max)
        self._error: MeshError | None = None

    def send(self, message: pb.JoinResponse) -> None:
        try:
            self._queue.put_nowait(message)
        except asyncio.QueueFull:
            self.end(
                Overloaded(f"node {self.node_id} does not drain its command queue; join again", node_id=self.node_id)
            )

    def end(self, error: MeshError | None = None) -> None:
        """End the stream after the queued commands, or at once if the queue is full."""
        self._error = self._error or error
        if self._queue.full():
            self._queue.get_nowait()
        self._queue.put_nowait(None)

    async def messages(self) -> AsyncIterator[pb.JoinResponse]:
        """Yield the commands until the end. Raises the error with which the stream ended."""
        while (message := await self._queue.get()) is not None:
            yield message
        if self._error is not None:
            raise self._error


class FleetKeeper:
    """All nodes of a coordinator."""

    def __init__(
        self,
        limits: FleetConfig,
        runs: Callable[[], Mapping[str, FleetUser]],
        goals: Callable[[], Mapping[str, WeightGoal]],
        *,
        clock: Clock,
        coordinator_id: str,
        commands_max: int,
    ) -> None:
        self._fleet = Fleet(limits)
        self._limits = limits
        self._runs = runs
        self._goals = goals
        self._clock = clock
        self._coordinator_id = coordinator_id
        self._commands_max = commands_max
        self._streams: dict[str, NodeStream] = {}
        self._picture: bytes = b""
        self._due = asyncio.Event()

    @property
    def fleet(self) -> Fleet:
        """Return all nodes, read-only."""
        return self._fleet

    async def run(self) -> None:
        """Update the fleet periodically: missing heartbeats, weight commands, fleet views."""
        while True:
            self._due.clear()
            await self.step()
            with contextlib.suppress(TimeoutError):
                async with time_limit(self._clock, PLAN_S):
                    await self._due.wait()

    def hurry(self) -> None:
        """Update the fleet without waiting for the next period."""
        self._due.set()

    async def step(self) -> None:
        """Update the fleet once."""
        for event in self._fleet.plan(self._goals(), self._clock.monotonic_s()):
            await self._carry_out(event)
        view = self._view()
        picture = view.SerializeToString(deterministic=True)
        if picture != self._picture:
            self._picture = picture
            message = pb.JoinResponse(fleet=view)
            for stream in list(self._streams.values()):
                stream.send(message)

    def close(self) -> None:
        """End every stream. The nodes continue to work, and join another coordinator or this one later."""
        while self._streams:
            self._streams.popitem()[1].end()

    # Nodes ------------------------------------------------------------------------------------------------------------

    def join(self, hello: pb.NodeHello) -> NodeStream:
        """Return the new stream of a node with the welcome and the fleet view. Raises InvalidInput,
        ProtocolMismatch."""
        validation.check_hello(hello)
        _check_hello(hello)
        protocol = reported_protocol(hello)
        self._check_protocol(hello, protocol)
        now_s = self._clock.wall_s()
        ahead_s = hello.wall_s - now_s if hello.wall_s else 0.0
        if warning := clock_warning(ahead_s, f"{hello.process.host}, host of {hello.node_id},"):
            _log.warning("%s", warning)
        if (old := self._streams.pop(hello.node_id, None)) is not None:
            old.end()
        self._fleet.joined(
            node_id=hello.node_id,
            kind=NodeKind(hello.kind),
            address=hello.address,
            capacity=hello.capacity,
            runs=tuple(hello.runs),
            active=decode(PolicyVersion, hello.active) if hello.HasField("active") else None,
            now=self._clock.monotonic_s(),
            process=decode(ProcessInfo, hello.process),
            protocol=protocol,
            clock_ahead_s=ahead_s,
            capabilities=decode(EngineCapabilities, hello.capabilities) if hello.HasField("capabilities") else None,
            held=tuple(decode(PolicyVersion, version) for version in hello.held),
        )
        if hello.draining:
            self._fleet.drain(hello.node_id)
        for state in NodeState:  # a series that begins with 1 has no increase
            count(NODE_CHANGES, NodeKind(hello.kind).name.lower(), state.name.lower(), amount=0.0)
        stream = self._streams[hello.node_id] = NodeStream(hello.node_id, self._commands_max)
        welcome = pb.Welcome(heartbeat_s=self._limits.heartbeat_s, coordinator_id=self._coordinator_id, wall_s=now_s)
        encode_into(PROTOCOL, welcome.protocol)
        stream.send(pb.JoinResponse(welcome=welcome))
        stream.send(pb.JoinResponse(fleet=self._view()))
        return stream

    def _check_protocol(self, hello: pb.NodeHello, protocol: ProtocolVersion) -> None:
        """Reject a node whose release does not work with this one, and list it with the cause. The mesh continues."""
        process = decode(ProcessInfo, hello.process)
        try:
            check_protocol(
                protocol,
                PROTOCOL,
                node_name=f"node {hello.node_id}",
                node_build=process.version,
                coordinator_build=installed_version(),
            )
        except ProtocolMismatch as error:
            _log.warning("node rejected: node=%s host=%s: %s", hello.node_id, process.host, error)
            self._fleet.rejected_node(
                hello.node_id,
                kind=NodeKind(hello.kind),
                process=process,
                protocol=protocol,
                cause=f"rejected: {error}",
                now=self._clock.monotonic_s(),
            )
            raise

    def report(self, stream: NodeStream, report: pb.NodeReport) -> None:
        """Record a heartbeat. Raises UnknownNode if the node was removed."""
        validation.check_node_report(report)
        node = self._node(stream.node_id)
        now = self._clock.monotonic_s()
        self._fleet.reported(
            node.node_id,
            num_running=report.num_running,
            num_waiting=report.num_waiting,
            waiting_for=report.waiting_for,
            waiting_on=known_member(NodeKind, report.waiting_on),
            doing=report.doing,
            held=tuple(decode(PolicyVersion, version) for version in report.held),
            now=now,
        )
        goals = self._goals() if report.weights else {}
        run = fl.run_of(node, goals)
        for weights in report.weights:
            self._fleet.weights_reported(
                node.node_id,
                version=decode(PolicyVersion, weights.version),
                phase=fl.WeightPhase(weights.phase),
                cause=weights.failure.message,
                final=weights.failure.reason == WeightsRejected.reason,
                run=run,
                now=now,
                goal=goals.get(run),
            )
            self.hurry()
        if report.leaving:
            self._fleet.left(node.node_id)

    def leave(self, stream: NodeStream) -> None:
        """Handle the end of a stream. If it is the current one of the node, the node is without heartbeat from now
        on."""
        if self._streams.get(stream.node_id) is stream:
            del self._streams[stream.node_id]
            self._fleet.lost(stream.node_id)

    def drain(self, node_id: str) -> None:
        """Drain a node. Raises UnknownNode, and NotReady if it is not connected: it would rejoin without the
        command."""
        node = self._node(node_id)
        if node_id not in self._streams:
            raise NotReady(
                f"node {node_id} is {node.state.name} and not connected, so the command cannot reach it; retry when "
                "`rollmesh status` shows it as READY, or stop its process",
                node_id=node_id,
            )
        self._fleet.drain(node_id)
        self.send(node_id, pb.JoinResponse(drain=pb.DrainCommand()))

    def send(self, node_id: str, message: pb.JoinResponse) -> None:
        """Send to a node if it has a stream."""
        if (stream := self._streams.get(node_id)) is not None:
            stream.send(message)

    def check_may_work(self, node_id: str) -> tuple[str, ...]:
        """Return the runs of a worker (empty: all). Raises UnknownNode, NodeDraining."""
        node = self._node(node_id)
        if node.draining:
            raise NodeDraining(f"node {node_id} is draining: it gets no more work", node_id=node_id)
        return node.runs

    def reads_variants(self, node_id: str) -> bool:
        """Return whether a worker reads the variant of a lease, which protocol 1.0 does not have. Raises
        UnknownNode."""
        return self._node(node_id).protocol >= VARIANTS_SINCE

    def addresses(self, kind: NodeKind, run: str) -> list[str]:
        """Return the addresses of usable nodes of a kind for `run`."""
        return [n.address for n in self._fleet.usable(kind) if not n.runs or run in n.runs or not run]

    def name_of(self, address: str) -> str:
        """Return the node at an address; the address itself if no node has it."""
        return next((n.node_id for n in self._fleet.nodes.values() if n.address == address), address)

    def waiting(self) -> dict[str, str]:
        """Return what nodes with a heartbeat report to wait for, by node."""
        gone = (fl.NodeState.DEAD,)
        nodes = (n for n in self._fleet.nodes.values() if n.waiting_for and n.state not in gone)
        return {f"node/{n.node_id}": n.waiting_for for n in nodes}

    def nodes(self, kind: NodeKind | None) -> list[pb.FleetNode]:
        """Return every node, of a kind or of all."""
        chosen = (n for n in self._fleet.nodes.values() if kind in (None, n.kind))
        return [self._describe(n) for n in sorted(chosen, key=lambda n: n.node_id)]

    def _node(self, node_id: str) -> Node:
        node = self._fleet.nodes.get(node_id)
        if node is None or node.state is NodeState.DEAD:
            raise UnknownNode(
                f"node {node_id!r} is not in the mesh: it has not joined yet, or was removed for missing heartbeats; "
                "join first",
                node_id=node_id,
            )
        return node

    # Plans ------------------------------------------------------------------------------------------------------------

    async def _carry_out(self, event: FleetEvent) -> None:
        if isinstance(event, fl.SendWeights):
            self.send(event.node_id, pb.JoinResponse(weights=self._weight_command(event)))
        elif isinstance(event, fl.NodeDied):
            for run in list(self._runs().values()):
                await run.enqueue(i.NodeDead(node_id=event.node_id))
        elif isinstance(event, fl.Refused):
            if (refusing := self._runs().get(event.run)) is not None:
                await refusing.enqueue(i.VersionRejected(version=event.version, cause=event.cause))
        else:
            self._count(event)
            _log.info("node state changed: node=%s state=%s %s", event.node_id, event.state.name, event.cause)

    def _count(self, change: fl.StateChanged) -> None:
        left = change.state is NodeState.DEAD and change.cause == fl.LEFT
        count(NODE_CHANGES, change.kind.name.lower(), change.state.name.lower(), amount=0.0 if left else 1.0)

    def _weight_command(self, event: fl.SendWeights) -> pb.WeightCommand:
        feeders = self._fleet.feeders(event.node_id, event.version)
        sources = [node.address for node in (*feeders, *self._fleet.usable(NodeKind.DEPOT))]
        command = pb.WeightCommand(
            verb=pb.WeightCommand.Verb.ValueType(event.verb), sources=sources, activate=event.activate
        )
        encode_into(event.version, command.version)
        for version in event.retain:
            encode_into(version, command.retain.add())
        return command

    def _view(self) -> pb.FleetView:
        ready = (n for kind in NodeKind for n in self._fleet.usable(kind))
        view = pb.FleetView(nodes=[self._describe(n) for n in ready])
        for node in view.nodes:  # frequent changes are not part of the view
            for name in (
                "num_running",
                "num_waiting",
                "waiting_for",
                "silent_s",
                "process",
                "protocol",
                "clock_ahead_s",
            ):
                node.ClearField(name)
        return view

    def _describe(self, node: Node) -> pb.FleetNode:
        message = pb.FleetNode(
            node_id=node.node_id,
            kind=pb.NodeKind.ValueType(node.kind),
            address=node.address,
            state=pb.NodeState.ValueType(node.state),
            capacity=node.capacity,
            num_running=node.num_running,
            num_waiting=node.num_waiting,
            waiting_for=node.waiting_for,
            silent_s=self._clock.monotonic_s() - node.last_seen,
            cause=node.cause,
            clock_ahead_s=node.clock_ahead_s,
        )
        encode_into(node.process, message.process)
        encode_into(node.protocol, message.protocol)
        if node.capabilities is not None:
            encode_into(node.capabilities, message.capabilities)
        for version, place in ((node.active, message.active), (node.prepared, message.prepared)):
            if version is not None:
                encode_into(version, place)
        for version in node.held:
            encode_into(version, message.held.add())
        return message


def _check_hello(hello: pb.NodeHello) -> None:
    missing = "node_id" if not hello.node_id else ""
    kind = known_member(NodeKind, hello.kind)
    if kind is None:
        missing = "kind"
    elif not hello.address and kind not in (NodeKind.ROLLOUT, NodeKind.LEARNER):
        missing = "address"
    if missing:
        remedy = "a node must send its id, its kind and, if it has services, its address"
        raise field_error(f"hello.{missing}", "be set", getattr(hello, missing) or None, remedy)
    if hello.address and not is_address(hello.address):
        raise field_error("hello.address", "be host:port or unix:PATH", hello.address)
