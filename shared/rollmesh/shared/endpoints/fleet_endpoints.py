"""The endpoints of a run, as its nodes open them: HTTP servers, and weights on the nodes of the fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import grpc

from rollmesh.shared.clients.generated import Target
from rollmesh.shared.clients.inference import InferenceRouter
from rollmesh.shared.clients.inference_nodes import RouterConfig
from rollmesh.shared.clock import Clock
from rollmesh.shared.endpoints.answer import ModelBackend
from rollmesh.shared.endpoints.client import Endpoints
from rollmesh.shared.endpoints.config import EndpointConfig
from rollmesh.shared.endpoints.weights_backend import ChatEncoder, WeightsBackend
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.membership.fleet import KnownFleet
from rollmesh.shared.rpc.access import Access
from rollmesh.v1 import coordinator_pb2


def _no_encoder(name: str) -> NoReturn:
    raise ConfigError(f"this process has no tokenizer of the endpoint `{name}`")


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointsOfRun:
    """The table of a run, with what its endpoints need of this host."""

    table: Mapping[str, EndpointConfig] = field(default_factory=dict)
    base_dir: Path = Path()
    """Folder of relative files in the table."""
    spent_dir: Path | None = None
    """Folder of the sums of prices, which the processes of a run folder share."""
    policy: str = "main"
    """The policy of endpoints of kind `policy_step`."""
    encoder: Callable[[str], ChatEncoder] = _no_encoder
    """Loads the tokenizer of the model of an endpoint. Raises ConfigError."""

    def open(
        self,
        fleet: KnownFleet,
        open_node: Callable[[str], grpc.aio.Channel],
        *,
        access: Access,
        clock: Clock,
        router: RouterConfig,
    ) -> Endpoints:
        """Return the client of one process. `open_node` opens channels to the inference nodes in `fleet`."""

        async def open_weights(name: str, config: EndpointConfig) -> ModelBackend:
            encoder = await asyncio.to_thread(self.encoder, name)
            frozen = config.kind == "frozen"
            kind = coordinator_pb2.NODE_KIND_ENDPOINT if frozen else coordinator_pb2.NODE_KIND_INFERENCE
            target = Target(policy=self.policy, step=config.step, incarnation=config.incarnation, exact=True)
            nodes = InferenceRouter(fleet, access=access, clock=clock, config=router, open_node=open_node, kind=kind)
            return WeightsBackend(
                nodes, encoder, Target(endpoint=name) if frozen else target, timeout_s=config.timeout_s
            )

        return Endpoints(
            self.table,
            base_dir=self.base_dir,
            spent_dir=self.spent_dir,
            clock=clock,
            open_weights=open_weights,
        )
