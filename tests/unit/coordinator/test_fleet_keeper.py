"""The keeper: an announced version and the answer of a node each lead to the next command without waiting for the period."""

from __future__ import annotations

import asyncio

from rollmesh.services.coordinator.core.fleet import FleetConfig, WeightGoal
from rollmesh.services.coordinator.fleet_keeper import FleetKeeper, NodeStream
from rollmesh.shared.clock import ManualClock
from rollmesh.shared.codec.trajectory import encode_version
from rollmesh.shared.versions import PolicyVersion
from rollmesh.v1 import coordinator_pb2 as pb

VERSION = PolicyVersion(policy="main", step=1, weights_digest="w1")


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
