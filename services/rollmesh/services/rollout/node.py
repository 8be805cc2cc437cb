"""The rollout node: the clients of the other services and the worker that uses them.

    async with RolloutNode(config, node_id="rollout-0", coordinator=..., access=..., bus=bus) as node:
        await node.wait()          # until the coordinator has drained it; raises the error that ended the worker

On exit the worker is cancelled first. It cancels its episodes and releases their leases while the node is still a
member and the clients can still end sessions and requests. Then the node leaves, and the clients close.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import grpc

from rollmesh.services.rollout.agent import load_agents
from rollmesh.services.rollout.config import RolloutConfig
from rollmesh.services.rollout.coordinator_link import CoordinatorLink
from rollmesh.services.rollout.data_link import DataLink
from rollmesh.services.rollout.episode import EpisodeParts, EpisodeRunner
from rollmesh.services.rollout.openai.server import OpenAiServer
from rollmesh.services.rollout.ports import SandboxPort
from rollmesh.services.rollout.progress import WorkerProgress
from rollmesh.services.rollout.sample_log import BusSampleLog
from rollmesh.services.rollout.stages import Stages
from rollmesh.services.rollout.tokenizer import Tokenizer, load_tokenizer
from rollmesh.services.rollout.tool_latency import SlowSandbox
from rollmesh.services.rollout.worker import RolloutWorker
from rollmesh.shared.bus.bus import Bus
from rollmesh.shared.clients.inference import InferenceRouter
from rollmesh.shared.clients.reward import RewardClient
from rollmesh.shared.clients.sandbox import SandboxClient
from rollmesh.shared.clock import Clock
from rollmesh.shared.endpoints.fleet_endpoints import EndpointsOfRun
from rollmesh.shared.membership.joined_node import JoinedNode
from rollmesh.shared.process.fault_points import Hook, noop
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.v1 import coordinator_pb2


class RolloutNode(JoinedNode):
    """A node that runs one worker. The caller owns `bus` and closes it after the node."""

    kind = coordinator_pb2.NODE_KIND_ROLLOUT
    serves = False

    def __init__(
        self,
        config: RolloutConfig,
        *,
        node_id: str,
        coordinator: str,
        access: Access,
        bus: Bus,
        clock: Clock | None = None,
        base_dir: str | Path | None = None,
        tokenizer: Tokenizer | None = None,
        endpoints: EndpointsOfRun | None = None,
        open_node: Callable[[str], grpc.aio.Channel] | None = None,
        at: Hook = noop,
    ) -> None:
        """Load the agents and the tokenizer. Raise `ConfigError` if one of them cannot be loaded.

        Relative paths of the config are relative to `base_dir`. `tokenizer` replaces the one in `model_dir`.
        `endpoints` are those that agents may ask. `open_node` opens channels to other nodes, by default with `access`.
        `at` is awaited at each `RolloutFaultPoint` of each episode.
        """
        super().__init__(
            node_id=node_id,
            access=access,
            coordinator=coordinator,
            capacity=config.worker.episodes_max,
            clock=clock,
        )
        self._config = config
        self._bus = bus
        self._base_dir = base_dir
        self._open_node = open_node or (lambda address: open_channel(address, access=access))
        self._at = at
        self._endpoints = (endpoints or EndpointsOfRun()).open(
            self.fleet, self._open_node, access=access, clock=self.clock, router=config.router
        )
        self._agents = load_agents(config, base_dir)
        self._tokenizer = tokenizer or load_tokenizer(Path(base_dir or ".") / config.model_dir, config.format)
        _ = self._tokenizer.format  # a template without an end of turn fails now, not in every episode
        self.progress = WorkerProgress()
        self.stages = Stages(config.stages, self.clock)

    async def build(self, stack: AsyncExitStack) -> None:
        config, clock = self._config, self.clock
        self._router = InferenceRouter(
            self.fleet,
            access=self.access,
            clock=clock,
            config=config.router,
            open_node=self._open_node,
            outputs=config.outputs,
            num_top=config.num_top,
        )
        self._sandbox = SandboxClient(
            lambda: self.ready(coordinator_pb2.NODE_KIND_SANDBOX), self._open_node, clock, config.sandbox
        )
        self._reward = RewardClient(
            lambda: self.ready(coordinator_pb2.NODE_KIND_REWARD), self._open_node, clock, config.reward
        )
        self._data = DataLink(lambda: self.ready(coordinator_pb2.NODE_KIND_DATA), self._open_node, clock, config.worker)
        channel, serving = [open_channel(self.coordinator, access=self.access) for _ in range(2)]
        # Calls for served episodes wait, and a connection has a limit of calls: they must not delay renewals.
        self._applications = CoordinatorLink(serving, self.node_id, rpc_s_max=config.worker.rpc_s_max)
        self._model_server = OpenAiServer(config, self._tokenizer, clock, self._base_dir)
        clients = (self._reward, self._data, self._sandbox, self._router, self._endpoints, self._model_server)
        for close in (channel.close, serving.close, *(client.close for client in clients)):
            stack.push_async_callback(close)
        link = CoordinatorLink(channel, self.node_id, rpc_s_max=config.worker.rpc_s_max)
        self.worker = RolloutWorker(link, self._runner(), self.progress, config.worker, clock)

    async def run(self) -> None:
        """Run the worker. Until the node has joined, the coordinator returns UNKNOWN_NODE, which the worker retries."""
        await self.worker.run()

    def report(self) -> coordinator_pb2.NodeReport:
        waiting_for, waiting_on = self.wait_now()
        return coordinator_pb2.NodeReport(
            num_running=self.worker.num_running, waiting_for=waiting_for, waiting_on=waiting_on
        )

    async def on_cancel(self, command: coordinator_pb2.CancelEpisodes) -> None:
        self.worker.cancel(command.lease_ids)

    async def on_drain(self) -> None:
        self.worker.drain()

    @property
    def waiting_for(self) -> str:
        """A description of the current wait; empty if the node does not wait."""
        return self.wait_now()[0]

    def wait_now(self) -> tuple[str, coordinator_pb2.NodeKind.ValueType]:
        """Return a description of the current wait, and the kind of node that can end it."""
        assert self.membership is not None, "not entered"
        waiters = (
            (self.membership, coordinator_pb2.NODE_KIND_UNSPECIFIED),
            (self._router, coordinator_pb2.NODE_KIND_INFERENCE),
            (self._sandbox, coordinator_pb2.NODE_KIND_SANDBOX),
            (self._reward, coordinator_pb2.NODE_KIND_REWARD),
            (self._data, coordinator_pb2.NODE_KIND_DATA),
            (self.worker, coordinator_pb2.NODE_KIND_UNSPECIFIED),
        )
        waits = ((waiter.waiting_for, kind) for waiter, kind in waiters if waiter.waiting_for)
        return next(waits, ("", coordinator_pb2.NODE_KIND_UNSPECIFIED))

    @property
    def num_open(self) -> int:
        """Number of leases, sessions and requests held now."""
        return (
            self.worker.num_running + self._sandbox.num_sessions + self._sandbox.num_pending + self._reward.num_pending
        )

    def _runner(self) -> EpisodeRunner:
        config = self._config
        sandbox: SandboxPort = self._sandbox
        if config.tool_latency.distribution != "none":
            sandbox = SlowSandbox(sandbox, config.tool_latency, self.clock)
        return EpisodeRunner(
            EpisodeParts(
                config=config,
                agents=self._agents,
                tokenizer=self._tokenizer,
                generator=self._router,
                sandbox=sandbox,
                scorer=self._reward,
                data=self._data,
                samples=BusSampleLog(self._bus, config.worker, self.clock),
                clock=self.clock,
                stages=self.stages,
                progress=self.progress,
                endpoints=self._endpoints,
                applications=self._applications,
                server=self._model_server,
                base_dir=self._base_dir,
                at=self._at,
            )
        )
