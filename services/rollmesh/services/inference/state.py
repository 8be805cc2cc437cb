"""What the parts of an inference node share: the engine, who may be served, and the gate before unverified weights."""

from __future__ import annotations

from collections.abc import Callable

from rollmesh.services.inference.engine import Engine
from rollmesh.services.inference.gate import VersionGate
from rollmesh.shared.errors import (
    Draining,
    InvalidInput,
    MeshError,
    StaleWeights,
    Unimplemented,
    UnknownEndpoint,
    UnknownPolicy,
)
from rollmesh.shared.versions import PolicyVersion
from rollmesh.v1 import inference_pb2

Target = inference_pb2.Target


class NodeState:
    """One per node. `policy` is the one whose weights it serves."""

    def __init__(self, engine: Engine, *, node_id: str, policy: str) -> None:
        self.engine = engine
        self.node_id = node_id
        self.policy = policy
        self.gate = VersionGate()
        self.draining = False
        self.num_live = 0
        """Requests of all streams that the engine has."""
        self._on_swap: set[Callable[[PolicyVersion], None]] = set()

    @property
    def active(self) -> PolicyVersion | None:
        """The verified active version; None before the first, during a verdict, and in quarantine."""
        active = self.engine.active
        return active if active is not None and self.gate.admits(active) and self.gate.failure is None else None

    def listen_swap(self, listener: Callable[[PolicyVersion], None]) -> None:
        """`listener` is called just before the engine goes over to another version."""
        self._on_swap.add(listener)

    def unlisten_swap(self, listener: Callable[[PolicyVersion], None]) -> None:
        self._on_swap.discard(listener)

    def announce_swap(self, version: PolicyVersion) -> None:
        """Holds the new version back and ends what is pinned to another."""
        self.gate.hold(version)
        for listener in list(self._on_swap):
            listener(version)

    def check_target(self, target: Target) -> PolicyVersion:
        """The version that would serve `target` now. Raises the refusal of one that may not be served here."""
        if self.gate.failure is not None:
            raise self.gate.failure
        if self.draining:
            raise Draining(f"node {self.node_id} is leaving; go to another node", node=self.node_id)
        self._check_model(target)
        active = self.engine.active
        if active is None:
            raise StaleWeights(f"node {self.node_id} has no weights yet; go to another node", node=self.node_id)
        if (wrong := mismatch(target, active)) is not None:
            raise wrong
        return active

    def _check_model(self, target: Target) -> None:
        if target.WhichOneof("model") == "endpoint":
            raise UnknownEndpoint(f"endpoint {target.endpoint!r} is not served here; use a policy of the run")
        if (target.policy or "main") != self.policy:
            raise UnknownPolicy(f"node {self.node_id} serves policy {self.policy!r}, not {target.policy!r}")


def mismatch(target: Target, active: PolicyVersion) -> MeshError | None:
    """The refusal of `target` by weights `active`; None if they may serve it."""
    if target.selector == Target.SELECTOR_SESSION_PINNED:
        return Unimplemented("SESSION_PINNED is not implemented; use EXACT with the version of the first answer")
    if target.selector not in (
        Target.SELECTOR_UNSPECIFIED,
        Target.SELECTOR_LATEST,
        Target.SELECTOR_AT_LEAST,
        Target.SELECTOR_EXACT,
    ):
        return InvalidInput(f"target.selector: {target.selector} is unknown to this node")
    wanted = f"step {target.step} of incarnation {target.incarnation}"
    if target.selector == Target.SELECTOR_EXACT:
        fits = (active.step, active.incarnation) == (target.step, target.incarnation)
        wanted = f"exactly {wanted}"
    else:
        at_least = target.selector == Target.SELECTOR_AT_LEAST
        fits = not at_least or (active.step >= target.step and active.incarnation >= target.incarnation)
        wanted = f"{wanted} or newer"
    if fits:
        return None
    return StaleWeights(
        f"active is {active}, asked for {wanted}; go to another node",
        active=active,
        step=target.step,
        incarnation=target.incarnation,
    )
