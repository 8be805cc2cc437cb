"""What a coordinator reports of its fleet."""

from rollmesh.services.coordinator.metrics import NODES
from rollmesh.services.coordinator.readings import _nodes
from rollmesh.shared.telemetry.metrics import Reading
from rollmesh.v1 import coordinator_pb2 as pb


def test_an_empty_fleet_is_reported_so_that_no_alert_takes_the_coordinator_for_absent() -> None:
    assert _nodes([]) == [Reading(NODES, 0, ("learner", "ready"))]
    depot = pb.FleetNode(kind=pb.NODE_KIND_DEPOT, state=pb.NODE_STATE_READY)
    assert _nodes([depot, depot]) == [Reading(NODES, 2, ("depot", "ready"))]
