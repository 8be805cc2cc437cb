"""What a coordinator reports of its fleet and of its run."""

from rollmesh.services.coordinator.metrics import NODES
from rollmesh.services.coordinator.readings import _nodes, _staleness
from rollmesh.shared.telemetry.metrics import Reading
from rollmesh.v1 import coordinator_pb2 as pb
from rollmesh.v1 import run_pb2


def test_an_empty_fleet_is_reported_so_that_no_alert_takes_the_coordinator_for_absent() -> None:
    assert _nodes([]) == [Reading(NODES, 0, ("learner", "ready"))]
    depot = pb.FleetNode(kind=pb.NODE_KIND_DEPOT, state=pb.NODE_STATE_READY)
    assert _nodes([depot, depot]) == [Reading(NODES, 2, ("depot", "ready"))]


def test_samples_without_tokens_of_the_policy_are_not_in_the_histogram_of_staleness() -> None:
    """An alert watches its mean, in which given solutions would hide that samples become older."""
    assert _staleness(run_pb2.PolicyState(trained_by_staleness={-1: 4, 0: 1, 2: 3})) == {0: 1, 2: 3}
