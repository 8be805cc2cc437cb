"""A rollout node put together: membership, clients, worker, as one async context.

    async with RolloutNode(config, node_id="rollout-0", coordinator=..., access=..., bus=bus) as node:
        await node.wait()          # until drained by the coordinator, or raises what ended the worker

Built outside-in, taken down in reverse: the worker first, which cancels its episodes and gives their leases back while the node is
still a member and the clients that end sessions and requests still live; then membership; then the clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc

from rollmesh.services.rollout.agent import load_agent
from rollmesh.services.rollout.config import RolloutConfig
from rollmesh.services.rollout.coordinator_link import CoordinatorLink
from rollmesh.services.rollout.episode import EpisodeParts, EpisodeRunner
from rollmesh.services.rollout.ports import Sandbox
from rollmesh.services.rollout.progress import Progress
from rollmesh.services.rollout.sample_log import BusSampleLog
from rollmesh.services.rollout.stages import Stages
from rollmesh.services.rollout.tokenizer import Tokenizer, load_tokenizer
from rollmesh.services.rollout.tool_latency import SlowSandbox
from rollmesh.services.rollout.worker import RolloutWorker
from rollmesh.shared.bus.bus import Bus
from rollmesh.shared.clients.inference import InferenceRouter
from rollmesh.shared.clients.reward import RewardClient
from rollmesh.shared.clients.sandbox import SandboxClient
from rollmesh.shared.clock import Clock, SystemClock
from rollmesh.shared.fault_points import Hook, noop
from rollmesh.shared.membership import Membership, PassiveHandler
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.v1 import coordinator_pb2


class RolloutNode:
    """One worker of the mesh. `bus` is the caller's and outlives the node."""

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
        open_node: Callable[[str], grpc.aio.Channel] | None = None,
        at: Hook = noop,
    ) -> None:
        """Raises `ConfigError` for an agent or a tokenizer that doesn't load.

        `base_dir` is where relative files of the config are looked up; `tokenizer` replaces the one in `model_dir`; `open_node` opens
        channels to other nodes, by default with `token`; `at` is awaited at each `RolloutFaultPoint` of each episode.
        """
        self._config = config
        self._node_id = node_id
        self._coordinator = coordinator
        self._access = access
        self._bus = bus
        self._clock = clock or SystemClock()
        self._open_node = open_node or (lambda address: open_channel(address, access=access))
        self._at = at
        self._agent = load_agent(config.agent, config.agent_options, base_dir)
        self._tokenizer = tokenizer or load_tokenizer(Path(base_dir or ".") / config.model_dir, config.format)
        _ = self._tokenizer.format  # a template without an end of turn is an error now, not in every episode
        self._stack = AsyncExitStack()
        self._task: asyncio.Task[None] | None = None
        self.progress = Progress()
        self.stages = Stages(config.stages, self._clock)
        self.membership = Membership(coordinator, access=access, handler=_Commands(self), clock=self._clock)

    @property
    def waiting_for(self) -> str:
        """What the node waits for; empty if for nothing."""
        return self.wait_now()[0]

    def wait_now(self) -> tuple[str, coordinator_pb2.NodeKind.ValueType]:
        """What the node waits for, and the kind of node that could end it."""
        parts = (
            (self.membership, coordinator_pb2.NODE_KIND_UNSPECIFIED),
            (self._router, coordinator_pb2.NODE_KIND_INFERENCE),
            (self._sandbox, coordinator_pb2.NODE_KIND_SANDBOX),
            (self._reward, coordinator_pb2.NODE_KIND_REWARD),
            (self.worker, coordinator_pb2.NODE_KIND_UNSPECIFIED),
        )
        waits = ((part.waiting_for, kind) for part, kind in parts if part.waiting_for)
        return next(waits, ("", coordinator_pb2.NODE_KIND_UNSPECIFIED))

    @property
    def num_open(self) -> int:
        """Leases, sessions and requests held now."""
        return (
            self.worker.num_running + self._sandbox.num_sessions + self._sandbox.num_pending + self._reward.num_pending
        )

    async def wait(self) -> None:
        """Until the worker has drained; raises what ended it otherwise."""
        assert self._task is not None, "not entered"
        await asyncio.shield(self._task)

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            self._build(stack)
            await stack.enter_async_context(self.membership)
            # Not after joining: until then the coordinator answers UNKNOWN_NODE, which the worker takes as "try again".
            self._task = asyncio.create_task(self.worker.run(), name=f"rollout {self._node_id}")
            stack.push_async_callback(_cancelled, self._task)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, err, trace)

    def _build(self, stack: AsyncExitStack) -> None:
        config, clock, fleet = self._config, self._clock, self.membership.fleet
        self._router = InferenceRouter(
            fleet, access=self._access, clock=clock, config=config.router, open_node=self._open_node
        )
        self._sandbox = SandboxClient(
            lambda: self._ready(coordinator_pb2.NODE_KIND_SANDBOX), self._open_node, clock, config.sandbox
        )
        self._reward = RewardClient(
            lambda: self._ready(coordinator_pb2.NODE_KIND_REWARD), self._open_node, clock, config.reward
        )
        channel = open_channel(self._coordinator, access=self._access)
        for close in (channel.close, self._reward.close, self._sandbox.close, self._router.close):
            stack.push_async_callback(close)
        link = CoordinatorLink(channel, self._node_id, rpc_s_max=config.worker.rpc_s_max)
        self.worker = RolloutWorker(link, self._runner(), self.progress, config.worker, clock)

    def _runner(self) -> EpisodeRunner:
        config = self._config
        sandbox: Sandbox = self._sandbox
        if config.tool_latency.distribution != "none":
            sandbox = SlowSandbox(sandbox, config.tool_latency, self._clock)
        return EpisodeRunner(
            EpisodeParts(
                config=config,
                agent=self._agent,
                tokenizer=self._tokenizer,
                generator=self._router,
                sandbox=sandbox,
                scorer=self._reward,
                samples=BusSampleLog(self._bus, config.worker, self._clock),
                clock=self._clock,
                stages=self.stages,
                progress=self.progress,
                at=self._at,
            )
        )

    def _ready(self, kind: coordinator_pb2.NodeKind.ValueType) -> Sequence[str]:
        nodes = self.membership.fleet.nodes(kind)
        return [node.address for node in nodes if node.state == coordinator_pb2.NODE_STATE_READY]

    def hello(self) -> coordinator_pb2.NodeHello:
        """How the node introduces itself."""
        return coordinator_pb2.NodeHello(
            node_id=self._node_id,
            kind=coordinator_pb2.NODE_KIND_ROLLOUT,
            capacity=self._config.worker.episodes_max,
        )


class _Commands(PassiveHandler):
    """The coordinator's commands to a rollout node."""

    def __init__(self, node: RolloutNode) -> None:
        super().__init__(node.hello())
        self._node = node

    def report(self) -> coordinator_pb2.NodeReport:
        node = self._node
        waiting_for, waiting_on = node.wait_now()
        return coordinator_pb2.NodeReport(
            num_running=node.worker.num_running, waiting_for=waiting_for, waiting_on=waiting_on
        )

    async def on_cancel(self, command: coordinator_pb2.CancelEpisodes) -> None:
        self._node.worker.cancel(command.lease_ids)

    async def on_drain(self) -> None:
        self._node.worker.drain()


async def _cancelled(task: asyncio.Task[None]) -> None:
    """Ends the worker; what ended it before is for `wait` to raise."""
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()
