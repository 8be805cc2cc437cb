"""The choice of a node, rule by rule: session, prefix, load, version, state. No node is called."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc
import numpy as np
import pytest

from rollmesh.shared.clients.generated import Target
from rollmesh.shared.clients.inference_choice import PrefixAffinity
from rollmesh.shared.clients.inference_nodes import LOAD_S_MAX, KnownNode, NodePool, PendingRequest, RouterConfig
from rollmesh.shared.clients.inference_scoring import ScoringRequest
from rollmesh.shared.clients.inference_stream import StreamRequest
from rollmesh.shared.clock import ManualClock
from rollmesh.shared.codec.trajectory import encode_version
from rollmesh.shared.domain.trajectory import SamplingParams
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import StaleWeights, Unavailable
from rollmesh.shared.membership.fleet import KnownFleet
from rollmesh.v1 import coordinator_pb2, inference_pb2

READY = coordinator_pb2.NODE_STATE_READY


def prompt(seed: int, num: int = 640) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, num).astype(np.int32)


def fleet_node(node_id: str, step: int = 1, policy: str = "main", **fields: Any) -> coordinator_pb2.FleetNode:
    held = [PolicyVersion(policy=policy, step=old) for old in fields.pop("held", ())]
    return coordinator_pb2.FleetNode(
        **{
            "node_id": node_id,
            "address": f"{node_id}:1",
            "kind": coordinator_pb2.NODE_KIND_INFERENCE,
            "state": READY,
            "capacity": 8,
            "active": encode_version(PolicyVersion(policy=policy, step=step)),
            "held": map(encode_version, held),
            **fields,
        }
    )


class World:
    """A pool over a fleet of nodes that are never connected."""

    def __init__(self, *nodes: coordinator_pb2.FleetNode, **settings: Any) -> None:
        self.clock = ManualClock()
        self.fleet = KnownFleet(nodes)
        config = RouterConfig(**{"request_tokens": 256, **settings})
        self.choice = PrefixAffinity(config)
        self.pool = NodePool(self.fleet, self.clock, config, self._connect, self.choice)

    def _connect(self, address: str) -> grpc.aio.Channel:
        raise AssertionError(f"connected to {address}")

    def request(self, tokens: np.ndarray, session: str = "", target: Target | None = None) -> PendingRequest:
        return PendingRequest(
            token_ids=tokens,
            params=SamplingParams(max_tokens=4),
            target=target or Target(),
            session=session,
            priority=0,
            labels=inference_pb2.RequestLabels(),
            deadline_s=1e9,
        )

    async def send(self, tokens: np.ndarray, session: str = "", target: Target | None = None) -> str:
        """Return the id of the node that a request goes to."""
        return (await asyncio.wait_for(self.pool.take(self.request(tokens, session, target)), 5))[0]

    def node(self, node_id: str) -> KnownNode:
        return next(node for node in self.pool._nodes.values() if node.node_id == node_id)

    def load(self, node_id: str, num: int) -> None:
        """Let `num` requests of this process run at a node."""
        self.node(node_id).stream._live = {f"r{i}": StreamRequest(f"r{i}") for i in range(num)}

    def report(self, node_id: str, **load: Any) -> None:
        """Let a node report its load."""
        self.node(node_id).stream._note_load(inference_pb2.NodeLoad(**load))


# Session --------------------------------------------------------------------------------------------------------------


async def test_a_session_keeps_its_node_although_another_one_has_its_prefix_and_no_load() -> None:
    world = World(fleet_node("a"), fleet_node("b"))
    first = await world.send(prompt(1), "s")
    other = "b" if first == "a" else "a"
    world.node(other).served[0][1].add("x", world.request(prompt(2)).blocks(), 100, 100)
    world.load(first, 3)
    assert await world.send(prompt(2), "s") == first
    assert await world.send(prompt(2)) == other


async def test_a_session_moves_from_a_crowded_node_to_one_with_half_its_load() -> None:
    world = World(fleet_node("a"), fleet_node("b"), session_moves_at=4)
    first = await world.send(prompt(1), "s")
    other = "b" if first == "a" else "a"
    world.load(first, 6)
    world.load(other, 3)
    assert await world.send(prompt(1), "s") == first, "with this request the other has 4 of 6"
    world.load(other, 2)
    assert await world.send(prompt(1), "s") == other
    world.load(first, 0)
    world.load(other, 0)
    assert await world.send(prompt(1), "s") == other, "it stays there"


async def test_sessions_of_two_policies_with_one_name_do_not_share_a_node() -> None:
    world = World(fleet_node("a"), fleet_node("b", policy="judge"))
    for _ in range(2):
        assert await world.send(prompt(1), "s") == "a"
        assert await world.send(prompt(1), "s", Target(policy="judge")) == "b"
    assert len(world.choice._sessions) == 2


async def test_a_history_is_recorded_again_when_it_has_grown_by_256_tokens() -> None:
    world, history = World(fleet_node("a")), prompt(1, 1024)
    sizes = []
    for num in (640, 672, 864, 896, 928, 1024, 320):
        await world.send(history[:num], "s")
        sizes.append(world.node("a").served[0][1].size)
    assert sizes == [20, 20, 20, 28, 28, 28, 10]


async def test_the_number_of_sessions_is_bounded() -> None:
    world = World(fleet_node("a"), sessions_max=10)
    for number in range(100):
        await world.send(prompt(number), f"s{number}")
    assert [name for _, name in world.choice._sessions] == [f"s{number}" for number in range(90, 100)]


# Prefix against load --------------------------------------------------------------------------------------------------


async def test_a_prompt_goes_to_the_node_with_the_longest_part_of_it() -> None:
    world = World(fleet_node("a"), fleet_node("b"), fleet_node("c"))
    system, task = prompt(1, 320), prompt(2, 320)
    first = await world.send(np.concatenate([system, task]))
    other = next(name for name in "abc" if name != first)
    world.node(other).served[0][1].add("x", world.request(system).blocks(), 100, 100)
    for node_id in (first, other):
        world.load(node_id, 1)  # 256 tokens: less than each prefix
    assert await world.send(np.concatenate([system, task, prompt(3, 64)])) == first, "640 tokens against 320"
    world.load(first, 3)
    assert await world.send(np.concatenate([system, task, prompt(3, 64)])) == other, "64 + 768 against 384 + 256"


async def test_a_busy_node_loses_the_advantage_of_its_prefix() -> None:
    world = World(fleet_node("a", capacity=64), fleet_node("b", capacity=64))
    first = await world.send(prompt(1, 1024))
    chosen = []
    for num in range(8):
        world.load(first, num)
        chosen.append(await world.send(prompt(1, 1024)))
        world.node("b" if first == "a" else "a").served[0][1].clear()
    assert [node_id == first for node_id in chosen] == [True] * 4 + [False] * 4, (
        "4 requests cost as much as 1024 tokens"
    )


async def test_load_is_relative_to_the_capacity() -> None:
    world = World(fleet_node("a", capacity=4), fleet_node("b", capacity=16))
    await world.send(prompt(0, 5))
    world.load("a", 1)
    world.load("b", 3)
    assert await world.send(prompt(1, 5)) == "b"
    world.load("b", 5)
    assert await world.send(prompt(1, 5)) == "a"


async def test_a_full_node_comes_last_whatever_its_prefix_is() -> None:
    world = World(fleet_node("a"), fleet_node("b"), request_tokens=0)
    first = await world.send(prompt(1))
    world.load(first, 7)
    assert await world.send(prompt(1)) == first
    world.load(first, 8)
    assert await world.send(prompt(1)) != first


async def test_requests_of_other_clients_and_kv_pressure_count_while_their_report_is_recent() -> None:
    world = World(fleet_node("a"), fleet_node("b"))
    first = await world.send(prompt(1))
    other = "b" if first == "a" else "a"

    async def goes_to() -> str:
        world.node(other).served[0][1].clear()
        return await world.send(prompt(1))

    world.load(first, 2)
    world.report(first, num_running=4, num_waiting=1)
    assert world.node(first).num_requests(world.clock.monotonic_s()) == 5, "2 own ones and 3 others"
    assert await goes_to() == other, "1280 tokens against 640"
    world.load(first, 0)
    assert await goes_to() == other, "768 tokens against 640"
    world.clock.advance(LOAD_S_MAX)
    assert await goes_to() == first
    world.report(first, kv_pressure=0.95)
    assert await goes_to() == other
    world.clock.advance(LOAD_S_MAX)
    assert await goes_to() == first


async def test_independent_routers_send_a_prompt_to_the_same_node() -> None:
    names = [f"n{number}" for number in range(4)]
    chosen = [[await World(*map(fleet_node, names)).send(prompt(seed)) for _ in range(2)] for seed in range(40)]
    assert all(len(set(pair)) == 1 for pair in chosen)
    assert {pair[0] for pair in chosen} == set(names), "different prompts spread"


async def test_the_prefixes_of_a_node_are_bounded_by_the_setting_and_by_its_cache() -> None:
    world = World(fleet_node("a"), prefix_tokens_max=3200)
    for seed in range(50):
        await world.send(prompt(seed, 640), f"s{seed}")
    index = world.node("a").served[0][1]
    assert (index.size, index.num_distinct) == (100, 100)
    world.report("a", kv_tokens_max=1600)
    await world.send(prompt(50, 640))
    assert index.num_distinct == 40


async def test_without_memory_for_prefixes_only_load_decides() -> None:
    world = World(fleet_node("a"), fleet_node("b"), prefix_tokens_max=0)
    first = await world.send(prompt(1))
    world.load(first, 1)
    assert await world.send(prompt(1)) != first


async def test_scoring_calls_go_by_load() -> None:
    world = World(fleet_node("a"), fleet_node("b"))
    await world.send(prompt(1))
    world.load("a", 1)
    request = ScoringRequest(target=Target(), deadline_s=1e9)
    for node in world.fleet.nodes():
        node.capabilities.scores = True
    assert (await world.pool.take(request))[0] == "b"


# Versions and states --------------------------------------------------------------------------------------------------


async def test_new_weights_invalidate_the_prefixes_of_their_node_only() -> None:
    world = World(fleet_node("a"), fleet_node("b"))
    first = await world.send(prompt(1))
    other = "b" if first == "a" else "a"
    world.node(other).served[0][1].add("x", world.request(prompt(1)).blocks()[:10], 100, 100)
    world.load(first, 1)
    assert await world.send(prompt(1)) == first, "256 tokens of load against 320 of prefix"
    world.node(other).served[0][1].clear()
    world.node(other).served[0][1].add("x", world.request(prompt(1)).blocks()[:10], 100, 100)
    world.fleet.replace([fleet_node(first, step=2), fleet_node(other)])
    assert await world.send(prompt(1)) == other


async def test_prefixes_of_a_held_version_serve_requests_to_exactly_this_version() -> None:
    world = World(fleet_node("a"), fleet_node("b"))
    first = await world.send(prompt(1))
    other = "b" if first == "a" else "a"
    world.load(first, 1)
    world.fleet.replace([fleet_node(name, step=2, held=[1]) for name in (first, other)])
    assert await world.send(prompt(1), target=Target(step=1, exact=True)) == first
    assert await world.send(prompt(1)) == other


async def test_a_node_outside_the_bound_is_not_a_candidate_even_for_its_session() -> None:
    world = World(fleet_node("a", step=3), fleet_node("b", step=4))
    for session in ("s", "t"):
        await world.send(prompt(0), session)
    world.fleet.replace([fleet_node("a", step=3), fleet_node("b", step=5)])
    for session in ("s", "t", ""):
        assert await world.send(prompt(0), session, Target(step=4)) == "b"
        assert await world.send(prompt(0), session, Target(step=3, exact=True)) == "a"


@pytest.mark.parametrize("state", ["STALE", "SUSPECT", "DRAINING", "QUARANTINED", "JOINING", "DEAD"])
async def test_only_ready_nodes_are_candidates(state: str) -> None:
    world = World(fleet_node("a"), fleet_node("b"))
    first = await world.send(prompt(1), "s")
    other = "b" if first == "a" else "a"
    world.load(other, 8)
    lost = fleet_node(first, state=coordinator_pb2.NodeState.Value(f"NODE_STATE_{state}"))
    world.fleet.replace([lost, fleet_node(other)])
    for session in ("s", ""):
        assert await world.send(prompt(1), session) == other


async def test_a_node_that_left_is_forgotten_with_its_prefixes() -> None:
    world = World(fleet_node("a"), fleet_node("b"))
    first = await world.send(prompt(1), "s")
    node, other = world.node(first), "b" if first == "a" else "a"
    world.fleet.replace([fleet_node(other)])
    assert await world.send(prompt(1), "s") == other
    assert [known.node_id for known in world.pool._nodes.values()] == [other]
    assert node.served == []
    world.fleet.replace([fleet_node(first, address=f"{first}:2"), fleet_node(other)])
    assert await world.send(prompt(1), "s") == other
    assert world.node(first) is not node


async def test_a_failed_node_is_skipped_and_loses_its_prefixes_but_stale_weights_concern_one_request() -> None:
    world = World(fleet_node("a"), fleet_node("b"))
    request = world.request(prompt(1))
    first, node = await world.pool.take(request)
    other = "b" if first == "a" else "a"
    world.pool.failed(request, first, node, StaleWeights("too old"))
    assert (await world.pool.take(request))[0] == other
    world.node(other).served[0][1].clear()
    assert await world.send(prompt(1)) == first
    world.pool.failed(request, first, node, Unavailable("lost"))
    assert node.served[0][1].size == 0
    assert await world.send(prompt(1)) == other


async def test_a_cancelled_wait_leaves_nothing_behind() -> None:
    world = World(fleet_node("a", step=1))
    waiting = asyncio.create_task(world.pool.take(world.request(prompt(1), "s", Target(step=2))))
    await asyncio.sleep(0)
    assert "a node that serves main at step 2 or later" in world.pool.waiting_for
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    assert world.pool.waiting_for == ""
    assert (len(world.choice._sessions), world.node("a").served[0][1].size) == (0, 0)
