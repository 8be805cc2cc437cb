"""A run with a replay log needs gateways and learners that read `replay_of` of leased samples."""

from __future__ import annotations

from typing import Any

import pytest

from rollmesh.services.coordinator.core.fleet import Fleet, NodeKind
from rollmesh.services.coordinator.core.records import ReplaySpec
from rollmesh.services.coordinator.runs import Runs
from rollmesh.shared.domain.protocol import PROTOCOL, UNREPORTED, ProtocolVersion
from rollmesh.shared.errors import NotReady
from tests.sim.world import endless_spec

REPLAY = ReplaySpec(max_staleness=4, share=0.5, capacity_groups=8)


def check(kind: NodeKind, protocol: ProtocolVersion, replay: ReplaySpec | None) -> None:
    fleet = Fleet()
    fleet.joined(node_id="node-0", kind=kind, address="a", capacity=8, runs=(), active=None, now=0.0, protocol=protocol)
    runs: Any = Runs.__new__(Runs)
    runs._fleet = fleet
    Runs._check_nodes(runs, endless_spec(batch_groups=4, group_size=2, replay=replay))


@pytest.mark.parametrize("kind", [NodeKind.GATEWAY, NodeKind.LEARNER])
def test_a_run_with_a_replay_log_is_refused_while_an_older_node_would_ignore_it(kind: NodeKind) -> None:
    with pytest.raises(NotReady, match="node-0 has 1.0; upgrade it"):
        check(kind, UNREPORTED, REPLAY)


@pytest.mark.parametrize(
    ("kind", "protocol", "replay"),
    [
        (NodeKind.GATEWAY, PROTOCOL, REPLAY),
        (NodeKind.ROLLOUT, UNREPORTED, REPLAY),
        (NodeKind.LEARNER, UNREPORTED, None),
    ],
)
def test_other_runs_and_nodes_are_not_concerned(
    kind: NodeKind, protocol: ProtocolVersion, replay: ReplaySpec | None
) -> None:
    check(kind, protocol, replay)
