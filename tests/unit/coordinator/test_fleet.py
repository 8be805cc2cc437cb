"""Node states and the weight rollout: canary first, pins in order, a node's failure separate from the version's."""

from __future__ import annotations

import pytest

from rollmesh.services.coordinator.core.fleet import (
    Fleet,
    FleetConfig,
    FleetEvent,
    NodeDied,
    NodeKind,
    NodeState,
    Refused,
    SendWeights,
    StateChanged,
    WeightGoal,
    WeightPhase,
    WeightVerb,
    run_of,
)
from rollmesh.shared.domain.engine_capabilities import EngineCapabilities
from rollmesh.shared.domain.protocol import PROTOCOL
from rollmesh.shared.domain.versions import PolicyVersion

CONFIG = FleetConfig(heartbeat_s=1.0, suspect_after_s=5.0, dead_after_s=15.0, prepare_s_max=120.0)


def version(step: int, incarnation: int = 0) -> PolicyVersion:
    return PolicyVersion(policy="main", step=step, incarnation=incarnation, weights_digest=f"w{step}")


def goal(*versions: PolicyVersion, pins: tuple[tuple[int, int], ...] = (), step_min: int = 0) -> dict[str, WeightGoal]:
    incarnation = versions[-1].incarnation if versions else 0
    return {"r": WeightGoal(versions=versions, pins=pins, step_min=step_min, incarnation=incarnation)}


def fleet_of(*names: str, kind: NodeKind = NodeKind.INFERENCE, versions_max: int = 0) -> Fleet:
    fleet = Fleet(CONFIG)
    can = EngineCapabilities(versions_max=versions_max) if versions_max else None
    for name in names:
        fleet.joined(
            node_id=name, kind=kind, address="127.0.0.1:1", capacity=1, runs=(), active=None, now=0.0, capabilities=can
        )
    return fleet


def commands(events: list[FleetEvent]) -> list[tuple[str, WeightVerb, int]]:
    return [(e.node_id, e.verb, e.version.step) for e in events if isinstance(e, SendWeights)]


def answer(fleet: Fleet, node_id: str, phase: WeightPhase, of: PolicyVersion, now: float = 0.0) -> None:
    fleet.weights_reported(node_id, version=of, phase=phase, cause="because", run="r", now=now)


def state_of(fleet: Fleet, node_id: str) -> NodeState:
    return fleet.nodes[node_id].state


def serve(fleet: Fleet, node_id: str, of: PolicyVersion) -> None:
    """Make one node serve `of`, whatever the plan is."""
    answer(fleet, node_id, WeightPhase.PREPARED, of)
    answer(fleet, node_id, WeightPhase.ACTIVE, of)


def test_canary_activates_before_the_others() -> None:
    fleet, v = fleet_of("a", "b"), version(0)
    assert commands(fleet.plan(goal(v), 0.0)) == [("a", WeightVerb.PREPARE, 0), ("b", WeightVerb.PREPARE, 0)]
    answer(fleet, "a", WeightPhase.PREPARED, v)
    answer(fleet, "b", WeightPhase.PREPARED, v)
    assert commands(fleet.plan(goal(v), 0.1)) == [("a", WeightVerb.ACTIVATE, 0)]
    assert commands(fleet.plan(goal(v), 0.2)) == []
    answer(fleet, "a", WeightPhase.ACTIVE, v)
    assert commands(fleet.plan(goal(v), 0.3)) == [("b", WeightVerb.ACTIVATE, 0)]


# A canary that activates what it has prepared -------------------------------------------------------------------------


def prompt(events: list[FleetEvent]) -> dict[str, list[int]]:
    """Return node -> retained steps of the commands to activate a version as soon as it is prepared."""
    return {e.node_id: [old.step for old in e.retain] for e in events if isinstance(e, SendWeights) and e.activate}


def test_canary_may_activate_with_its_preparation_and_the_others_may_not() -> None:
    fleet, old, v = fleet_of("a", "b"), version(0), version(1)
    for node_id in ("a", "b"):
        serve(fleet, node_id, old)
    events = fleet.plan(goal(old, v), 0.0)
    assert commands(events) == [("a", WeightVerb.PREPARE, 1), ("b", WeightVerb.PREPARE, 1)]
    assert prompt(events) == {"a": []}
    answer(fleet, "b", WeightPhase.PREPARED, v)
    assert commands(fleet.plan(goal(old, v), 0.1)) == [], "b waits for the verdict of a"
    answer(fleet, "a", WeightPhase.ACTIVE, v)
    assert commands(fleet.plan(goal(old, v), 0.2)) == [("b", WeightVerb.ACTIVATE, 1)]


def test_node_that_comes_after_the_verdict_activates_what_it_has_prepared() -> None:
    fleet, v = fleet_of("a"), version(1)
    serve(fleet, "a", v)
    fleet.joined(node_id="0", kind=NodeKind.INFERENCE, address="", capacity=1, runs=(), active=None, now=0.0)
    assert prompt(fleet.plan(goal(v), 0.0)) == {"0": []}


def test_canary_of_an_earlier_release_gets_a_command_to_activate() -> None:
    fleet, v = fleet_of("a", "b"), version(1)
    assert prompt(fleet.plan(goal(v), 0.0)) == {"a": []}
    answer(fleet, "b", WeightPhase.PREPARED, v)
    answer(fleet, "a", WeightPhase.PREPARED, v)
    assert commands(fleet.plan(goal(v), 0.1)) == [("a", WeightVerb.ACTIVATE, 1)]


@pytest.mark.parametrize("phase", [WeightPhase.PROBE_MISMATCH, WeightPhase.FAILED])
def test_no_other_node_activates_a_version_before_a_canary_has_passed(phase: WeightPhase) -> None:
    """A canary with wrong probes rejects the version. One that cannot prepare it, or fails between the two, is followed
    by another."""
    fleet, old, v = fleet_of("a", "b"), version(0), version(1)
    for node_id in ("a", "b"):
        serve(fleet, node_id, old)
    fleet.plan(goal(old, v), 0.0)
    answer(fleet, "b", WeightPhase.PREPARED, v)
    for tries in range(3):
        assert commands(fleet.plan(goal(old, v), 0.1)) == []
        answer(fleet, "a", phase, v, now=0.0)
        for node_id in ("a", "b"):
            fleet.reported(node_id, num_running=0, num_waiting=0, waiting_for="", now=10.0)
        if phase is WeightPhase.PROBE_MISMATCH:
            break
        if tries < 2:
            assert prompt(fleet.plan(goal(old, v), 10.0)) == {"a": []}
    events = fleet.plan(goal(old, v), 10.1)
    refused = [e for e in events if isinstance(e, Refused)]
    if phase is WeightPhase.PROBE_MISMATCH:
        assert refused == [Refused("r", v, "because")]
        assert all(verb is not WeightVerb.ACTIVATE for _, verb, _ in commands(events))
    else:
        assert not refused
        assert ("b", WeightVerb.ACTIVATE, 1) in commands(events), "b is the next canary"
        assert prompt(events) == {}
    assert fleet.nodes["b"].active == old


def test_canary_that_dies_before_it_reports_is_followed_by_another() -> None:
    fleet, v = fleet_of("a", "b"), version(1)
    fleet.plan(goal(v), 0.0)
    answer(fleet, "b", WeightPhase.PREPARED, v)
    fleet.lost("a")
    assert commands(fleet.plan(goal(v), 0.1)) == [("b", WeightVerb.ACTIVATE, 1)]
    fleet.joined(node_id="a", kind=NodeKind.INFERENCE, address="", capacity=1, runs=(), active=None, now=0.2)
    events = fleet.plan(goal(v), 0.2)
    assert commands(events) == [("a", WeightVerb.PREPARE, 1)]
    assert prompt(events) == {}, "b is the canary now"
    answer(fleet, "b", WeightPhase.PROBE_MISMATCH, v)
    answer(fleet, "a", WeightPhase.PREPARED, v)
    assert all(verb is not WeightVerb.ACTIVATE for _, verb, _ in commands(fleet.plan(goal(v), 0.3)))


def test_late_result_of_an_earlier_command_does_not_let_a_second_node_activate() -> None:
    fleet, old, v = fleet_of("a", "b"), version(0), version(1)
    for node_id in ("a", "b"):
        serve(fleet, node_id, old)
    fleet.plan(goal(old, v), 0.0)
    answer(fleet, "b", WeightPhase.PREPARED, v)
    answer(fleet, "a", WeightPhase.ACTIVE, old)
    assert prompt(fleet.plan(goal(old, v), 0.1)) == {"a": []}, "the same command again, to the same node"
    assert commands(fleet.plan(goal(old, v), 0.2)) == []


def test_evaluation_that_begins_while_the_canary_works_pins_the_version_of_the_command() -> None:
    """Only the newest version is ever pinned, so a pin that comes now is at the version of the command or after it."""
    fleet = fleet_of("a")
    serve(fleet, "a", version(9))
    assert prompt(fleet.plan(goal(version(9), version(10)), 0.0)) == {"a": []}
    later = goal(version(9), version(10), version(11), pins=((10, 0), (11, 0)))
    assert commands(fleet.plan(later, 0.1)) == []
    answer(fleet, "a", WeightPhase.ACTIVE, version(10))
    assert commands(fleet.plan(later, 0.2)) == [], "10 is being evaluated"
    assert commands(fleet.plan(goal(version(10), version(11), pins=((11, 0),)), 0.3)) == [("a", WeightVerb.PREPARE, 11)]


def test_canary_keeps_the_evaluated_version_that_it_serves() -> None:
    fleet = fleet_of("a", versions_max=2)
    serve(fleet, "a", version(10))
    assert prompt(fleet.plan(goal(version(10), version(11), pins=((10, 0),)), 0.0)) == {"a": [10]}


def test_node_is_ready_only_with_admissible_weights() -> None:
    fleet = fleet_of("a")
    fleet.plan(goal(version(0)), 0.0)
    assert state_of(fleet, "a") is NodeState.JOINING
    serve(fleet, "a", version(0))
    fleet.plan(goal(version(0)), 0.1)
    assert [n.node_id for n in fleet.usable(NodeKind.INFERENCE)] == ["a"]
    fleet.plan(goal(version(0), version(3), step_min=1), 0.2)
    assert state_of(fleet, "a") is NodeState.STALE


def test_probe_mismatch_of_the_canary_refuses_the_version() -> None:
    """The other node keeps its weights, also while the run has not recorded the rejection and still announces the
    version."""
    fleet, old, v = fleet_of("a", "b"), version(0), version(1)
    for node_id in ("a", "b"):
        serve(fleet, node_id, old)
    fleet.plan(goal(old, v), 0.0)
    for node_id in ("a", "b"):
        answer(fleet, node_id, WeightPhase.PREPARED, v)
    assert commands(fleet.plan(goal(old, v), 0.1)) == [("a", WeightVerb.ACTIVATE, 1)]
    answer(fleet, "a", WeightPhase.PROBE_MISMATCH, v)
    events = fleet.plan(goal(old, v), 0.2)
    assert [e for e in events if isinstance(e, Refused)] == [Refused("r", v, "because")]
    assert state_of(fleet, "a") is NodeState.QUARANTINED
    assert all(verb is not WeightVerb.ACTIVATE for _, verb, _ in commands([*events, *fleet.plan(goal(old, v), 0.3)]))
    assert fleet.nodes["b"].active == old
    assert state_of(fleet, "b") is NodeState.READY


def test_probe_mismatch_after_verification_is_the_nodes_trouble() -> None:
    fleet, v = fleet_of("a", "b"), version(1)
    serve(fleet, "a", v)
    answer(fleet, "b", WeightPhase.PROBE_MISMATCH, v)
    events = fleet.plan(goal(v), 0.0)
    assert not [e for e in events if isinstance(e, Refused)]
    assert [n.node_id for n in fleet.usable(NodeKind.INFERENCE)] == ["a"]


def test_failing_canary_hands_its_place_to_the_next() -> None:
    fleet, v = fleet_of("a", "b"), version(0)
    fleet.plan(goal(v), 0.0)
    answer(fleet, "b", WeightPhase.PREPARED, v)
    for _ in range(3):
        answer(fleet, "a", WeightPhase.FAILED, v)
    assert commands(fleet.plan(goal(v), 1.0)) == [("b", WeightVerb.ACTIVATE, 0)]


def test_version_that_no_node_can_prepare_is_refused() -> None:
    fleet, v = fleet_of("a"), version(0)
    fleet.plan(goal(v), 0.0)
    for _ in range(3):
        answer(fleet, "a", WeightPhase.FAILED, v)
    assert any(isinstance(e, Refused) for e in fleet.plan(goal(v), 1.0))


def test_weights_that_a_node_can_never_load_are_refused_without_another_try_once_all_nodes_say_so() -> None:
    fleet, v = fleet_of("a", "b"), version(0)
    fleet.plan(goal(v), 0.0)
    for node_id, refused in (("a", False), ("b", True)):
        fleet.weights_reported(node_id, version=v, phase=WeightPhase.FAILED, cause="NaN", run="r", now=0.0, final=True)
        assert any(isinstance(e, Refused) for e in fleet.plan(goal(v), 0.1)) is refused
    assert state_of(fleet, "a") is not NodeState.QUARANTINED, "the node is as good as before"


def test_failed_preparation_is_retried_after_a_back_off() -> None:
    fleet, v = fleet_of("a"), version(0)
    fleet.plan(goal(v), 0.0)
    answer(fleet, "a", WeightPhase.FAILED, v, now=0.0)
    assert commands(fleet.plan(goal(v), 1.9)) == []
    assert commands(fleet.plan(goal(v), 2.0)) == [("a", WeightVerb.PREPARE, 0)]


def test_pinned_version_is_not_run_past() -> None:
    fleet = fleet_of("a")
    serve(fleet, "a", version(10))
    pinned = goal(version(10), version(11), pins=((10, 0),))
    assert commands(fleet.plan(pinned, 0.0)) == []
    assert commands(fleet.plan(goal(version(10), version(11)), 0.1)) == [("a", WeightVerb.PREPARE, 11)]


def test_node_that_an_evaluation_holds_below_the_admissible_step_serves_the_evaluation() -> None:
    fleet = fleet_of("a")
    serve(fleet, "a", version(0))
    fleet.plan(goal(version(0), version(3), step_min=1, pins=((0, 0),)), 0.0)
    assert state_of(fleet, "a") is NodeState.READY
    fleet.plan(goal(version(0), version(3), step_min=1), 0.1)
    assert state_of(fleet, "a") is NodeState.STALE


def test_pinned_version_is_activated_before_newer_ones() -> None:
    fleet = fleet_of("a")
    serve(fleet, "a", version(9))
    events = fleet.plan(goal(version(9), version(10), version(11), pins=((10, 0),)), 0.0)
    assert commands(events) == [("a", WeightVerb.PREPARE, 10)]


def activations(events: list[FleetEvent]) -> list[tuple[int, list[int]]]:
    """Return (step, retained steps) of the commands to activate."""
    orders = [e for e in events if isinstance(e, SendWeights) and e.verb is WeightVerb.ACTIVATE]
    return [(e.version.step, [old.step for old in e.retain]) for e in orders]


def holds(fleet: Fleet, node_id: str, *held: int) -> None:
    """Make one node report the older versions that it still serves."""
    versions = tuple(map(version, held))
    fleet.reported(node_id, num_running=0, num_waiting=0, waiting_for="", now=0.0, held=versions)


def test_node_passes_a_pinned_version_that_it_can_keep() -> None:
    fleet = fleet_of("a", versions_max=2)
    serve(fleet, "a", version(10))
    pinned = goal(version(10), version(11), pins=((10, 0),))
    assert commands(fleet.plan(pinned, 0.0)) == [("a", WeightVerb.PREPARE, 11)]
    answer(fleet, "a", WeightPhase.PREPARED, version(11))
    assert activations(fleet.plan(pinned, 0.1)) == [(11, [10])]
    holds(fleet, "a", 10)
    answer(fleet, "a", WeightPhase.ACTIVE, version(11))
    further = goal(version(10), version(11), version(12), pins=((10, 0),))
    assert commands(fleet.plan(further, 0.2)) == [("a", WeightVerb.PREPARE, 12)]
    answer(fleet, "a", WeightPhase.PREPARED, version(12))
    assert activations(fleet.plan(further, 0.3)) == [(12, [10])], (
        "the evaluated version stays, the one in between does not"
    )


def test_node_drops_a_version_when_its_evaluation_has_ended() -> None:
    fleet = fleet_of("a", versions_max=2)
    serve(fleet, "a", version(11))
    holds(fleet, "a", 10)
    after = goal(version(10), version(11), version(12))
    fleet.plan(after, 0.0)
    answer(fleet, "a", WeightPhase.PREPARED, version(12))
    assert activations(fleet.plan(after, 0.1)) == [(12, [])]


def test_node_waits_at_a_pinned_version_if_the_pinned_ones_do_not_fit() -> None:
    fleet = fleet_of("a", versions_max=2)
    serve(fleet, "a", version(12))
    holds(fleet, "a", 10)
    versions = (version(10), version(12), version(13))
    assert commands(fleet.plan(goal(*versions, pins=((10, 0), (12, 0))), 0.0)) == []
    assert commands(fleet.plan(goal(*versions, pins=((12, 0),)), 0.1)) == [("a", WeightVerb.PREPARE, 13)]
    answer(fleet, "a", WeightPhase.PREPARED, version(13))
    assert activations(fleet.plan(goal(*versions, pins=((12, 0),)), 0.2)) == [(13, [12])]


def test_pinned_versions_are_activated_in_order_also_by_nodes_that_can_keep_them() -> None:
    fleet = fleet_of("a", versions_max=3)
    serve(fleet, "a", version(9))
    pinned = goal(version(9), version(10), version(11), version(12), pins=((10, 0), (11, 0)))
    for step, kept in ((10, []), (11, [10]), (12, [10, 11])):
        assert commands(fleet.plan(pinned, 0.0)) == [("a", WeightVerb.PREPARE, step)]
        answer(fleet, "a", WeightPhase.PREPARED, version(step))
        assert activations(fleet.plan(pinned, 0.1)) == [(step, kept)]
        holds(fleet, "a", *kept)
        answer(fleet, "a", WeightPhase.ACTIVE, version(step))
    assert commands(fleet.plan(pinned, 0.2)) == []


def test_a_node_that_an_evaluation_delays_is_not_the_canary() -> None:
    fleet, pinned = fleet_of("a"), goal(version(10), version(11), pins=((10, 0),))
    can = EngineCapabilities(versions_max=2)
    for name in ("b", "c"):
        fleet.joined(
            node_id=name, kind=NodeKind.INFERENCE, address="", capacity=1, runs=(), active=None, now=0.0, capabilities=can
        )  # fmt: skip
    for name in ("a", "b", "c"):
        serve(fleet, name, version(10))
    assert commands(fleet.plan(pinned, 0.0)) == [("b", WeightVerb.PREPARE, 11), ("c", WeightVerb.PREPARE, 11)]
    answer(fleet, "b", WeightPhase.PREPARED, version(11))
    answer(fleet, "c", WeightPhase.PREPARED, version(11))
    assert commands(fleet.plan(pinned, 0.1)) == [("b", WeightVerb.ACTIVATE, 11)]
    fleet.plan(goal(version(10), version(11)), 0.2)
    answer(fleet, "a", WeightPhase.PREPARED, version(11))
    assert commands(fleet.plan(goal(version(10), version(11)), 0.3)) == [], "one canary at a time"
    answer(fleet, "b", WeightPhase.ACTIVE, version(11))
    assert len(commands(fleet.plan(goal(version(10), version(11)), 0.4))) == 2


def test_an_evaluated_version_that_a_node_lost_does_not_hold_it() -> None:
    fleet = fleet_of("a", versions_max=2)
    serve(fleet, "a", version(11))
    pinned = goal(version(10), version(11), version(12), pins=((10, 0),))
    fleet.plan(pinned, 0.0)
    answer(fleet, "a", WeightPhase.PREPARED, version(12))
    assert activations(fleet.plan(pinned, 0.1)) == [(12, [])]


def test_newer_incarnation_follows_however_low_its_step() -> None:
    fleet = fleet_of("a")
    serve(fleet, "a", version(7))
    events = fleet.plan(goal(version(7), version(4, incarnation=1)), 0.0)
    assert commands(events) == [("a", WeightVerb.PREPARE, 4)]
    assert state_of(fleet, "a") is NodeState.STALE


def test_superseded_preparation_is_discarded_first() -> None:
    fleet = fleet_of("a")
    answer(fleet, "a", WeightPhase.PREPARED, version(1))
    events = fleet.plan(goal(version(1), version(2)), 0.0)
    assert commands(events) == [("a", WeightVerb.DISCARD, 1), ("a", WeightVerb.PREPARE, 2)]


def test_a_command_without_a_reply_is_sent_again() -> None:
    fleet, v = fleet_of("a"), version(0)
    fleet.plan(goal(v), 0.0)
    fleet.reported("a", num_running=0, num_waiting=0, waiting_for="", now=120.0)
    assert commands(fleet.plan(goal(v), 120.0)) == [("a", WeightVerb.PREPARE, 0)]


def test_silent_node_is_suspect_then_dead_once() -> None:
    fleet = fleet_of("w", kind=NodeKind.ROLLOUT)
    fleet.plan({}, 4.9)
    assert state_of(fleet, "w") is NodeState.READY
    fleet.plan({}, 5.0)
    assert state_of(fleet, "w") is NodeState.SUSPECT
    assert NodeDied("w") in fleet.plan({}, 15.0)
    assert NodeDied("w") not in fleet.plan({}, 16.0)


def test_node_that_reconnects_in_time_is_used_again() -> None:
    fleet = fleet_of("w", kind=NodeKind.ROLLOUT)
    fleet.lost("w")
    fleet.plan({}, 1.0)
    assert state_of(fleet, "w") is NodeState.SUSPECT
    fleet.joined(node_id="w", kind=NodeKind.ROLLOUT, address="", capacity=1, runs=(), active=None, now=2.0)
    fleet.plan({}, 2.0)
    assert state_of(fleet, "w") is NodeState.READY


def test_a_node_that_leaves_is_removed_without_the_grace_period() -> None:
    fleet = fleet_of("w", kind=NodeKind.ROLLOUT)
    fleet.left("w")
    fleet.lost("w")
    events = fleet.plan({}, 0.1)
    assert NodeDied("w") in events
    assert state_of(fleet, "w") is NodeState.DEAD
    assert fleet.nodes["w"].cause == "left cleanly"
    assert not [e for e in events if isinstance(e, StateChanged) and e.state is NodeState.SUSPECT]


def test_a_node_that_left_may_join_again() -> None:
    fleet = fleet_of("w", kind=NodeKind.ROLLOUT)
    fleet.left("w")
    fleet.plan({}, 0.1)
    fleet.joined(node_id="w", kind=NodeKind.ROLLOUT, address="", capacity=1, runs=(), active=None, now=0.2)
    fleet.plan({}, 0.3)
    assert state_of(fleet, "w") is NodeState.READY


def test_weights_of_another_run_are_stale_however_high_their_step() -> None:
    fleet, theirs, ours = fleet_of("a"), version(30), version(0)
    serve(fleet, "a", theirs)
    fleet.plan(goal(theirs), 0.0)
    assert state_of(fleet, "a") is NodeState.READY
    assert commands(fleet.plan(goal(ours), 0.1)) == [("a", WeightVerb.PREPARE, 0)]
    assert state_of(fleet, "a") is NodeState.STALE
    serve(fleet, "a", ours)
    fleet.plan(goal(ours), 0.2)
    assert state_of(fleet, "a") is NodeState.READY


def test_a_run_that_has_ended_leaves_its_nodes_to_the_next() -> None:
    (node,) = fleet_of("a").nodes.values()
    live, over = WeightGoal(versions=()), WeightGoal(versions=(), ended=True)
    assert run_of(node, {"old": over, "new": live}) == "new"
    assert run_of(node, {"old": over}) == "old"
    assert run_of(node, {"one": live, "other": live}) == ""


def test_draining_node_gets_nothing_new() -> None:
    fleet = fleet_of("a")
    serve(fleet, "a", version(0))
    fleet.drain("a")
    assert commands(fleet.plan(goal(version(0), version(1)), 0.0)) == []
    assert fleet.usable(NodeKind.INFERENCE) == []


def test_nodes_that_fetch_a_version_form_a_line_and_late_ones_ask_those_that_have_it() -> None:
    fleet, v = fleet_of("b", "c", "d", "e"), version(1)
    fleet.plan(goal(v), 0.0)

    def feeders(node_id: str, of: PolicyVersion = v) -> list[str]:
        return [node.node_id for node in fleet.feeders(node_id, of)]

    assert [feeders(node_id) for node_id in "bcde"] == [[], ["b"], ["c", "b"], ["d", "c"]], "no node waits for itself"
    assert feeders("c", version(2)) == []
    for node_id in "bcde":
        serve(fleet, node_id, v)
    fleet.joined(node_id="a", kind=NodeKind.INFERENCE, address="127.0.0.1:1", capacity=1, runs=(), active=None, now=1.0)
    fleet.plan(goal(v), 1.0)
    assert feeders("a") == ["e", "d"]
    fleet.lost("e")
    fleet.plan(goal(v), 1.1)
    assert feeders("a") == ["d", "c"], "a node without a stream feeds no other"


# Nodes that report weights which they cannot have ---------------------------------------------------------------------


def report(fleet: Fleet, node_id: str, phase: WeightPhase, of: PolicyVersion, goals: dict[str, WeightGoal]) -> None:
    fleet.weights_reported(node_id, version=of, phase=phase, cause="", run="r", now=0.0, goal=goals["r"])


OTHER_DIGEST = PolicyVersion(policy="main", step=1, weights_digest="x")


@pytest.mark.parametrize("phase", [WeightPhase.PREPARED, WeightPhase.ACTIVE])
@pytest.mark.parametrize(
    ("lie", "cause"),
    [(OTHER_DIGEST, "with digest 'x', but the one published is 'w1'"), (version(2), "which was not published")],
)
def test_a_node_that_reports_weights_which_it_cannot_have_is_suspect(
    lie: PolicyVersion, cause: str, phase: WeightPhase
) -> None:
    fleet, goals = fleet_of("a", "b"), goal(version(0), version(1))
    serve(fleet, "a", version(1))
    serve(fleet, "b", version(0))
    fleet.plan(goals, 0.0)
    report(fleet, "b", phase, lie, goals)
    events = fleet.plan(goals, 0.1)
    assert state_of(fleet, "b") is NodeState.SUSPECT
    assert cause in fleet.nodes["b"].cause
    assert fleet.nodes["b"].cause.endswith("restart the node")
    assert commands(events) == []
    assert [n.node_id for n in fleet.usable(NodeKind.INFERENCE)] == ["a"]
    assert lie not in fleet.verified
    assert fleet.feeders("a", lie) == []
    report(fleet, "b", WeightPhase.ACTIVE, version(1), goals)  # the truth afterwards does not help
    fleet.plan(goals, 0.2)
    assert state_of(fleet, "b") is NodeState.SUSPECT


def test_a_suspect_node_is_used_again_after_a_restart_and_not_after_a_new_stream() -> None:
    fleet, goals = fleet_of("a"), goal(version(1))
    report(fleet, "a", WeightPhase.ACTIVE, OTHER_DIGEST, goals)
    for active, expected in ((version(1), NodeState.SUSPECT), (None, NodeState.JOINING)):
        fleet.joined(
            node_id="a", kind=NodeKind.INFERENCE, address="127.0.0.1:1", capacity=1, runs=(), active=active, now=0.0
        )
        fleet.plan(goals, 0.0)
        assert state_of(fleet, "a") is expected


def test_late_results_of_honest_nodes_are_no_contradiction() -> None:
    """Results of a command before the version was rejected, of a version too old to be kept, and of a run that has
    ended."""
    fleet = fleet_of("a")
    other = goal(OTHER_DIGEST)
    fleet.plan(other, 0.0)
    report(fleet, "a", WeightPhase.PREPARED, OTHER_DIGEST, goal(version(1), version(2)))
    rejected = {"r": WeightGoal(versions=[version(1)], refused=[version(2)])}
    report(fleet, "a", WeightPhase.PREPARED, version(2), rejected)
    report(fleet, "a", WeightPhase.ACTIVE, version(0), goal(version(1), version(2)))
    fleet.plan(goal(version(1), version(2)), 0.0)
    assert state_of(fleet, "a") is NodeState.STALE


# Endpoints ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("versions_max", "pins", "retained"), [(1, (), ()), (2, (), (0,)), (2, ((1, 0),), (1,)), (3, ((1, 0),), (1, 0))]
)
def test_a_kept_step_stays_as_far_as_the_engine_has_room_and_after_pinned_ones(
    versions_max: int, pins: tuple[tuple[int, int], ...], retained: tuple[int, ...]
) -> None:
    fleet = fleet_of("a", versions_max=versions_max)
    fleet.config = FleetConfig(keep_steps=(0,))
    serve(fleet, "a", version(1 if pins else 0))
    fleet.nodes["a"].held = (version(0),) if pins and versions_max > 1 else ()
    wanted = goal(version(0), version(1), version(2), pins=pins)
    fleet.plan(wanted, 0.0)
    answer(fleet, "a", WeightPhase.PREPARED, version(2))
    (sent,) = [event for event in fleet.plan(wanted, 0.1) if isinstance(event, SendWeights)]
    assert (sent.verb, sent.version.step) == (WeightVerb.ACTIVATE, 2)
    assert tuple(old.step for old in sent.retain) == retained


def test_a_node_of_an_endpoint_is_ready_at_once_and_gets_no_weights() -> None:
    fleet = fleet_of("endpoint-judge-0", kind=NodeKind.ENDPOINT)
    assert commands(fleet.plan(goal(version(0)), 0.0)) == []
    assert state_of(fleet, "endpoint-judge-0") is NodeState.READY
    assert fleet.usable(NodeKind.INFERENCE) == []


def test_a_fleet_knows_what_every_node_that_is_not_dead_knows() -> None:
    fleet = fleet_of("old")
    assert not fleet.knows(PROTOCOL), "a node that reports none has 1.0"
    fleet.nodes["old"].state = NodeState.DEAD
    assert fleet.knows(PROTOCOL)
