"""The baselines and the load of `bench router`."""

from __future__ import annotations

import numpy as np

from benchmarks import router
from benchmarks.router_policies import ConsistentHash, RoundRobin, prompt_key, session_key
from rollmesh.shared.clients.inference_choice import PrefixAffinity
from rollmesh.shared.clients.inference_nodes import KnownNode, NodePool, PendingRequest, RouterConfig
from rollmesh.shared.clock import ManualClock
from rollmesh.shared.membership.fleet import KnownFleet


def nodes_of(num: int) -> list[KnownNode]:
    fleet = KnownFleet([router._fleet_node(f"node-{i}", f"127.0.0.1:{1 + i}") for i in range(num)])
    config = RouterConfig()
    pool = NodePool(fleet, ManualClock(), config, lambda address: None, PrefixAffinity(config))  # type: ignore[arg-type, return-value]
    return list(pool._capable(request("s")))


def request(session: str, seed: int = 0) -> PendingRequest:
    return router._request(np.random.default_rng(seed).integers(0, 99, 80).astype(np.int32), session)


def test_round_robin_takes_the_next_node_for_each_request_or_for_each_session() -> None:
    nodes = nodes_of(3)
    each, sessions = RoundRobin(by_session=False), RoundRobin(by_session=True)
    chosen = []
    for session in ("s", "s", "t", "s", "t", "u"):
        for policy in (each, sessions):
            node = policy.choose(request(session), nodes, 0.0)
            assert node is not None
            policy.sent(request(session), node)
            chosen.append(node.node_id)
    assert chosen[::2] == [f"node-{i}" for i in (1, 2, 0, 1, 2, 0)]
    assert chosen[1::2] == [f"node-{i}" for i in (1, 1, 2, 1, 2, 0)]


def test_consistent_hashing_moves_only_the_keys_of_a_node_that_left() -> None:
    nodes, policy = nodes_of(4), ConsistentHash(session_key)

    def chosen(among: list[KnownNode]) -> list[KnownNode | None]:
        return [policy.choose(request(f"session-{i}"), among, 0.0) for i in range(200)]

    before, after = chosen(nodes), chosen(nodes[:3])
    counts = [before.count(node) for node in nodes]
    assert min(counts) > 20
    assert all(new is old for old, new in zip(before, after, strict=True) if old is not nodes[3])
    assert nodes[3] not in after


def test_the_key_of_a_prompt_is_its_first_tokens() -> None:
    policy, nodes = ConsistentHash(prompt_key(64)), nodes_of(4)
    first, other = request("a", seed=1), request("b", seed=1)
    other.token_ids[64:] = 0
    assert policy.choose(first, nodes, 0.0) is policy.choose(other, nodes, 0.0)
    assert len({policy.choose(request("a", seed=seed), nodes, 0.0) for seed in range(40)}) == 4


def test_policies_get_the_same_lengths_and_different_tokens() -> None:
    ours, theirs = router._plans(0, 0), router._plans(0, 1)
    assert [plan.num_new for plan in ours] == [plan.num_new for plan in theirs]
    assert [plan.pauses_s for plan in ours] == [plan.pauses_s for plan in theirs]
    assert [[row.size for row in plan.observed] for plan in ours] == [
        [row.size for row in plan.observed] for plan in theirs
    ]
    assert not any(np.array_equal(a.prompt, b.prompt) for a, b in zip(ours, theirs, strict=True))
    num_turns = [len(plan.num_new) for plan in ours]
    assert (min(num_turns), max(num_turns)) == (1, router.TURNS_MAX)
    longest = max(plan.prompt.size + sum(plan.num_new) + sum(row.size for row in plan.observed) for plan in ours)
    assert longest <= router.CONTEXT
