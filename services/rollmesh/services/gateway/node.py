"""The gateway node: serves RunService and the public part of CoordinatorService with a coordinator and a bus.

async with GatewayNode(config, node_id="gateway-0", coordinator="127.0.0.1:7000", access=access, folder=folder,
                       bus_url=url) as gateway:
    gateway.address                # the address for trainers
"""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack
from pathlib import Path

from rollmesh.services.gateway.config import GatewayConfig
from rollmesh.services.gateway.coordinator_front import CoordinatorFront
from rollmesh.services.gateway.exports import Exports
from rollmesh.services.gateway.forwarded_calls import ForwardedCalls
from rollmesh.services.gateway.heads import Heads
from rollmesh.services.gateway.page.parts import PageParts
from rollmesh.services.gateway.page.server import LivePage, is_served
from rollmesh.services.gateway.payloads import PayloadReader
from rollmesh.services.gateway.servicer import GatewayServicer
from rollmesh.shared.bus.bus import Bus
from rollmesh.shared.bus.jetstream_bus import JetStreamBus
from rollmesh.shared.bus.login import BusLogin
from rollmesh.shared.clock import Clock
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.membership.joined_node import JoinedNode
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.addresses import host_of, is_loopback
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.limits import RECORDED, RECORDED_TEXTS
from rollmesh.v1 import coordinator_pb2, coordinator_pb2_grpc, run_pb2_grpc

IDEMPOTENT = (
    "rollmesh.v1.RunService",
    *(f"rollmesh.v1.CoordinatorService/{verb}" for verb in ("GetBatch", "GetMesh", "GetFleet", "Drain")),
)
"""The contract of RunService allows clients to repeat every call."""
ONCE = tuple(f"rollmesh.v1.RunService/{verb}" for verb in ("OpenEpisode", "FinishEpisode"))
"""Calls whose wait ends with UNAVAILABLE. Their client repeats them."""
_log = logging.getLogger(__name__)


class GatewayNode(JoinedNode):
    """One gateway. Pass a bus or the URL of one."""

    kind = coordinator_pb2.NODE_KIND_GATEWAY

    def __init__(
        self,
        config: GatewayConfig,
        *,
        node_id: str,
        coordinator: str,
        access: Access,
        folder: str | Path,
        bus: Bus | None = None,
        bus_url: str = "",
        page: PageParts | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`folder` stores the heads of ledgers. `page` has what the live page needs of other services."""
        assert (bus is None) != (not bus_url), "pass either bus or bus_url"
        super().__init__(node_id=node_id, access=access, coordinator=coordinator, server=config.server, clock=clock)
        self._config = config
        self._folder = Path(folder)
        self._heads = Heads(self._folder)
        self._page_parts = page or PageParts()
        self.page: LivePage | None = None
        """The live page; None if it is not served."""
        self._bus = bus
        self._bus_url = bus_url

    async def build(self, stack: AsyncExitStack) -> None:
        self._heads.open()
        stack.push_async_callback(self._heads.close)
        bus = self._bus
        if bus is None:
            bus = await JetStreamBus.connect(self._bus_url, login=BusLogin.of(self.access))
            stack.push_async_callback(bus.close)
        channel, stream_channel, episode_channel = [
            await stack.enter_async_context(
                open_channel(self.coordinator, access=self.access, idempotent=IDEMPOTENT, once=ONCE)
            )
            for _ in range(3)  # a connection has a limit of calls, and long ones must not block the short ones
        ]
        streams = ForwardedCalls("forwarded streams", self._config.forwarded_max)
        coordinator: coordinator_pb2_grpc.CoordinatorServiceAsyncStub = coordinator_pb2_grpc.CoordinatorServiceStub(
            channel
        )
        run: run_pb2_grpc.RunServiceAsyncStub = run_pb2_grpc.RunServiceStub(channel)
        servicer = GatewayServicer(
            run,
            coordinator,
            PayloadReader(bus, reads_max=self._config.reads_max),
            Exports(bus),
            self._heads,
            stream_channel=stream_channel,
            streams=streams,
            episode_channel=episode_channel,
            episodes=ForwardedCalls("calls of OpenEpisode and FinishEpisode", self._config.forwarded_max),
            waits=ForwardedCalls("waiting calls of LeaseBatch", self._config.forwarded_max),
            call_s=self._config.call_s,
        )
        self.add(run_pb2_grpc.add_RunServiceServicer_to_server, servicer, limits=RECORDED_TEXTS)
        front = CoordinatorFront(
            coordinator, stream_channel=stream_channel, streams=streams, call_s=self._config.call_s
        )
        self.add(coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server, front, limits=RECORDED)
        config = self._config.page
        if is_served(config, local=is_loopback(host_of(self._config.server.address))):
            page = LivePage(
                config,
                access=self.access,
                run=run,
                coordinator=coordinator,
                bus=bus,
                folder=self._folder,
                parts=self._page_parts,
                call_s=self._config.call_s,
                clock=self.clock,
            )
            stack.push_async_callback(page.close)
            self._start_page(page)

    def _start_page(self, page: LivePage) -> None:
        """Start the page. Without it the gateway serves trainers as well, unless the configuration requires the
        page."""
        try:
            page.start()
        except ConfigError as err:
            if self._config.page.serve == "always":
                raise
            _log.warning("the live page is not served: node=%s cause=%s", self.node_id, err)
            return
        self.page = page
