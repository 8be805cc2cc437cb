"""A rollout node over real gRPC and a real nats-server: sandbox and reward services are real, the model is a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from rollmesh.services.coordinator.fact_codec import encode
from rollmesh.services.reward.config import RewardConfig
from rollmesh.services.reward.node import RewardNode
from rollmesh.services.rollout.config import RolloutConfig, WorkerConfig
from rollmesh.services.rollout.node import RolloutNode
from rollmesh.services.sandbox.config import SandboxConfig
from rollmesh.services.sandbox.node import SandboxNode
from rollmesh.services.sandbox.sessions import SessionEnd
from rollmesh.shared.bus.embedded_server import EmbeddedServer
from rollmesh.shared.bus.jetstream_bus import JetStreamBus
from rollmesh.shared.bus.login import BusLogin
from rollmesh.shared.bus.run_streams import StreamLimits, run_streams
from rollmesh.shared.codec.arrays import decode_ints
from rollmesh.shared.codec.trajectory import encode_segment, episode_from_bytes
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.outputs import array_names
from rollmesh.shared.domain.protocol import PROTOCOL
from rollmesh.shared.domain.trajectory import Source, sampled_segment, text_view
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import UnknownNode
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.server import RpcServer, ServerConfig
from rollmesh.testing.rollout import CharTokenizer
from rollmesh.v1 import (
    coordinator_pb2,
    coordinator_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    types_pb2,
)

ACCESS = Access(token="t")
LOGIN = BusLogin.of(ACCESS)
WAIT_S = 20.0
MIB = 2**20
COMPLETED = coordinator_pb2.EPISODE_OUTCOME_COMPLETED
CANCELLED = coordinator_pb2.EPISODE_OUTCOME_CANCELLED
EXPRESSION = "12*7-30"


def solve(text: str) -> str:
    """What an ideal model says on `EXPRESSION`."""
    turns = ["<tool_call>12*7</tool_call><|end|>", "<tool_call>84-30</tool_call><|end|>", "<answer>54</answer><|end|>"]
    return turns[text.count("<|tool|>")]


class ScriptedInference(inference_pb2_grpc.InferenceServiceServicer):
    """A node that answers by script; holds its requests while `held`."""

    def __init__(self, tokenizer: CharTokenizer) -> None:
        self.tokenizer = tokenizer
        self.held = False
        self.live: dict[str, inference_pb2.Submission] = {}

    async def Generate(self, requests: Any, context: Any) -> AsyncIterator[inference_pb2.GenerateResponse]:
        async for request in requests:
            for submission in request.submissions:
                self.live[submission.request_id] = submission
            for cancellation in request.cancellations:
                self.live.pop(cancellation.request_id, None)
            if not self.held:
                done, self.live = self.live, {}
                yield inference_pb2.GenerateResponse(deltas=[self.answer(s) for s in done.values()])

    def answer(self, submission: inference_pb2.Submission) -> inference_pb2.GenerateDelta:
        text = solve(self.tokenizer.decode(decode_ints(submission.token_ids, "token_ids")))
        token_ids = self.tokenizer.encode_markup(text)
        logprobs = np.full(token_ids.shape, -0.1, dtype=np.float32)
        segment = sampled_segment(
            token_ids,
            logprobs,
            PolicyVersion(policy="main", step=3),
            kv_step_oldest=3,
            arrays={name: (token_ids / 4).astype(np.float32) for name in array_names(submission.outputs)},
        )
        return inference_pb2.GenerateDelta(
            request_id=submission.request_id,
            segment=encode_segment(segment),
            finish=types_pb2.FINISH_REASON_STOP,
        )


class ListingCoordinator(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Welcomes nodes, tells them of each other, gives out `leases`, keeps the reports."""

    def __init__(self) -> None:
        self.leases: list[coordinator_pb2.EpisodeLease] = []
        self.live: set[str] = set()
        self.reports: list[coordinator_pb2.EpisodeReport] = []
        self.num_report_calls = 0
        self.nodes: dict[str, coordinator_pb2.FleetNode] = {}
        self.commands: dict[str, asyncio.Queue[coordinator_pb2.JoinResponse]] = {}
        self.changed = asyncio.Event()

    def add(self, node_id: str, kind: coordinator_pb2.NodeKind.ValueType, address: str) -> None:
        self.nodes[node_id] = coordinator_pb2.FleetNode(
            node_id=node_id,
            kind=kind,
            address=address,
            state=coordinator_pb2.NODE_STATE_READY,
            active=types_pb2.PolicyVersion(policy="main", step=3),
            capacity=64,
            capabilities=coordinator_pb2.EngineCapabilities(engine="solver", outputs=["entropy"], scores=True),
        )
        for queue in self.commands.values():
            queue.put_nowait(coordinator_pb2.JoinResponse(fleet=self.view()))

    def view(self) -> coordinator_pb2.FleetView:
        return coordinator_pb2.FleetView(nodes=list(self.nodes.values()))

    async def Join(self, requests: Any, context: Any) -> AsyncIterator[coordinator_pb2.JoinResponse]:
        hello = (await anext(aiter(requests))).hello
        queue = self.commands[hello.node_id] = asyncio.Queue()
        yield coordinator_pb2.JoinResponse(
            welcome=coordinator_pb2.Welcome(
                heartbeat_s=0.5, coordinator_id="c", protocol=encode(PROTOCOL, coordinator_pb2.ProtocolVersion)
            )
        )
        if hello.address:
            self.add(hello.node_id, hello.kind, hello.address)
        queue.put_nowait(coordinator_pb2.JoinResponse(fleet=self.view()))
        reading = asyncio.ensure_future(self._read(requests))
        try:
            while not reading.done():
                getting = asyncio.ensure_future(queue.get())
                await asyncio.wait([reading, getting], return_when=asyncio.FIRST_COMPLETED)
                if getting.done():
                    yield getting.result()
                else:
                    getting.cancel()
        finally:
            reading.cancel()

    async def _read(self, requests: Any) -> None:
        async for _ in requests:
            pass

    async def AcquireRollouts(self, request: Any, context: Any) -> coordinator_pb2.AcquireRolloutsResponse:
        if request.node_id not in self.commands:
            raise UnknownNode("join first")
        given, self.leases = self.leases[: request.num_max], self.leases[request.num_max :]
        self.live.update(lease.lease_id for lease in given)
        if not given:
            await asyncio.sleep(min(0.05, request.wait_s))
        return coordinator_pb2.AcquireRolloutsResponse(leases=given, waiting_for="" if given else "admission full")

    async def RenewLeases(self, request: Any, context: Any) -> coordinator_pb2.RenewLeasesResponse:
        return coordinator_pb2.RenewLeasesResponse(gone=set(request.lease_ids) - self.live, lease_s=30.0)

    async def ReportEpisodes(self, request: Any, context: Any) -> coordinator_pb2.ReportEpisodesResponse:
        self.num_report_calls += 1
        self.reports += request.reports
        results = ["" if r.lease_id in self.live else "UNKNOWN_LEASE" for r in request.reports]
        self.live -= {r.lease_id for r in request.reports}
        return coordinator_pb2.ReportEpisodesResponse(results=results)


def calc_lease(number: int) -> coordinator_pb2.EpisodeLease:
    task = types_pb2.Task(
        task_id="t",
        messages=[types_pb2.Message(role="user", content=EXPRESSION)],
        tools=["calculator"],
        oracle_ref=f"calc:{EXPRESSION}",
    )
    return coordinator_pb2.EpisodeLease(
        lease_id=f"l{number}",
        key=types_pb2.EpisodeKey(run="r", task="t", group="g", episode=f"e{number}", attempt=1),
        purpose=types_pb2.PURPOSE_TRAIN,
        task=task,
        step_min=2,
        lease_s=30.0,
        seed=number,
    )


class Mesh:
    """The parts around the node under test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = CharTokenizer()
        self.inference = ScriptedInference(self.tokenizer)  # type: ignore[abstract]  # the other verbs answer UNIMPLEMENTED
        self.coordinator = ListingCoordinator()  # type: ignore[abstract]
        self.nats = EmbeddedServer(folder / "nats", login=LOGIN)
        self.stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        enter = self.stack.enter_async_context
        await enter(self.nats)
        self.bus = await JetStreamBus.connect(self.nats.url, login=LOGIN)
        self.stack.push_async_callback(self.bus.close)
        small = StreamLimits(samples_bytes_max=MIB, ledger_bytes_max=MIB, dead_bytes_max=MIB)
        self.samples = await self.bus.create(run_streams("r", small).samples)
        server = await enter(RpcServer(ServerConfig(stop_s=0.0), access=ACCESS))
        server.add(coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server, self.coordinator)
        server.add(inference_pb2_grpc.add_InferenceServiceServicer_to_server, self.inference)
        await server.start()
        self.address = server.address
        self.coordinator.add("inf-0", coordinator_pb2.NODE_KIND_INFERENCE, self.address)
        config = SandboxConfig(engine=Extension("fake"))
        self.sandbox = await enter(
            SandboxNode(
                config, node_id="sandbox-0", access=ACCESS, state_dir=self.folder / "sb", coordinator=self.address
            )
        )
        await enter(RewardNode(RewardConfig(), node_id="reward-0", access=ACCESS, coordinator=self.address))
        await until(lambda: len(self.coordinator.nodes) == 3)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stack.aclose()

    @asynccontextmanager
    async def node(self, config: RolloutConfig | None = None) -> AsyncIterator[RolloutNode]:
        node = RolloutNode(
            config or RolloutConfig(),
            node_id="rollout-0",
            coordinator=self.address,
            access=ACCESS,
            bus=self.bus,
            tokenizer=self.tokenizer,
        )
        async with node:
            yield node


async def until(condition: Callable[[], object]) -> None:
    """Polls: what it waits for happens in gRPC's own time."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with Mesh(tmp_path) as made:
        yield made


async def test_episodes_go_the_whole_way_and_leave_nothing(mesh: Mesh) -> None:
    mesh.coordinator.leases = [calc_lease(i) for i in range(40)]
    async with mesh.node(RolloutConfig(outputs=("entropy",))) as node:
        await until(lambda: len(mesh.coordinator.reports) == 40)
        await until(lambda: node.num_open == 0)
        assert node.progress.num_completed == 40
        await until(lambda: "admission full" in node.waiting_for)
    for report in mesh.coordinator.reports:
        assert report.outcome == COMPLETED, report.failure
        record = await mesh.samples.read(report.payload.sequence)
        episode = episode_from_bytes(record.payload)
        assert episode.key.episode == report.key.episode
        for segment in episode.segments:
            assert segment.arrays.keys() == ({"entropy"} if segment.source is Source.POLICY else set())
            for values in segment.arrays.values():
                np.testing.assert_array_equal(values, segment.token_ids / 4)
        text = text_view(episode.path_segments(episode.samples[0]))
        assert [m.content for m in text if m.role == "tool"] == ["84", "54"]
        assert [(r.name, r.value) for r in episode.samples[0].rewards] == [("correct", 1.0)]
        assert [(s.step, s.num_tokens > 0) for s in report.samples[0].steps] == [(3, True)]
    counts = mesh.sandbox.core.sessions.counts()
    assert (counts.live, counts.ended[SessionEnd.CLOSED]) == (0, 40)
    assert mesh.coordinator.num_report_calls < 40


async def test_stopping_in_mid_generation_cancels_requests_sessions_and_leases(mesh: Mesh) -> None:
    mesh.inference.held = True
    mesh.coordinator.leases = [calc_lease(i) for i in range(10)]
    async with mesh.node():
        await until(lambda: len(mesh.inference.live) == 10)
        assert mesh.sandbox.core.sessions.counts().live == 10
    await until(lambda: not mesh.inference.live)
    await until(lambda: mesh.sandbox.core.sessions.counts().live == 0)
    assert [report.outcome for report in mesh.coordinator.reports] == [CANCELLED] * 10
    assert not mesh.coordinator.live


async def test_cancel_command_ends_just_those_episodes(mesh: Mesh) -> None:
    mesh.inference.held = True
    mesh.coordinator.leases = [calc_lease(i) for i in range(3)]
    async with mesh.node() as node:
        await until(lambda: len(mesh.inference.live) == 3)
        cancel = coordinator_pb2.CancelEpisodes(lease_ids=["l1"], reason="group complete")
        mesh.coordinator.commands["rollout-0"].put_nowait(coordinator_pb2.JoinResponse(cancel=cancel))
        await until(lambda: len(mesh.inference.live) == 2)
        await until(lambda: mesh.sandbox.core.sessions.counts().live == 2)
        assert node.worker.num_running == 2


async def test_a_killed_bus_delays_but_loses_nothing(mesh: Mesh) -> None:
    async with mesh.node(RolloutConfig(worker=WorkerConfig(rpc_s_max=1.0))) as node:
        mesh.nats.kill()
        mesh.coordinator.leases = [calc_lease(i) for i in range(5)]
        await until(lambda: node.worker.num_running == 5)
        await until(lambda: node.num_open == 5)  # all wait for the bus only
        assert not mesh.coordinator.reports
        await mesh.nats.start()
        await until(lambda: len(mesh.coordinator.reports) == 5)
    assert {report.outcome for report in mesh.coordinator.reports} == {COMPLETED}
    assert (await mesh.samples.info()).num_records == 5


async def test_drain_command_ends_the_worker(mesh: Mesh) -> None:
    mesh.coordinator.leases = [calc_lease(0)]
    async with mesh.node() as node:
        await until(lambda: mesh.coordinator.reports)
        drain = coordinator_pb2.JoinResponse(drain=coordinator_pb2.DrainCommand())
        mesh.coordinator.commands["rollout-0"].put_nowait(drain)
        async with asyncio.timeout(WAIT_S):
            await node.wait()
