"""State that the parts of an inference node share: the engine, the check of targets, and the gate before unverified weights."""

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


class ServingState:
    """State of one node. It serves the weights of `policy`."""

    def __init__(self, engine: Engine, *, node_id: str, policy: str) -> None:
        self.engine = engine
        self.node_id = node_id
        self.policy = policy
        self.gate = VersionGate()
        self.draining = False
        self.num_live = 0
        """Number of requests at the engine, over all streams."""
        self._on_swap: set[Callable[[PolicyVersion], None]] = set()

    @property
    def active(self) -> PolicyVersion | None:
        """The verified active version. None before the first one, during a verification, and in quarantine."""
        active = self.engine.active
        return active if active is not None and self.gate.admits(active) and self.gate.failure is None else None

    def listen_swap(self, listener: Callable[[PolicyVersion], None]) -> None:
        """Register a function that is called just before the engine swaps to another version."""
        self._on_swap.add(listener)

    def unlisten_swap(self, listener: Callable[[PolicyVersion], None]) -> None:
        self._on_swap.discard(listener)

    def announce_swap(self, version: PolicyVersion) -> None:
        """Hold back the new version, and end the requests that are pinned to another one."""
        self.gate.hold(version)
        for listener in list(self._on_swap):
            listener(version)

    def check_target(self, target: Target) -> PolicyVersion:
        """Return the version that serves `target` now. Raises the error of a target that this node may not serve."""
        if self.gate.failure is not None:
            raise self.gate.failure
        if self.draining:
            raise Draining(f"node {self.node_id} is draining; use another node", node=self.node_id)
        self._check_model(target)
        active = self.engine.active
        if active is None:
            raise StaleWeights(f"node {self.node_id} has no weights yet; use another node", node=self.node_id)
        if (wrong := mismatch(target, active)) is not None:
            raise wrong
        return active

    def _check_model(self, target: Target) -> None:
        if target.WhichOneof("model") == "endpoint":
            raise UnknownEndpoint(f"endpoint {target.endpoint!r} is not served here; use a policy of the run")
        if (target.policy or "main") != self.policy:
            raise UnknownPolicy(f"node {self.node_id} serves policy {self.policy!r}, not {target.policy!r}")


def mismatch(target: Target, active: PolicyVersion) -> MeshError | None:
    """Return the error if the weights `active` must not serve `target`, else None."""
    if target.selector == Target.SELECTOR_SESSION_PINNED:
        return Unimplemented("SESSION_PINNED is not implemented; use EXACT with the version of the first response")
    if target.selector not in (
        Target.SELECTOR_UNSPECIFIED,
        Target.SELECTOR_LATEST,
        Target.SELECTOR_AT_LEAST,
        Target.SELECTOR_EXACT,
    ):
        return InvalidInput(f"`target.selector` must be 0 to 4, got {target.selector}")
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
        f"the active version is {active}, requested was {wanted}; use another node",
        active=active,
        step=target.step,
        incarnation=target.incarnation,
    )
