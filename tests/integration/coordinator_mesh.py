"""A mesh without engines and workers: real nats-server, coordinator, gateway, data, reward and depot; the test is
worker and trainer."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rollmesh.services.coordinator.config import CoordinatorConfig, RunLimits
from rollmesh.services.coordinator.core.fleet import FleetConfig
from rollmesh.services.coordinator.node import CoordinatorNode
from rollmesh.services.data.config import DataConfig
from rollmesh.services.data.node import DataNode
from rollmesh.services.gateway.config import GatewayConfig
from rollmesh.services.gateway.node import GatewayNode
from rollmesh.services.reward.config import RewardConfig
from rollmesh.services.reward.node import RewardNode
from rollmesh.services.weights.config import DepotConfig
from rollmesh.services.weights.node import DepotNode
from rollmesh.shared.bus.bus import Bus
from rollmesh.shared.bus.embedded_server import EmbeddedServer, EmbeddedServerConfig
from rollmesh.shared.bus.jetstream_bus import JetStreamBus
from rollmesh.shared.bus.login import BusLogin
from rollmesh.shared.bus.run_streams import StreamLimits, run_streams
from rollmesh.shared.codec.metadata import sample_meta
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.errors import Unavailable, UnknownRun
from rollmesh.shared.membership.membership import Membership, MembershipConfig, PassiveHandler
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import ChannelConfig, open_channel
from rollmesh.shared.rpc.server import ServerConfig
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.v1 import (
    coordinator_pb2,
    coordinator_pb2_grpc,
    events_pb2,
    run_pb2,
    run_pb2_grpc,
    types_pb2,
    weights_pb2,
    weights_pb2_grpc,
)

T = TypeVar("T")
ACCESS = Access(token="token")
LOGIN = BusLogin.of(ACCESS)
WORKER = "worker-0"
MIB = 1 << 20
DATA = coordinator_pb2.NODE_KIND_DATA
REWARD = coordinator_pb2.NODE_KIND_REWARD
DEPOT = coordinator_pb2.NODE_KIND_DEPOT
ROLLOUT = coordinator_pb2.NODE_KIND_ROLLOUT
GATEWAY = coordinator_pb2.NODE_KIND_GATEWAY

CONFIG = CoordinatorConfig(
    server=ServerConfig(stop_s=0.0),
    fleet=FleetConfig(heartbeat_s=0.2, suspect_after_s=5.0, dead_after_s=10.0),
    run=RunLimits(tick_s=0.02, watch_interval_s=0.02, snapshot_records=5, housekeeping_s=0.05),
    streams=StreamLimits(samples_bytes_max=16 * MIB, ledger_bytes_max=16 * MIB, dead_bytes_max=MIB),
)
JOIN = MembershipConfig(backoff_s=0.02, backoff_s_max=0.1, leave_s=0.5)


def spec(**changes: Any) -> events_pb2.RunSpec:
    """Two groups of two per update, eta = 1."""
    values: dict[str, Any] = {
        "run": "r",
        "max_staleness": 1,
        "batch_groups": 2,
        "group_size": 2,
        "publish_every": 1,
        "tries_max": 3,
        "episode_lease_s": 30.0,
        "batch_lease_s": 30.0,
        "group_s_max": 60.0,
        "eval_s_max": 60.0,
        "success_reward": "correct",
    }
    return events_pb2.RunSpec(**(values | changes))


@dataclass
class MeshParts:
    """What runs, and verbs for a test that plays worker and trainer."""

    folder: Path
    nats: EmbeddedServer
    bus: Bus
    stack: AsyncExitStack
    config: CoordinatorConfig
    node: CoordinatorNode | None = None
    address: str = ""
    gateway: GatewayNode | None = None
    run: Any = None
    """RunService of the gateway."""
    decisions: Any = None
    """RunService of the coordinator."""
    coordinator: Any = None
    epoch: int = 0
    name: str = "r"
    """The run that the verbs below are about."""
    worker: str = WORKER
    members: set[str] = field(default_factory=set)
    """Nodes that were ready when the coordinator was stopped."""

    async def restart_coordinator(self) -> CoordinatorNode:
        """Stop the coordinator, and start it at the same address and with the same nodes."""
        await self.stop_coordinator()
        return await self.start_coordinator()

    async def start_coordinator(self) -> CoordinatorNode:
        """Start a coordinator at the same address as before, and wait until the nodes that were ready have joined it.

        A node joins again in the background. Until then the coordinator rejects its calls with `UnknownNode`. A
        gateway connects again with a back-off that may be longer than the retries of one call.
        """
        config = self.config
        if self.address:
            server = msgspec.structs.replace(config.server, address=self.address)
            config = msgspec.structs.replace(config, server=server)
        self.node = CoordinatorNode(config, folder=self.folder / "coordinator", access=ACCESS, bus_url=self.nats.url)
        await self.node.__aenter__()
        self.address = self.node.address
        node = self.node

        async def connected() -> bool:
            if not self.members <= ready_nodes(node):
                return False
            if self.gateway is None:
                return True
            try:
                await self.call(self.run.GetRun, run_pb2.GetRunRequest(run="unknown"))
            except UnknownRun:
                return True
            except Unavailable:
                return False
            raise AssertionError("a run with the name `unknown` exists")

        await eventually(connected)
        return node

    async def stop_coordinator(self) -> None:
        if self.node is not None:
            node, self.node = self.node, None
            self.members = ready_nodes(node)
            await node.__aexit__(None, None, None)

    async def another_run(self, name: str) -> MeshParts:
        """Return the same mesh with another run and a separate worker."""
        hello = coordinator_pb2.NodeHello(node_id=f"w-{name}", kind=ROLLOUT, capacity=8, runs=[name])
        worker = Membership(self.address, access=ACCESS, handler=PassiveHandler(hello), config=JOIN)
        await self.stack.enter_async_context(worker)
        await worker.wait_joined()
        return replace(self, name=name, worker=hello.node_id, epoch=0)

    async def wait_ready(self, *kinds: coordinator_pb2.NodeKind.ValueType) -> None:
        """Until a node of each kind is READY."""

        async def ready() -> bool:
            nodes = (await self.coordinator.GetFleet(coordinator_pb2.GetFleetRequest(), wait_for_ready=True)).nodes
            return set(kinds) <= {n.kind for n in nodes if n.state == coordinator_pb2.NODE_STATE_READY}

        await eventually(ready)

    # Trainer ----------------------------------------------------------------------------------------------------------

    async def create(self, **changes: Any) -> run_pb2.CreateRunResponse:
        return await self.call(
            self.run.CreateRun, run_pb2.CreateRunRequest(spec=spec(**({"run": self.name} | changes)))
        )

    async def attach(self, last_update: int = 0, digest: str = "", **changes: Any) -> run_pb2.AttachTrainerResponse:
        request = run_pb2.AttachTrainerRequest(run=self.name, last_update=last_update, digest=digest, **changes)
        attached: run_pb2.AttachTrainerResponse = await self.call(self.run.AttachTrainer, request)
        self.epoch = attached.trainer_epoch
        return attached

    async def upload(self, content: bytes) -> str:
        """A version made of one chunk; its weights digest."""
        chunk = hashlib.sha256(content).hexdigest()
        file = weights_pb2.WeightFile(
            name="model.safetensors",
            size_bytes=len(content),
            chunks=[weights_pb2.WeightChunk(digest=chunk, size_bytes=len(content))],
        )
        kind = weights_pb2.WeightManifest.KIND_FULL
        manifest = weights_pb2.WeightManifest(kind=kind, files=[file], dtype="float32").SerializeToString()
        await self.put(content)
        return await self.put(manifest)

    async def put(self, content: bytes, owner: str = "test") -> str:
        digest = hashlib.sha256(content).hexdigest()
        depot = (await self.coordinator.GetFleet(coordinator_pb2.GetFleetRequest(kind=DEPOT))).nodes[0]
        async with open_channel(depot.address, access=ACCESS) as channel:
            stub = weights_pb2_grpc.BlobServiceStub(channel)
            head = weights_pb2.PutRequest(digest=digest, size_bytes=len(content), owner=owner, data=content)
            with typed_errors():
                await stub.Put(stream_of(head))
        return digest

    async def publish(self, step: int, *, content: bytes = b"", incarnation: int = 0) -> None:
        digest = await self.upload(content or f"weights {step}.{incarnation}".encode())
        version = types_pb2.PolicyVersion(policy="main", step=step, incarnation=incarnation, weights_digest=digest)
        request = run_pb2.PublishVersionRequest(run=self.name, trainer_epoch=self.epoch, version=version)
        await self.call(self.run.PublishVersion, request)

    async def lease(self, update: int, wait_s: float = 10.0, **changes: Any) -> run_pb2.LeaseBatchResponse:
        request = run_pb2.LeaseBatchRequest(
            run=self.name, update=update, wait_s=wait_s, **({"trainer_epoch": self.epoch} | changes)
        )
        return await self.call(self.run.LeaseBatch, request)

    async def commit(
        self, update: int, lease_ids: Sequence[str], dropped: Sequence[str] = (), **changes: Any
    ) -> run_pb2.CommitUpdateResponse:
        samples = [
            run_pb2.DisposedSample(sample_id=s, disposition=run_pb2.SAMPLE_DISPOSITION_DROPPED, reason="TEST")
            for s in dropped
        ]
        values: dict[str, Any] = {
            "trainer_epoch": self.epoch,
            "outcome": run_pb2.UPDATE_OUTCOME_APPLIED,
            "samples": samples,
        } | changes
        request = run_pb2.CommitUpdateRequest(run=self.name, update=update, lease_ids=lease_ids, **values)
        return await self.call(self.run.CommitUpdate, request)

    async def checkpoint(self, update: int, digest: str, **changes: Any) -> None:
        values = {"trainer_epoch": self.epoch} | changes
        request = run_pb2.ReportCheckpointRequest(run=self.name, update=update, digest=digest, **values)
        await self.call(self.run.ReportCheckpoint, request)

    async def fetch(
        self, lease_id: str, index: int = 0, num: int = 1, **changes: Any
    ) -> list[run_pb2.FetchSamplesResponse]:
        values: dict[str, Any] = {"trainer_epoch": self.epoch, "shard_index": index, "num_shards": num} | changes
        request = run_pb2.FetchSamplesRequest(run=self.name, lease_id=lease_id, **values)
        with typed_errors():
            return [response async for response in self.run.FetchSamples(request)]

    async def prefetch(self, num: int, **changes: Any) -> list[run_pb2.PrefetchSamplesResponse]:
        """The first `num` messages of PrefetchSamples."""
        values: dict[str, Any] = {"trainer_epoch": self.epoch} | changes
        found: list[run_pb2.PrefetchSamplesResponse] = []
        with typed_errors():
            call = self.run.PrefetchSamples(run_pb2.PrefetchSamplesRequest(run=self.name, **values), timeout=20)
            async for response in call:
                found.append(response)
                if len(found) == num:
                    call.cancel()
                    break
        return found

    async def state(self) -> run_pb2.RunState:
        response: run_pb2.GetRunResponse = await self.call(self.run.GetRun, run_pb2.GetRunRequest(run=self.name))
        return response.state

    # Worker -----------------------------------------------------------------------------------------------------------

    async def acquire(self, num_max: int = 4, wait_s: float = 10.0) -> list[coordinator_pb2.EpisodeLease]:
        request = coordinator_pb2.AcquireRolloutsRequest(node_id=self.worker, num_max=num_max, wait_s=wait_s)
        return list((await self.call(self.coordinator.AcquireRollouts, request)).leases)

    async def generate(
        self, leases: Sequence[coordinator_pb2.EpisodeLease], *, step: int, incarnation: int = 0
    ) -> list[str]:
        """Run the episodes: payloads first, then the reports. Returns the reports' results."""
        reports = [await self.finished(lease, step=step, incarnation=incarnation) for lease in leases]
        return await self.report(reports)

    async def finished(
        self,
        lease: coordinator_pb2.EpisodeLease,
        *,
        step: int,
        incarnation: int = 0,
        more_rewards: Sequence[types_pb2.Reward] = (),
    ) -> coordinator_pb2.EpisodeReport:
        """Store a payload with one sample of 9 tokens, 5 of them trainable, and make its report."""
        episode = episode_of(lease, step=step, incarnation=incarnation)
        episode.samples[0].rewards.extend(more_rewards)
        payload = episode.SerializeToString()
        stream = await self.bus.open(run_streams(lease.key.run).samples.name)
        sequence = await stream.append(payload, msg_id=f"{lease.key.episode}.{lease.key.attempt}")
        return coordinator_pb2.EpisodeReport(
            lease_id=lease.lease_id,
            key=lease.key,
            outcome=coordinator_pb2.EPISODE_OUTCOME_COMPLETED,
            payload=types_pb2.PayloadRef(sequence=sequence, size_bytes=len(payload)),
            samples=[sample_meta(episode, sample) for sample in episode.samples],
        )

    async def report(self, reports: Sequence[coordinator_pb2.EpisodeReport]) -> list[str]:
        request = coordinator_pb2.ReportEpisodesRequest(node_id=self.worker, reports=reports)
        return list((await self.call(self.coordinator.ReportEpisodes, request)).results)

    async def call(self, verb: Callable[..., Awaitable[T]], request: Any) -> T:
        with typed_errors():
            return await verb(request)

    async def begin(self, **changes: Any) -> None:
        """A run with a trainer and published initial weights."""
        await self.create(**changes)
        await self.attach()
        await self.publish(0)

    async def train(self, update: int, *, step: int | None = None) -> str:
        """One whole update from nothing; its digest."""
        await self.generate(await self.acquire(), step=update - 1 if step is None else step)
        batch = await self.lease(update)
        assert batch.lease_id, batch.waiting_for
        return (await self.commit(update, [batch.lease_id])).digest


def episode_of(
    lease: coordinator_pb2.EpisodeLease, *, step: int, incarnation: int = 0, num_samples: int = 1
) -> types_pb2.Episode:
    """A prompt of 4 tokens and an action of 5, and samples over both; the first episode of a group is correct."""
    prompt = types_pb2.Segment(
        parent=-1,
        role=types_pb2.SEGMENT_ROLE_CONTEXT,
        source=types_pb2.SEGMENT_SOURCE_PROMPT,
        token_ids=bytes(16),
        sampling=-1,
    )
    action = types_pb2.Segment(
        parent=0,
        role=types_pb2.SEGMENT_ROLE_ACTION,
        source=types_pb2.SEGMENT_SOURCE_POLICY,
        token_ids=bytes(20),
        logprobs=bytes(20),
        loss_mask=b"\1" * 5,
        version=types_pb2.PolicyVersion(policy="main", step=step, incarnation=incarnation),
        kv_step_oldest=step,
        sampling=0,
    )
    value = float(lease.key.episode.endswith(".0"))
    ok = types_pb2.REWARD_OUTCOME_OK
    reward = types_pb2.Reward(name="correct", value=value, segment=-1, scorer="exact@1", outcome=ok)
    samples = [
        types_pb2.Sample(
            sample_id=f"{lease.key.episode}.{number}",
            policy="main",
            leaf=1,
            rewards=[reward],
            weight=1.0,
            trainable=True,
        )
        for number in range(num_samples)
    ]
    return types_pb2.Episode(
        key=lease.key,
        purpose=lease.purpose,
        segments=[prompt, action],
        sampling_params=[types_pb2.SamplingParams(temperature=1.0, max_tokens=5)],
        samples=samples,
        variant=lease.variant.name,
    )


def ready_nodes(node: CoordinatorNode) -> set[str]:
    """Return the ids of the nodes that are READY."""
    return {one.node_id for one in node.fleet_nodes() if one.state == coordinator_pb2.NODE_STATE_READY}


async def stream_of(message: T) -> AsyncIterator[T]:
    yield message


async def eventually(condition: Callable[[], Awaitable[bool]], limit_s: float = 20.0) -> None:
    """Until `condition` holds."""
    async with asyncio.timeout(limit_s):
        while not await condition():  # noqa: ASYNC110 (what it waits for is beyond this process's events)
            await asyncio.sleep(0.01)


@asynccontextmanager
async def coordinator_mesh(
    tmp_path: Path,
    config: CoordinatorConfig = CONFIG,
    *,
    store: EmbeddedServerConfig | None = None,
    finalizer: str = "keep_all",
    data: DataConfig | None = None,
) -> AsyncIterator[MeshParts]:
    """All parts, joined and ready. `store` configures nats-server, and `data` the data service."""
    async with coordinator_alone(tmp_path, config, store=store) as parts:
        await _join_all(parts, finalizer, data or DataConfig())
        yield parts


@asynccontextmanager
async def coordinator_alone(
    tmp_path: Path, config: CoordinatorConfig = CONFIG, *, store: EmbeddedServerConfig | None = None
) -> AsyncIterator[MeshParts]:
    """A coordinator that no node has joined."""
    async with AsyncExitStack() as stack:
        nats = await stack.enter_async_context(EmbeddedServer(tmp_path / "nats", login=LOGIN, config=store))
        bus = await JetStreamBus.connect(nats.url, login=LOGIN)
        stack.push_async_callback(bus.close)
        parts = MeshParts(folder=tmp_path, nats=nats, bus=bus, stack=stack, config=config)
        await parts.start_coordinator()
        stack.push_async_callback(parts.stop_coordinator)
        inner = await stack.enter_async_context(
            open_channel(parts.address, access=ACCESS, config=ChannelConfig(wait_for_ready=True))
        )
        parts.decisions = run_pb2_grpc.RunServiceStub(inner)
        parts.coordinator = coordinator_pb2_grpc.CoordinatorServiceStub(inner)
        yield parts


async def _join_all(parts: MeshParts, finalizer: str, data: DataConfig) -> None:
    common: dict[str, Any] = {"access": ACCESS, "coordinator": parts.address}
    depot = DepotConfig(directory=str(parts.folder / "depot"), membership=JOIN, server=ServerConfig(stop_s=0.0))
    stop = ServerConfig(stop_s=0.0)
    reward = RewardConfig(finalizers=(Extension(finalizer),))
    worker = coordinator_pb2.NodeHello(node_id=WORKER, kind=ROLLOUT, capacity=8)
    for node in (
        DataNode(data, node_id="data-0", bus=parts.bus, server=stop, **common),
        RewardNode(reward, node_id="reward-0", server=stop, **common),
        DepotNode(depot, node_id="depot-0", **common),
        Membership(parts.address, access=ACCESS, handler=PassiveHandler(worker), config=JOIN),
    ):
        await parts.stack.enter_async_context(node)
    gateway = GatewayNode(
        GatewayConfig(server=stop), node_id="gateway-0", folder=parts.folder / "gateway-0", bus=parts.bus, **common
    )
    parts.gateway = await parts.stack.enter_async_context(gateway)
    channels = ChannelConfig(wait_for_ready=True)
    outer = await parts.stack.enter_async_context(open_channel(gateway.address, access=ACCESS, config=channels))
    parts.run = run_pb2_grpc.RunServiceStub(outer)
    await parts.wait_ready(DATA, REWARD, DEPOT, ROLLOUT)
