"""State that the parts of an inference node share: the engine, the check of targets, and the gate before unverified
weights."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection

from rollmesh.services.inference.engine import Engine
from rollmesh.services.inference.gate import VersionGate
from rollmesh.shared.domain.versions import DEFAULT_POLICY, PolicyVersion
from rollmesh.shared.errors import (
    Draining,
    MeshError,
    StaleWeights,
    Unimplemented,
    UnknownEndpoint,
    UnknownPolicy,
    field_error,
)
from rollmesh.v1 import inference_pb2

Target = inference_pb2.Target
SESSIONS_MAX = 65536
"""Most sessions whose version is stored; the least recently used one is evicted first, and then begins again."""
_PINNED = (Target.SELECTOR_SESSION_PINNED, Target.SELECTOR_RESPONSE_PINNED)
_AT_LEAST = (Target.SELECTOR_AT_LEAST, *_PINNED)
_SELECTORS = frozenset(Target.Selector.values())


class ServingState:
    """State of one node. It serves the weights of `policy`, or the frozen ones of `endpoint`."""

    def __init__(self, engine: Engine, *, node_id: str, policy: str, endpoint: str = "") -> None:
        self.engine = engine
        self.node_id = node_id
        self.policy = policy
        self.endpoint = endpoint
        self.gate = VersionGate()
        self.draining = False
        self.num_live = 0
        """Number of requests at the engine, over all streams."""
        self._on_swap: set[Callable[[Collection[PolicyVersion]], None]] = set()
        self._pins: Counter[PolicyVersion] = Counter()
        """Number of running requests that are pinned to each version."""
        self._sessions: OrderedDict[str, PolicyVersion] = OrderedDict()

    @property
    def active(self) -> PolicyVersion | None:
        """The verified active version. None before the first one, during a verification, and in quarantine."""
        active = self.engine.active
        return active if active is not None and self.gate.admits(active) and self.gate.failure is None else None

    @property
    def held(self) -> tuple[PolicyVersion, ...]:
        """The older versions that still serve requests which name them, newest first."""
        return self.engine.held[1:] if self.gate.failure is None else ()

    def listen_swap(self, listener: Callable[[Collection[PolicyVersion]], None]) -> None:
        """Register a function that is called just before the engine swaps, with the versions that it holds
        afterwards."""
        self._on_swap.add(listener)

    def unlisten_swap(self, listener: Callable[[Collection[PolicyVersion]], None]) -> None:
        self._on_swap.discard(listener)

    def announce_swap(
        self, version: PolicyVersion, retain: Collection[PolicyVersion] = ()
    ) -> tuple[PolicyVersion, ...]:
        """Hold back the new version, and end the requests that are pinned to a version which the swap drops.

        Return the older versions to keep: those of `retain`, then those of running pinned requests, newest first, as
        many as the engine can hold.
        """
        self.gate.hold(version)
        older = [held for held in self.engine.held if held != version]
        named = [held for held in older if held in retain]
        pinned = [held for held in older if held not in retain and self._pins[held]]
        kept = (*named, *pinned)[: self.engine.capabilities.versions_max - 1]
        for listener in list(self._on_swap):
            listener((version, *kept))
        return kept

    def pin(self, version: PolicyVersion) -> None:
        """Record that a running request is pinned to a version."""
        self._pins[version] += 1

    def unpin(self, version: PolicyVersion) -> None:
        """Record the end of a pinned request."""
        self._pins[version] -= 1
        if not self._pins[version]:
            del self._pins[version]

    def begin_session(self, session: str, version: PolicyVersion) -> None:
        """Record the version of a session, or that it is in use."""
        if session:
            self._sessions[session] = version
            self._sessions.move_to_end(session)
            if len(self._sessions) > SESSIONS_MAX:
                self._sessions.popitem(last=False)

    def check_target(self, target: Target, session: str = "") -> PolicyVersion | None:
        """Return the only version that may serve a request to `target`; None if the active one does at each step.

        Raises the error of a target that this node may not serve.
        """
        if self.gate.failure is not None:
            raise self.gate.failure
        if self.draining:
            raise Draining(f"node {self.node_id} is draining; use another node", node=self.node_id)
        self._check_model(target)
        active = self.engine.active
        if active is None:
            raise StaleWeights(f"node {self.node_id} has no weights yet; use another node", node=self.node_id)
        if target.selector == Target.SELECTOR_EXACT:
            return self._exact(target)
        version = self._pinned(target, active, session) if target.selector in _PINNED else None
        if (wrong := mismatch(target, version or active)) is not None:
            raise wrong
        return version

    def _exact(self, target: Target) -> PolicyVersion:
        for version in self.engine.held:
            if mismatch(target, version) is None:
                return version
        raise StaleWeights(
            f"this node serves [{', '.join(map(str, self.engine.held))}], requested was exactly step {target.step} of "
            f"incarnation {target.incarnation}; use another node",
            active=self.engine.active,
            step=target.step,
            incarnation=target.incarnation,
        )

    def _pinned(self, target: Target, active: PolicyVersion, session: str) -> PolicyVersion:
        """Return the version of a request that is pinned to the version that begins it."""
        if self.engine.capabilities.versions_max < 2:
            raise Unimplemented(
                f"the engine of node {self.node_id}, {type(self.engine).__name__}, has one set of weights, so an "
                "update would end a pinned response; set `versions_max` of inference.engine.options to 2 or more (the "
                "engine torch has this option), or use AT_LEAST"
            )
        if target.selector == Target.SELECTOR_RESPONSE_PINNED:
            return active
        version = self._sessions.get(session, active)
        if version not in self.engine.held:
            raise StaleWeights(
                f"session {session!r} began under {version}, which this node does not hold any more; begin a new "
                "session",
                active=active,
                step=version.step,
                incarnation=version.incarnation,
            )
        return version

    def _check_model(self, target: Target) -> None:
        serves = f"endpoint {self.endpoint!r}" if self.endpoint else f"policy {self.policy!r}"
        if target.WhichOneof("model") == "endpoint":
            if target.endpoint != self.endpoint:
                raise UnknownEndpoint(f"node {self.node_id} serves {serves}, not endpoint {target.endpoint!r}")
        elif self.endpoint or (target.policy or DEFAULT_POLICY) != self.policy:
            raise UnknownPolicy(f"node {self.node_id} serves {serves}, not policy {target.policy!r}")


def mismatch(target: Target, active: PolicyVersion) -> MeshError | None:
    """Return the error if the weights `active` must not serve `target`, else None."""
    selector = target.selector
    if selector not in _SELECTORS:
        return field_error("target.selector", "be in [0, 5]", selector)
    is_exact = selector == Target.SELECTOR_EXACT
    if is_exact:
        fits = (active.step, active.incarnation) == (target.step, target.incarnation)
    else:
        fits = selector not in _AT_LEAST or (active.step >= target.step and active.incarnation >= target.incarnation)
    if fits:
        return None
    wanted = f"step {target.step} of incarnation {target.incarnation}"
    wanted = f"exactly {wanted}" if is_exact else f"{wanted} or newer"
    return StaleWeights(
        f"the active version is {active}, requested was {wanted}; use another node",
        active=active,
        step=target.step,
        incarnation=target.incarnation,
    )
