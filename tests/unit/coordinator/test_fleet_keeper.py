"""The keeper: an announced version and the answer of a node each lead to the next command without waiting for the
period."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from rollmesh.services.coordinator.core.fleet import FleetConfig, WeightGoal
from rollmesh.services.coordinator.fleet_keeper import FleetKeeper, NodeStream
from rollmesh.shared.clock import ManualClock
from rollmesh.shared.codec.trajectory import encode_version
from rollmesh.shared.domain.protocol import PROTOCOL, ProtocolMismatch
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import InvalidInput
from rollmesh.v1 import coordinator_pb2 as pb

VERSION = PolicyVersion(policy="main", step=1, weights_digest="ab" * 32)


async def next_command(stream: NodeStream) -> pb.WeightCommand:
    """Return the next weight command. The clock does not advance."""
    async with asyncio.timeout(5):
        async for message in stream.messages():
            if message.HasField("weights"):
                return message.weights
    raise AssertionError("the stream has ended")


async def test_a_version_reaches_a_node_without_a_period_in_between() -> None:
    goals: dict[str, WeightGoal] = {}
    keeper = FleetKeeper(FleetConfig(), dict, lambda: goals, clock=ManualClock(), coordinator_id="c", commands_max=16)
    hello = pb.NodeHello(node_id="a", kind=pb.NODE_KIND_INFERENCE, address="127.0.0.1:1", runs=["r"])
    stream = keeper.join(hello)
    running = asyncio.create_task(keeper.run())
    goals["r"] = WeightGoal(versions=[VERSION])
    keeper.hurry()
    assert (await next_command(stream)).verb == pb.WeightCommand.VERB_PREPARE
    prepared = pb.WeightReport(version=encode_version(VERSION), phase=pb.WeightReport.PHASE_PREPARED)
    keeper.report(stream, pb.NodeReport(weights=[prepared]))
    assert (await next_command(stream)).verb == pb.WeightCommand.VERB_ACTIVATE
    running.cancel()
    await asyncio.wait([running])


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"step": -4}, r"`report.weights\[0\].version.step` must be >= 0, got -4"),
        ({"incarnation": -1}, "incarnation"),
        ({"policy": "a b"}, "policy"),
        ({"weights_digest": "w1"}, "weights_digest"),
        ({"phase": 9}, "phase"),
    ],
)
def test_a_weight_report_out_of_range_is_rejected_and_changes_nothing(changes: dict[str, Any], names: str) -> None:
    keeper = keeper_with(ManualClock())
    stream = keeper.join(pb.NodeHello(node_id="a", kind=pb.NODE_KIND_INFERENCE, address="127.0.0.1:1"))
    phase = changes.pop("phase", pb.WeightReport.PHASE_ACTIVE)
    version = encode_version(msgspec.structs.replace(VERSION, **changes))
    with pytest.raises(InvalidInput, match=names):
        keeper.report(stream, pb.NodeReport(weights=[pb.WeightReport(version=version, phase=phase)]))
    assert not keeper.nodes(None)[0].HasField("active")


def test_a_node_with_weights_of_a_policy_that_its_run_does_not_have_is_not_used() -> None:
    goals = {"r": WeightGoal(versions=[VERSION])}
    keeper = FleetKeeper(FleetConfig(), dict, lambda: goals, clock=ManualClock(), coordinator_id="c", commands_max=16)
    stream = keeper.join(pb.NodeHello(node_id="a", kind=pb.NODE_KIND_INFERENCE, address="127.0.0.1:1", runs=["r"]))
    other = encode_version(msgspec.structs.replace(VERSION, policy="other", step=0))
    keeper.report(stream, pb.NodeReport(weights=[pb.WeightReport(version=other, phase=pb.WeightReport.PHASE_ACTIVE)]))
    (node,) = keeper.nodes(None)
    assert not node.HasField("active")
    assert "for other@0" in node.cause
    assert "the policy of its run is 'main'" in node.cause


@pytest.mark.parametrize(
    ("ahead_s", "words"), [(90.0, "90 s ahead of"), (-90.0, "90 s behind"), (30.0, ""), (None, "")]
)
async def test_a_node_whose_clock_differs_by_more_than_a_minute_joins_with_a_warning(
    ahead_s: float | None, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    hello = pb.NodeHello(node_id="a", kind=pb.NODE_KIND_ROLLOUT, process=pb.ProcessInfo(host="h"))
    if ahead_s is not None:
        hello.wall_s = clock.wall_s() + ahead_s
    keeper = keeper_with(clock)
    welcome = await anext(keeper.join(hello).messages())
    assert welcome.welcome.wall_s == clock.wall_s()
    (node,) = keeper.nodes(None)
    assert node.clock_ahead_s == (ahead_s or 0.0)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert all(words in text and "h, host of a," in text for text in warnings)
    assert len(warnings) == bool(words)


@pytest.mark.parametrize("wall_s", [float("nan"), float("inf"), -1.0, 1e12])
async def test_a_clock_that_is_no_time_is_rejected(wall_s: float) -> None:
    hello = pb.NodeHello(node_id="a", kind=pb.NODE_KIND_ROLLOUT, wall_s=wall_s)
    with pytest.raises(InvalidInput, match="wall_s"):
        keeper_with(ManualClock()).join(hello)


def keeper_with(clock: ManualClock) -> FleetKeeper:
    return FleetKeeper(FleetConfig(), dict, dict, clock=clock, coordinator_id="c", commands_max=16)


def worker(minor: int | None) -> pb.NodeHello:
    """Return the hello of a worker that is this many minor versions newer; None: of one that reports no protocol."""
    hello = pb.NodeHello(node_id="rollout-a", kind=pb.NODE_KIND_ROLLOUT, process=pb.ProcessInfo(version="0.9"))
    if minor is not None:
        hello.protocol.major, hello.protocol.minor = PROTOCOL.major, PROTOCOL.minor + minor
    return hello


async def test_a_node_of_a_newer_protocol_is_rejected_and_listed_with_the_cause() -> None:
    clock = ManualClock()
    keeper = keeper_with(clock)
    with pytest.raises(ProtocolMismatch, match="upgrade the coordinator first"):
        keeper.join(worker(minor=1))
    (listed,) = keeper.nodes(None)
    assert (listed.state, listed.protocol.minor) == (pb.NODE_STATE_DEAD, PROTOCOL.minor + 1)
    assert listed.cause.startswith("rejected: node rollout-a (rollmesh 0.9) has protocol")
    keeper.join(worker(minor=0))  # the right release was installed
    await keeper.step()
    (listed,) = keeper.nodes(None)
    assert (listed.state, listed.cause, listed.protocol.minor) == (pb.NODE_STATE_READY, "", PROTOCOL.minor)


async def test_a_rejected_node_does_not_replace_the_one_with_its_name() -> None:
    keeper = keeper_with(ManualClock())
    stream = keeper.join(worker(minor=0))
    with pytest.raises(ProtocolMismatch):
        keeper.join(worker(minor=1))
    keeper.report(stream, pb.NodeReport(num_running=3))
    await keeper.step()
    (listed,) = keeper.nodes(None)
    assert (listed.state, listed.num_running, listed.cause) == (pb.NODE_STATE_READY, 3, "")


@pytest.mark.skipif(PROTOCOL.minor != 1, reason="only 1.1 accepts 1.0")
async def test_a_node_that_reports_no_protocol_is_accepted() -> None:
    keeper = keeper_with(ManualClock())
    keeper.join(worker(minor=None))
    await keeper.step()
    (listed,) = keeper.nodes(None)
    assert (listed.state, listed.protocol.major, listed.protocol.minor) == (pb.NODE_STATE_READY, 1, 0)
    assert not keeper.reads_variants("rollout-a")


async def test_a_worker_of_the_present_protocol_reads_variants() -> None:
    keeper = keeper_with(ManualClock())
    keeper.join(worker(minor=0))
    assert keeper.reads_variants("rollout-a")
