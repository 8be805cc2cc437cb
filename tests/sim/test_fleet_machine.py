"""Seeded histories of the fleet: nodes with room for one to three versions, evaluations, lost commands, restarts.

Safety: a node never drops a version whose evaluation is open, and activates versions in order. Liveness: open
evaluations delay only the nodes that cannot hold their versions, and once they have ended, every node serves the newest
version.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field

import pytest

from rollmesh.services.coordinator.core.fleet import (
    Fleet,
    NodeKind,
    Refused,
    SendWeights,
    WeightGoal,
    WeightPhase,
    WeightVerb,
    age,
)
from rollmesh.shared.domain.engine_capabilities import EngineCapabilities
from rollmesh.shared.domain.versions import PolicyVersion

ACTIONS = 400
SEEDS = [int(s) for s in os.environ.get("ROLLMESH_SEEDS", "0,1,2,3,4,5,6,7").split(",")]


@dataclass
class SimNode:
    """An inference node: the versions that it serves, the active one first, and the one that it has prepared."""

    node_id: str
    versions_max: int
    prompt: bool = True
    """It activates what it has prepared if the command permits it. A node of an earlier release does not."""
    served: list[PolicyVersion] = field(default_factory=list)
    prepared: PolicyVersion | None = None
    commands: list[SendWeights] = field(default_factory=list)


@dataclass
class FleetWorld:
    """Drives a fleet of nodes, with faults on demand."""

    rng: random.Random
    fleet: Fleet = field(default_factory=Fleet)
    now: float = 0.0
    versions: list[PolicyVersion] = field(default_factory=list)
    num_published: int = 0
    pins: list[PolicyVersion] = field(default_factory=list)
    nodes: dict[str, SimNode] = field(default_factory=dict)

    def publish(self) -> None:
        """Announce the next version; every second one is evaluated."""
        step = self.num_published
        self.num_published += 1
        self.versions.append(PolicyVersion(policy="main", step=step, weights_digest=f"w{step}"))
        if step % 2 == 0 and len(self.pins) < 3:
            self.pins.append(self.versions[-1])

    def end_evaluation(self) -> None:
        if self.pins:
            self.pins.remove(self.rng.choice(self.pins))

    def join(self, node: SimNode) -> None:
        """Join, for the first time or after a restart, which loses the weights."""
        node.served, node.prepared, node.commands = [], None, []
        self.nodes[node.node_id] = node
        self.fleet.joined(
            node_id=node.node_id,
            kind=NodeKind.INFERENCE,
            address="",
            capacity=1,
            runs=(),
            active=None,
            now=self.now,
            capabilities=EngineCapabilities(versions_max=node.versions_max),
        )

    def plan(self) -> None:
        self.now += 1.0
        for node in self.nodes.values():
            self._report(node)
        pins = [(pin.step, pin.incarnation) for pin in self.pins]
        for event in self.fleet.plan({"r": WeightGoal(versions=self.versions, pins=pins)}, self.now):
            if isinstance(event, SendWeights):
                self.nodes[event.node_id].commands.append(event)
            elif isinstance(event, Refused):
                self.versions = [version for version in self.versions if version != event.version]
                self.pins = [pin for pin in self.pins if pin != event.version]

    def carry_out(self, node: SimNode, *, fails: bool = False) -> None:
        """Let a node carry out its next command."""
        if not node.commands:
            return
        command = node.commands.pop(0)
        if command.verb is WeightVerb.DISCARD:
            node.prepared = None
            return
        activates = command.verb is WeightVerb.ACTIVATE or (command.activate and node.prompt)
        if command.activate and node.prompt and not (fails and self.rng.random() < 0.5):
            node.prepared = command.version  # a failure is one of the activation, or one of the preparation
        phase = WeightPhase.ACTIVE if activates else WeightPhase.PREPARED
        if activates:
            self._check_canary(node, command.version)
        if fails or (phase is WeightPhase.ACTIVE and command.version not in (node.prepared, *node.served[:1])):
            phase = WeightPhase.FAILED
        elif phase is WeightPhase.PREPARED:
            node.prepared = command.version
        elif command.version not in node.served[:1]:
            self._swap(node, command)
        self._report(node)
        self.fleet.weights_reported(
            node.node_id, version=command.version, phase=phase, cause="simulated", run="r", now=self.now
        )

    def _check_canary(self, node: SimNode, version: PolicyVersion) -> None:
        """Check that no second node may activate a version before one has."""
        if version not in self.fleet.verified:
            for other in self.nodes.values():
                begun = [c for c in other.commands if c.version == version]
                may = any(c.activate or c.verb is WeightVerb.ACTIVATE for c in begun)
                assert other is node or not may, (
                    f"{node.node_id} and {other.node_id} may activate {version}, which no node has"
                )

    def _swap(self, node: SimNode, command: SendWeights) -> None:
        before, named = node.served, [old for old in node.served if old in command.retain]
        assert len(named) < node.versions_max, "the command names no more than fit"
        assert not before or age(command.version) >= age(before[0])
        running = [old for old in before if old not in named and self.rng.random() < 0.3]  # of pinned requests
        kept = [*named, *running][: node.versions_max - 1]
        node.served = [command.version, *sorted(set(kept) - {command.version}, key=age, reverse=True)]
        node.prepared = None
        for pin in self.pins:
            assert pin not in before or pin in node.served, f"{node.node_id} dropped {pin}, which is evaluated"

    def _report(self, node: SimNode) -> None:
        self.fleet.reported(
            node.node_id, num_running=0, num_waiting=0, waiting_for="", now=self.now, held=tuple(node.served[1:])
        )

    def settle(self) -> None:
        for _ in range(60 * len(self.nodes)):
            self.plan()
            for node in self.nodes.values():
                while node.commands:
                    self.carry_out(node)


@pytest.mark.parametrize("seed", SEEDS)
def test_evaluated_versions_stay_and_delay_only_nodes_that_cannot_hold_them(seed: int) -> None:
    print(f"replay with: ROLLMESH_SEEDS={seed} pytest tests/sim/test_fleet_machine.py")
    world = FleetWorld(random.Random(seed))
    world.publish()
    for number in range(4):
        world.join(SimNode(f"n{number}", versions_max=1 + number % 3, prompt=number != 2))
    for _ in range(ACTIONS):
        node = world.rng.choice(list(world.nodes.values()))
        match world.rng.randrange(12):
            case 0:
                world.publish()
            case 1:
                world.end_evaluation()
            case 2 if world.rng.random() < 0.2:
                world.join(node)
            case 3:
                world.carry_out(node, fails=world.rng.random() < 0.3)
            case 4 | 5 | 6 | 7:
                world.carry_out(node)
            case _:
                world.plan()
    world.settle()
    newest = world.versions[-1]
    for node in world.nodes.values():
        kept = [pin for pin in world.pins if pin in node.served[1:]]
        delayed = node.served[0] in world.pins and len(kept) + 1 >= node.versions_max
        assert node.served[0] == newest or delayed, f"{node} is delayed by {world.pins}"
    world.pins.clear()
    world.settle()
    assert {node.served[0] for node in world.nodes.values()} == {newest}
