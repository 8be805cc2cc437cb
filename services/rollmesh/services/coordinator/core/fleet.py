"""Nodes and the weight rollout plan. Pure and ephemeral: nodes report all of it again when they join again.

A version rolls out in two phases. Every node prepares it while serving. One node (the canary) activates it as soon as
it has prepared it, and scores its probes; if they match, the other nodes activate it. If a single node fails, only that
node is excluded. If the canary fails, or no node can prepare the version, the version is rejected and the fleet keeps
its weights. An evaluation pins its step: nodes activate pinned versions in order. While episodes of a pinned version
are open, a node passes it only if its engine can hold that version beside the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

from rollmesh.shared.config.settings import NonNegativeInt, PositiveFloat, Settings
from rollmesh.shared.domain.engine_capabilities import EngineCapabilities
from rollmesh.shared.domain.protocol import UNREPORTED, ProtocolVersion
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.net.retry import pause_after
from rollmesh.shared.process.process_info import ProcessInfo

PREPARE_TRIES_MAX = 3
COMMANDED_MAX = 64
"""Versions of earlier commands that are stored for each node. Its results of these are expected."""
FEEDERS_MAX = 2
"""Nodes that a node may fetch a version from, besides the depot."""
LEFT = "left cleanly"
"""Cause of a node that is DEAD because it reported that it leaves."""
RETRY_S = 2.0
RETRY_S_MAX = 64.0
"""First and longest delay before a failed preparation is retried, in seconds. It doubles with each failure."""


class NodeKind(IntEnum):
    INFERENCE = 1
    ROLLOUT = 2
    SANDBOX = 3
    REWARD = 4
    DATA = 5
    DEPOT = 6
    GATEWAY = 7
    LEARNER = 8
    ENDPOINT = 9


class NodeState(IntEnum):
    JOINING = 1
    STALE = 2
    READY = 3
    SUSPECT = 4
    DRAINING = 5
    DEAD = 6
    QUARANTINED = 7


class WeightPhase(IntEnum):
    PREPARED = 1
    ACTIVE = 2
    FAILED = 3
    PROBE_MISMATCH = 4


class WeightVerb(IntEnum):
    PREPARE = 1
    ACTIVATE = 2
    DISCARD = 3


class FleetConfig(Settings):
    """When a node without heartbeat is suspected and removed, and how long it may work on a weight command."""

    heartbeat_s: PositiveFloat = 1.0
    """Seconds between the reports of a node."""
    suspect_after_s: PositiveFloat = 5.0
    """Time without a report after which a node gets no new work, seconds."""
    dead_after_s: PositiveFloat = 15.0
    """Time without a report after which the work of a node is given to others, seconds. A short time wastes work on a
    busy machine. A long time delays recovery after a crash."""
    prepare_s_max: PositiveFloat = 120.0
    """Time that a node has for one weight command before the command is sent again, seconds."""

    keep_steps: tuple[NonNegativeInt, ...] = ()
    """Steps of the policy that nodes keep serving beside newer ones, if their engine has room (`versions_max`).
    Versions of open evaluations come first. The steps of endpoints of kind `policy_step` are added."""

    def check_fields(self) -> None:
        if not self.heartbeat_s < self.suspect_after_s <= self.dead_after_s:
            raise ValueError(
                f"`suspect_after_s` must be in (heartbeat_s, dead_after_s] = ({self.heartbeat_s}, "
                f"{self.dead_after_s}], got {self.suspect_after_s}"
            )


@dataclass(slots=True, kw_only=True)
class Node:
    """State of one node by its last messages."""

    node_id: str
    kind: NodeKind
    address: str
    capacity: int
    runs: tuple[str, ...]
    last_seen: float
    process: ProcessInfo
    protocol: ProtocolVersion = UNREPORTED
    clock_ahead_s: float = 0.0
    """Seconds by which the clock of its host was ahead of the coordinator's when it joined."""
    capabilities: EngineCapabilities | None = None
    """Set for inference nodes."""
    state: NodeState = NodeState.JOINING
    connected: bool = True
    draining: bool = False
    left: bool = False
    """It reported that it leaves, so it has no grace period."""
    num_running: int = 0
    num_waiting: int = 0
    waiting_for: str = ""
    waiting_on: NodeKind | None = None
    """Kind of node that can end that wait."""
    doing: str = ""
    cause: str = ""
    active: PolicyVersion | None = None
    held: tuple[PolicyVersion, ...] = ()
    """Older versions that it still serves."""
    prepared: PolicyVersion | None = None
    ordered: tuple[WeightVerb, PolicyVersion] | None = None
    """The command that it has not answered yet."""
    ordered_until: float = 0.0
    activates: bool = False
    """That command makes the version active: ACTIVATE, or PREPARE with `SendWeights.activate`."""
    failures: int = 0
    """Number of consecutive failed preparations of `failed`."""
    failed: PolicyVersion | None = None
    retry_at: float = 0.0
    commanded: list[PolicyVersion] = field(default_factory=list)
    """The newest versions of its PREPARE and ACTIVATE commands."""
    contradicted: bool = False
    """It reported weights that it cannot have. It is SUSPECT until its process restarts."""

    @property
    def versions_max(self) -> int:
        """Most versions that it serves at once."""
        return max(1, self.capabilities.versions_max) if self.capabilities is not None else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGoal:
    """The versions that the nodes of a run should serve."""

    versions: Sequence[PolicyVersion]
    """Announced versions without rejected ones, oldest first."""
    refused: Sequence[PolicyVersion] = ()
    """Announced versions that were rejected."""
    pins: Sequence[tuple[int, int]] = ()
    """(step, incarnation) of open evaluations, oldest first."""
    kept_steps: Sequence[int] = ()
    """Further steps that nodes keep serving if they have room."""
    step_min: int = 0
    """Oldest step that is admissible. Nodes below it are STALE, unless their version is pinned."""
    incarnation: int = 0
    ended: bool = False
    """The run has ended. Nodes without a configured run are free for another run."""


@dataclass(frozen=True, slots=True)
class SendWeights:
    """Send a weight command on the stream of the node."""

    node_id: str
    verb: WeightVerb
    version: PolicyVersion
    retain: tuple[PolicyVersion, ...] = ()
    """Older versions that it keeps serving when it activates the version."""
    activate: bool = False
    """PREPARE: the node activates the version as soon as it is prepared."""


@dataclass(frozen=True, slots=True)
class NodeDied:
    """The work of the node is released."""

    node_id: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The canary could not serve this version."""

    run: str
    version: PolicyVersion
    cause: str


@dataclass(frozen=True, slots=True)
class StateChanged:
    """A node changed, so the fleet view is sent again."""

    node_id: str
    kind: NodeKind
    state: NodeState
    cause: str


FleetEvent = SendWeights | NodeDied | Refused | StateChanged


def age(version: PolicyVersion) -> tuple[int, int]:
    """Return the sort key of versions: incarnation first."""
    return (version.incarnation, version.step)


@dataclass(slots=True)
class Fleet:
    """All nodes of a coordinator."""

    config: FleetConfig = field(default_factory=FleetConfig)
    nodes: dict[str, Node] = field(default_factory=dict)
    verified: set[PolicyVersion] = field(default_factory=set)
    """Versions with matching probes on some serving node."""
    rejected: set[PolicyVersion] = field(default_factory=set)
    """Versions that the canary could not serve. No node activates one, also before the run has recorded the
    rejection."""
    refused: list[Refused] = field(default_factory=list)
    """Effects that `plan` has not returned yet."""
    departed: dict[NodeKind, Node] = field(default_factory=dict)
    """The last node of each kind that was removed as DEAD, to name it when no node of the kind is left."""

    def knows(self, protocol: ProtocolVersion) -> bool:
        """Return whether every node has this protocol version or a higher one, so that it reads its kinds of facts and
        files."""
        return all(node.protocol >= protocol for node in self.nodes.values() if node.state is not NodeState.DEAD)

    def joined(
        self,
        *,
        node_id: str,
        kind: NodeKind,
        address: str,
        capacity: int,
        runs: tuple[str, ...],
        active: PolicyVersion | None,
        now: float,
        process: ProcessInfo | None = None,
        protocol: ProtocolVersion = UNREPORTED,
        clock_ahead_s: float = 0.0,
        capabilities: EngineCapabilities | None = None,
        held: tuple[PolicyVersion, ...] = (),
    ) -> None:
        """Add a node that said hello, for the first time or again."""
        before = self.nodes.get(node_id)
        same = before if before is not None and active is not None else None  # a restarted process has no weights
        self.nodes[node_id] = Node(
            node_id=node_id,
            kind=kind,
            address=address,
            capacity=capacity,
            runs=runs,
            active=active,
            last_seen=now,
            process=process or ProcessInfo(),
            protocol=protocol,
            clock_ahead_s=clock_ahead_s,
            capabilities=capabilities,
            held=held,
            commanded=before.commanded if before is not None else [],
            contradicted=same is not None and same.contradicted,
            cause=same.cause if same is not None and same.contradicted else "",
        )

    def rejected_node(
        self, node_id: str, *, kind: NodeKind, process: ProcessInfo, protocol: ProtocolVersion, cause: str, now: float
    ) -> None:
        """List a node that may not join, as DEAD. A node of that id which is in the mesh, or whose work is not released
        yet, stays."""
        if (before := self.nodes.get(node_id)) is not None and before.state is not NodeState.DEAD:
            before.cause = before.cause if before.connected else cause
            return
        self.nodes[node_id] = Node(
            node_id=node_id,
            kind=kind,
            address="",
            capacity=0,
            runs=(),
            last_seen=now,
            process=process,
            protocol=protocol,
            state=NodeState.DEAD,
            connected=False,
            cause=cause,
        )

    def reported(
        self,
        node_id: str,
        *,
        num_running: int,
        num_waiting: int,
        waiting_for: str,
        now: float,
        waiting_on: NodeKind | None = None,
        doing: str = "",
        held: tuple[PolicyVersion, ...] = (),
    ) -> None:
        """Record a heartbeat."""
        node = self.nodes[node_id]
        node.held = held
        node.waiting_on = waiting_on
        node.doing = doing
        node.last_seen = now
        node.num_running = num_running
        node.num_waiting = num_waiting
        node.waiting_for = waiting_for

    def weights_reported(
        self,
        node_id: str,
        *,
        version: PolicyVersion,
        phase: WeightPhase,
        cause: str,
        run: str,
        now: float,
        final: bool = False,
        goal: WeightGoal | None = None,
    ) -> None:
        """Record the result of a weight command. `final`: the node would fail this version at every retry.

        A node that reports weights which contradict those of its `goal` is SUSPECT: no request and no node uses it.
        """
        node = self.nodes[node_id]
        node.ordered = None
        if phase in (WeightPhase.PREPARED, WeightPhase.ACTIVE) and goal is not None:
            what = contradiction(version, goal) if version not in node.commanded else ""
            if what or node.contradicted:
                node.contradicted = True
                node.cause = (
                    node.cause if not what else f"reported {phase.name} for {version}, {what}; restart the node"
                )
                return
        if phase is WeightPhase.PREPARED:
            node.prepared, node.failures = version, 0
        elif phase is WeightPhase.ACTIVE:
            node.active, node.prepared, node.failures, node.cause = version, None, 0, ""
            self.verified.add(version)
        elif phase is WeightPhase.PROBE_MISMATCH:
            node.cause = cause
            node.state = NodeState.QUARANTINED
            self._refuse_unverified(run, version, cause)
        else:
            node.failures = PREPARE_TRIES_MAX if final else node.failures + 1
            node.prepared = None
            node.cause = cause
            node.retry_at = now + pause_after(node.failures, RETRY_S, RETRY_S_MAX)
            node.failed = version
            if not self._healthy():
                self._refuse_unverified(run, version, cause)

    def _refuse_unverified(self, run: str, version: PolicyVersion, cause: str) -> None:
        if version not in self.verified and version not in self.rejected:
            self.rejected.add(version)
            self.refused.append(Refused(run, version, cause))

    def lost(self, node_id: str) -> None:
        """Record that the stream of a node broke. It may reconnect within the grace period."""
        if node_id in self.nodes:
            self.nodes[node_id].connected = False

    def left(self, node_id: str) -> None:
        """Record the last report of a node that leaves cleanly."""
        self.nodes[node_id].left = True
        self.nodes[node_id].cause = LEFT

    def drain(self, node_id: str) -> None:
        """Give the node no new work."""
        self.nodes[node_id].draining = True

    def usable(self, kind: NodeKind) -> list[Node]:
        """Return usable nodes of a kind, by id."""
        ready = (n for n in self.nodes.values() if n.kind is kind and n.state is NodeState.READY)
        return sorted(ready, key=lambda n: n.node_id)

    def feeders(self, node_id: str, version: PolicyVersion) -> list[Node]:
        """Return the nodes from which a node fetches a version before it asks the depot, best first.

        The nodes that fetch a version at the same time form a line by id, in which each forwards the chunks that it has
        stored. So the depot sends a version once, and every link carries it once. The second feeder helps when the
        first fails. A node that comes later fetches from those that have the version.
        """
        line = []
        for node in sorted(self._healthy(), key=lambda n: n.node_id):
            has = version in (node.active, node.prepared, *node.held)
            if node.node_id != node_id and (
                has or (node.ordered == (WeightVerb.PREPARE, version) and node.node_id < node_id)
            ):
                line.append(node)
        before = [n for n in line if n.node_id < node_id]
        return [*reversed(before), *reversed(line[len(before) :])][:FEEDERS_MAX]

    def next_deadline(self) -> float | None:
        """Return the earliest time at which a missing heartbeat changes the state of a node."""
        moments = []
        for node in self.nodes.values():
            if node.state is not NodeState.DEAD:
                moments.append(node.last_seen + self.config.suspect_after_s)
                moments.append(node.last_seen + self.config.dead_after_s)
        return min(moments, default=None)

    def plan(self, goals: Mapping[str, WeightGoal], now: float) -> list[FleetEvent]:
        """Update every node and return what follows: state changes, removed nodes, weight commands, rejected
        versions."""
        goals = {
            run: replace(
                g, versions=[v for v in g.versions if v not in self.rejected], kept_steps=self.config.keep_steps
            )
            for run, g in goals.items()
        }
        events: list[FleetEvent] = []
        for node in sorted(self.nodes.values(), key=lambda n: n.node_id):
            goal = goals.get(run_of(node, goals))
            state = self._judge(node, goal, now)
            if state is not node.state:
                node.state = state
                events.append(StateChanged(node.node_id, node.kind, state, node.cause))
                if state is NodeState.DEAD:
                    events.append(NodeDied(node.node_id))
            if goal is not None and node.kind is NodeKind.INFERENCE:
                events.extend(self._order(node, goals, goal, now))
        events.extend(self.refused)
        self.refused = []
        self._forget_dead(now)
        return events

    def _judge(self, node: Node, goal: WeightGoal | None, now: float) -> NodeState:
        silent_s = now - node.last_seen
        if node.state is NodeState.DEAD or node.left or silent_s >= self.config.dead_after_s:
            return NodeState.DEAD
        if node.state is NodeState.QUARANTINED:
            return NodeState.QUARANTINED
        if node.contradicted or not node.connected or silent_s >= self.config.suspect_after_s:
            return NodeState.SUSPECT
        if node.draining:
            return NodeState.DRAINING
        if node.kind is not NodeKind.INFERENCE:
            return NodeState.READY
        if node.active is None:
            return NodeState.JOINING
        if goal is None or node.active not in goal.versions:
            return NodeState.STALE  # weights of another run have steps like ours, but they are not ours
        evaluated = (node.active.step, node.active.incarnation) in goal.pins  # it serves the evaluation that delays it
        fresh = age(node.active) >= (goal.incarnation, goal.step_min)
        return NodeState.READY if fresh or evaluated else NodeState.STALE

    def _order(self, node: Node, goals: Mapping[str, WeightGoal], goal: WeightGoal, now: float) -> Iterable[FleetEvent]:
        """Return the next weight command for a node, if any."""
        wanted, retain = choose(node, goal)
        if wanted != node.failed:
            node.failures, node.failed, node.retry_at = 0, None, now
        if node.state not in (NodeState.JOINING, NodeState.STALE, NodeState.READY) or now < node.retry_at:
            return
        if wanted is None or wanted == node.active:
            return
        if node.ordered is not None and now < node.ordered_until:
            return
        if node.prepared is not None and node.prepared != wanted:
            yield SendWeights(node.node_id, WeightVerb.DISCARD, node.prepared)
            node.prepared = None
        # Known before the node has prepared it: evaluations pin a version when it is the newest published one, so no
        # evaluation of the weights that the node serves now can begin until then.
        may_activate = wanted in self.verified or node.node_id == self._canary(wanted, goals, now)
        if node.prepared != wanted:
            yield self._command(
                node, WeightVerb.PREPARE, wanted, now, retain if may_activate else (), activate=may_activate
            )
        elif may_activate:
            yield self._command(node, WeightVerb.ACTIVATE, wanted, now, retain, activate=True)

    def _command(
        self,
        node: Node,
        verb: WeightVerb,
        version: PolicyVersion,
        now: float,
        retain: tuple[PolicyVersion, ...] = (),
        *,
        activate: bool,
    ) -> SendWeights:
        node.ordered, node.activates = (verb, version), activate
        if version not in node.commanded:
            node.commanded = [*node.commanded, version][-COMMANDED_MAX:]
        node.ordered_until = now + self.config.prepare_s_max
        return SendWeights(node.node_id, verb, version, retain, activate and verb is WeightVerb.PREPARE)

    def _canary(self, version: PolicyVersion, goals: Mapping[str, WeightGoal], now: float) -> str:
        """Return the id of the canary: the node with a command to activate `version`, else the first one by id of those
        that can take it now. A node that an evaluation delays cannot."""
        taking = [n for n in self._healthy() if (g := goals.get(run_of(n, goals))) and choose(n, g)[0] == version]
        begun = [
            n
            for n in taking
            if n.activates and n.ordered is not None and n.ordered[1] == version and now < n.ordered_until
        ]
        return min((n.node_id for n in begun or taking), default="")

    def _healthy(self) -> list[Node]:
        """Return inference nodes that can take weights."""
        able = (NodeState.JOINING, NodeState.STALE, NodeState.READY)
        nodes = (n for n in self.nodes.values() if n.kind is NodeKind.INFERENCE and n.state in able)
        return [n for n in nodes if n.failures < PREPARE_TRIES_MAX]

    def _forget_dead(self, now: float) -> None:
        """Remove DEAD nodes from memory some time after they were listed as such."""
        for node in list(self.nodes.values()):
            if node.state is NodeState.DEAD and now - node.last_seen >= 10 * self.config.dead_after_s:
                self.departed[node.kind] = self.nodes.pop(node.node_id)


def run_of(node: Node, goals: Mapping[str, WeightGoal]) -> str:
    """Return the run whose weights a node serves: the one that it named, or the only live one."""
    for run in node.runs:
        if run in goals:
            return run
    candidates = [run for run, goal in goals.items() if not goal.ended] or list(goals)
    return candidates[0] if len(candidates) == 1 and not node.runs else ""


def contradiction(version: PolicyVersion, goal: WeightGoal) -> str:
    """Return why no node can have the weights of `version`; empty if one may have them, such as those of an older
    step."""
    known = [*goal.versions, *goal.refused]
    if version in known:
        return ""
    for other in known:
        if (other.policy, age(other)) == (version.policy, age(version)):
            return f"with digest {version.weights_digest!r}, but the one published is {other.weights_digest!r}"
    if known and known[-1].policy != version.policy:  # a run has one policy
        return f"but the policy of its run is {known[-1].policy!r}"
    if age(version) > max(map(age, known), default=(-1, -1)):
        return "which was not published"
    return ""


def choose(node: Node, goal: WeightGoal) -> tuple[PolicyVersion | None, tuple[PolicyVersion, ...]]:
    """Return the version that a node should activate next, and the versions that it must keep beside it.

    The next version is the oldest pinned one that it neither serves nor has passed, else the newest. It keeps the
    pinned versions that it serves. If its engine cannot hold them beside the next version, it stays at its active
    version. Of the kept steps it keeps those for which there is room, oldest first.
    """
    at = age(node.active) if node.active is not None and node.active in goal.versions else (-1, -1)
    pinned = [v for v in goal.versions if (v.step, v.incarnation) in goal.pins]
    served = [v for v in pinned if v == node.active or v in node.held]
    ahead = [v for v in pinned if v not in served and age(v) >= at]
    current = [v for v in goal.versions if v.incarnation == goal.incarnation]
    wanted = next(iter(ahead or current[-1:]), None)
    retain = tuple(v for v in served if v != wanted)
    if len(retain) >= node.versions_max:
        return node.active, ()
    kept = [v for v in goal.versions if v.step in goal.kept_steps and v not in (wanted, *retain)]
    return wanted, (*retain, *(v for v in kept if v == node.active or v in node.held))[: node.versions_max - 1]
