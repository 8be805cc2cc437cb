"""`RewardNode`: scoring engine, servicer, and the clients of the sandbox and inference nodes that scorers use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from rollmesh.services.reward.config import RewardConfig, build_engine
from rollmesh.services.reward.policy import PolicyClient, PromptEncoder
from rollmesh.services.reward.scorer import Scorer
from rollmesh.services.reward.servicer import RewardServicer
from rollmesh.services.reward.submitted_oracle import CoordinatorKeys
from rollmesh.shared.clients.inference import InferenceRouter
from rollmesh.shared.clients.sandbox import SandboxClient
from rollmesh.shared.clock import Clock
from rollmesh.shared.config.plugin import overrides
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.outputs import NUM_TOP
from rollmesh.shared.endpoints.fleet_endpoints import EndpointsOfRun
from rollmesh.shared.membership.joined_node import JoinedNode
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.server import ServerConfig
from rollmesh.v1 import coordinator_pb2, reward_pb2_grpc


class RewardNode(JoinedNode):
    """A reward node. Without a `coordinator` address it does not join a mesh."""

    kind = coordinator_pb2.NODE_KIND_REWARD

    def __init__(
        self,
        config: RewardConfig,
        *,
        node_id: str,
        access: Access,
        coordinator: str = "",
        clock: Clock | None = None,
        base_dir: Path | None = None,
        server: ServerConfig | None = None,
        estimator: Extension | str = "grpo",
        policy: str = "main",
        num_top: int = NUM_TOP,
        tokenizer: Callable[[], PromptEncoder | None] = lambda: None,
        endpoints: EndpointsOfRun | None = None,
    ) -> None:
        """Relative files in the config are relative to `base_dir`; `estimator` is the trainer's. Raises ConfigError or
        RecordError.

        Scorers that use the policy ask the nodes that serve `policy`, with `num_top` tokens in `top_k`. `tokenizer`
        loads that of the model, and is called only for such scorers. `endpoints` are those that scorers with
        `use_endpoints` may ask.
        """
        super().__init__(
            node_id=node_id,
            access=access,
            coordinator=coordinator,
            capacity=config.concurrency_max,
            server=server,
            clock=clock,
        )
        self._sandbox = SandboxClient(
            lambda: (*config.sandboxes, *self.ready(coordinator_pb2.NODE_KIND_SANDBOX)),
            lambda address: open_channel(address, access=access),
            self.clock,
            config.sandbox,
        )
        self._router = InferenceRouter(
            self.fleet, access=access, clock=self.clock, config=config.router, num_top=num_top
        )
        self._policy = PolicyClient(self._router, policy=policy)
        self._load_tokenizer = tokenizer
        self._endpoints = (endpoints or EndpointsOfRun()).open(
            self.fleet,
            lambda address: open_channel(address, access=access),
            access=access,
            clock=self.clock,
            router=config.router,
        )
        self._answer_keys = CoordinatorKeys(coordinator, access) if coordinator else None
        self.engine = build_engine(
            config, base_dir, self._sandbox, estimator, self._policy, self._endpoints, self._answer_keys
        )
        self._servicer = RewardServicer(self.engine)

    async def build(self, stack: AsyncExitStack) -> None:
        stack.push_async_callback(self._sandbox.close)
        stack.push_async_callback(self._router.close)
        stack.push_async_callback(self._endpoints.close)
        if self._answer_keys is not None:
            stack.push_async_callback(self._answer_keys.close)
        if any(overrides(configured.scorer, Scorer.use_policy) for configured in self.engine.scorers):
            self._policy.encoder = await asyncio.to_thread(self._load_tokenizer)
        stack.push_async_callback(self.engine.close)
        self.add(reward_pb2_grpc.add_RewardServiceServicer_to_server, self._servicer)

    def report(self) -> coordinator_pb2.NodeReport:
        report = coordinator_pb2.NodeReport(num_running=self.engine.num_queued)
        if waiting_for := self._router.waiting_for:
            report.waiting_for, report.waiting_on = waiting_for, coordinator_pb2.NODE_KIND_INFERENCE
        return report
