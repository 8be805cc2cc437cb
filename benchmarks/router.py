"""Policies of the router under long-tailed sessions on 4 nodes: computed prefix tokens, latency and balance.

Groups of sessions share a prompt: the system prompt of one of a few environments, and a task. A session has several
turns, and sends its whole history in each one. Turns per session are long-tailed, and a session pauses between turns (a
tool). The nodes are real inference nodes with the torch engine and the demo's model, in this process. Their caches are
too small for all sessions, so that engines evict. Policies take turns on the same nodes with the same lengths and
pauses. Their tokens differ, so that no policy finds what another one left.

The policies: `rollmesh` is the router of the product. `round robin` takes the next node for every request, `round robin
of sessions` for every new session. `hash of session` and `hash of prompt` are consistent hashing on the session's id
and on the shared prompt of a group.

How to read it: `computed` is the number of prefix tokens that the engines computed, by their own counters; `over round
robin` is the ratio in the same repetition, below 1 is better. `turn` is the latency of a turn from the request to its
last token. `busiest node` is the share of the sampled tokens at the node with most of them; 0.25 is perfect balance.
The notes have the CPU time of one choice.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any, Self

import grpc
import numpy as np

from benchmarks.interleave import Lap, interleave
from benchmarks.report import BenchTarget, Report, spread
from benchmarks.router_policies import ConsistentHash, RoundRobin, prompt_key, session_key
from benchmarks.torch_engine import NUM_SPECIAL, tiny_folder
from rollmesh.demo.tokenizer import VOCAB_SIZE
from rollmesh.services.inference.config import InferenceConfig
from rollmesh.services.inference.engine import KvPolicy
from rollmesh.services.inference.node import InferenceNode
from rollmesh.shared.clients.generated import Target
from rollmesh.shared.clients.inference import InferenceRouter
from rollmesh.shared.clients.inference_choice import PrefixAffinity
from rollmesh.shared.clients.inference_nodes import NodeChoice, NodePool, PendingRequest, RouterConfig
from rollmesh.shared.clock import SystemClock
from rollmesh.shared.codec.trajectory import encode_version
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import IntArray, SamplingParams
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.membership.fleet import KnownFleet
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.server import ServerConfig
from rollmesh.trainer.model_files import WEIGHTS_NAME
from rollmesh.v1 import coordinator_pb2, inference_pb2

NUM_NODES, SLOTS, CONTEXT = 4, 12, 1024
NUM_GROUPS, GROUP_SIZE, NUM_AT_ONCE = 8, 8, 24
SYSTEM_TOKENS, NUM_SYSTEMS, TASK_TOKENS = 192, 3, 224
TURNS_MAX, TOKENS_PER_TURN_MAX = 12, 48
PAUSE_S = 0.03
LAP_S_MAX = 120.0
COMPUTED_MAX = 0.7
OURS, BASELINE = "rollmesh", "round robin"
POLICIES: dict[str, Callable[[], NodeChoice]] = {
    OURS: lambda: PrefixAffinity(RouterConfig()),
    BASELINE: lambda: RoundRobin(by_session=False),
    "round robin of sessions": lambda: RoundRobin(by_session=True),
    "hash of session": lambda: ConsistentHash(session_key),
    "hash of prompt": lambda: ConsistentHash(prompt_key(SYSTEM_TOKENS + TASK_TOKENS)),
}
_ACCESS = Access(token="bench")
_VERSION = PolicyVersion(policy="main", step=0)


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """What one session sends. Lengths depend on the repetition, tokens also on the policy."""

    name: str
    prompt: IntArray
    num_new: list[int]
    """Tokens to sample, by turn."""
    observed: list[IntArray]
    """Tokens of the tool after each turn but the last."""
    pauses_s: list[float]


@dataclass(slots=True)
class Measured:
    """What the laps of one policy measured beside time and CPU."""

    computed: list[int] = field(default_factory=list)
    turns_ms: list[list[float]] = field(default_factory=list)
    busiest: list[float] = field(default_factory=list)


def run(quick: bool) -> Report:
    repetitions = 1 if quick else 8
    setting = (
        f"{NUM_NODES} torch nodes of {SLOTS} slots, 359k parameters; {NUM_GROUPS} groups of {GROUP_SIZE} sessions, "
        f"{NUM_AT_ONCE} at once, prompts of {SYSTEM_TOKENS} + {TASK_TOKENS} tokens; {repetitions} laps in turns"
    )
    report = Report("router", setting)
    measured = {name: Measured() for name in POLICIES}
    with tiny_folder(context_max=CONTEXT) as (folder, _), _Nodes(folder) as nodes:
        work = {name: lambda repetition, name=name: nodes.lap(name, repetition, measured[name]) for name in POLICIES}
        laps = interleave(work, repetitions)
    for found in measured.values():
        del found.computed[0], found.turns_ms[0], found.busiest[0]  # the uncounted lap
    report.rows = [_row(name, measured, laps[name]) for name in POLICIES]
    ratio = median(_ratios(measured[OURS].computed, measured[BASELINE].computed))
    report.targets.append(BenchTarget("computed prefix tokens over round robin", ratio, COMPUTED_MAX))
    fewest = [_fewest(_plans(repetition, 0)) for repetition in range(repetitions)]
    report.notes.append(f"new tokens of a lap, which every policy must compute: {spread(fewest)}")
    report.notes += [_choice_note(num_nodes, 100 if quick else 500) for num_nodes in (4, 64)]
    return report


def _row(name: str, measured: dict[str, Measured], laps: list[Lap]) -> dict[str, Any]:
    found, base = measured[name], measured[BASELINE]

    def latency(ours: Measured, quantile: float) -> list[float]:
        return [float(np.quantile(turns, quantile)) for turns in ours.turns_ms]

    return {
        "policy": name,
        "computed": spread(found.computed),
        "over round robin": spread(_ratios(found.computed, base.computed), 2),
        "turn p50, ms": spread(latency(found, 0.5)),
        "turn p90, ms": spread(latency(found, 0.9)),
        "p90 over round robin": spread(_ratios(latency(found, 0.9), latency(base, 0.9)), 2),
        "busiest node": spread(found.busiest, 2),
        "CPU s": spread([lap.cpu_s for lap in laps], 1),
    }


def _ratios(ours: list[Any], theirs: list[Any]) -> list[float]:
    return [a / b for a, b in zip(ours, theirs, strict=True)]


# Load -----------------------------------------------------------------------------------------------------------------


def _plans(repetition: int, policy: int) -> list[SessionPlan]:
    """Return the sessions of a lap, by group."""
    lengths = np.random.default_rng((repetition + 1,))
    content = np.random.default_rng((repetition + 1, policy))

    def tokens(num: int) -> IntArray:
        return content.integers(NUM_SPECIAL, VOCAB_SIZE, num).astype(np.int32)

    systems = [tokens(SYSTEM_TOKENS) for _ in range(NUM_SYSTEMS)]
    plans = []
    for group in range(NUM_GROUPS):
        prompt = np.concatenate([systems[int(lengths.zipf(2.0)) % NUM_SYSTEMS], tokens(TASK_TOKENS)])
        for member in range(GROUP_SIZE):
            num_turns = min(TURNS_MAX, 1 + int(2 * lengths.pareto(1.2)))
            num_new = [int(num) for num in lengths.integers(4, 17, num_turns)]
            observed = [tokens(int(num)) for num in lengths.integers(8, TOKENS_PER_TURN_MAX - 16, num_turns - 1)]
            pauses_s = lengths.exponential(PAUSE_S, num_turns).tolist()
            plans.append(SessionPlan(f"{repetition}/{policy}/{group}/{member}", prompt, num_new, observed, pauses_s))
    return plans


def _fewest(plans: list[SessionPlan]) -> int:
    """Return the number of tokens that no cache has: each prompt once, and what tools returned."""
    prompts = {plan.prompt.tobytes() for plan in plans}
    systems = {plan.prompt[:SYSTEM_TOKENS].tobytes() for plan in plans}
    shared = len(prompts) * TASK_TOKENS + len(systems) * SYSTEM_TOKENS
    return shared + sum(row.size for plan in plans for row in plan.observed)


async def _session(router: InferenceRouter, plan: SessionPlan) -> list[float]:
    """Run the turns of a session. Return their latencies in milliseconds."""
    history, turns_ms = plan.prompt, []
    for turn, num_new in enumerate(plan.num_new):
        await asyncio.sleep(plan.pauses_s[turn])
        begin_s = perf_counter()
        params = SamplingParams(max_tokens=num_new, seed=turn)
        answer = await router.generate(history, params, target=Target(), session=plan.name)
        turns_ms.append(1e3 * (perf_counter() - begin_s))
        observed = plan.observed[turn : turn + 1]
        history = np.concatenate([history, answer.token_ids, *observed]).astype(np.int32)
    return turns_ms


class _Nodes:
    """Inference nodes on an event loop that only runs inside `lap`, on entry and on exit."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runner = asyncio.Runner()
        self._stack = contextlib.AsyncExitStack()
        self._nodes: list[InferenceNode] = []

    def __enter__(self) -> Self:
        self._drive(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._drive(self._stack.aclose())
        self._runner.close()

    def lap(self, name: str, repetition: int, measured: Measured) -> int:
        """Run all sessions under a policy. Return the number of turns."""
        before = [node.engine.load() for node in self._nodes]
        plans = _plans(repetition, list(POLICIES).index(name))
        turns_ms = self._drive(asyncio.wait_for(self._sessions(POLICIES[name](), plans), LAP_S_MAX))
        after = [node.engine.load() for node in self._nodes]
        pairs = list(zip(before, after, strict=True))
        sampled = [new.tokens_generated - old.tokens_generated for old, new in pairs]
        measured.computed.append(sum(new.tokens_prefilled - old.tokens_prefilled for old, new in pairs))
        measured.turns_ms.append(turns_ms)
        measured.busiest.append(max(sampled) / sum(sampled))
        return len(turns_ms)

    async def _sessions(self, choice: NodeChoice, plans: list[SessionPlan]) -> list[float]:
        at_once = asyncio.Semaphore(NUM_AT_ONCE)

        async def session(router: InferenceRouter, plan: SessionPlan) -> list[float]:
            async with at_once:
                return await _session(router, plan)

        async with InferenceRouter(self._fleet(), access=_ACCESS, choice=choice) as router:
            found = await asyncio.gather(*(session(router, plan) for plan in plans))
        return [ms for turns in found for ms in turns]

    def _fleet(self) -> KnownFleet:
        return KnownFleet([_fleet_node(node.state.node_id, node.address) for node in self._nodes])

    async def _start(self) -> None:
        options = {"slots_max": SLOTS, "resident_slots_max": SLOTS, "context_max": CONTEXT}
        for number in range(NUM_NODES):
            config = InferenceConfig(
                directory=str(self._folder / f"node-{number}"),
                engine=Extension("torch", {"model": str(self._folder), **options}),
                capacity=SLOTS,
                server=ServerConfig(stop_s=0.0),
            )
            node = InferenceNode(config, node_id=f"node-{number}", access=_ACCESS)
            self._nodes.append(await self._stack.enter_async_context(node))
            await node.engine.prepare(_VERSION, {WEIGHTS_NAME: self._folder / WEIGHTS_NAME})
            await node.engine.activate(_VERSION, KvPolicy.RECOMPUTE)

    def _drive(self, work: Awaitable[Any]) -> Any:
        async def run() -> Any:
            return await work

        return self._runner.run(run())


def _fleet_node(node_id: str, address: str) -> coordinator_pb2.FleetNode:
    return coordinator_pb2.FleetNode(
        node_id=node_id,
        address=address,
        kind=coordinator_pb2.NODE_KIND_INFERENCE,
        state=coordinator_pb2.NODE_STATE_READY,
        capacity=SLOTS,
        active=encode_version(_VERSION),
    )


# CPU of a choice ------------------------------------------------------------------------------------------------------


def _choice_note(num_nodes: int, num: int) -> str:
    turns, prompts = asyncio.run(_choice_us(num_nodes, num))
    return (
        f"CPU of a choice, {num_nodes} nodes, histories of 1,024 tokens: {turns:.1f} us for the next turn of a "
        f"session, {prompts:.1f} us for a new session"
    )


async def _choice_us(num_nodes: int, num: int) -> tuple[float, float]:
    """Return the CPU microseconds of the choice for the next turn of a session, and for a prompt without a session."""
    fleet = KnownFleet([_fleet_node(f"node-{i}", f"127.0.0.1:{1 + i}") for i in range(num_nodes)])

    def connect(address: str) -> grpc.aio.Channel:
        raise AssertionError(f"no request is sent, but {address} was opened")

    pool = NodePool(fleet, SystemClock(), RouterConfig(), connect, PrefixAffinity(RouterConfig()))
    system = np.random.default_rng(0).integers(NUM_SPECIAL, VOCAB_SIZE, 512)
    rows = [
        np.concatenate([system, np.random.default_rng(i + 1).integers(NUM_SPECIAL, VOCAB_SIZE, 512)])
        for i in range(num)
    ]

    async def took_us(num_tokens: int) -> float:
        requests = [_request(row[:num_tokens].astype(np.int32), f"s{index}") for index, row in enumerate(rows)]
        begin_s = process_time()
        for request in requests:
            await pool.take(request)
        return 1e6 * (process_time() - begin_s) / num

    prompts = await took_us(960)
    return await took_us(1024), prompts


def _request(token_ids: IntArray, session: str) -> PendingRequest:
    return PendingRequest(
        token_ids=token_ids,
        params=SamplingParams(max_tokens=1),
        target=Target(),
        session=session,
        priority=0,
        labels=inference_pb2.RequestLabels(),
        deadline_s=0.0,
    )
