"""The data service's state for the learner's checkpoints.

It completes a checkpoint: weights, the samples they were trained on, and the position of the draws. It is a copy,
because the ledger is authoritative. If the data service is unavailable for a moment, the checkpoint is written without
the copy.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from rollmesh.mesh.run_layout import RunLayout
from rollmesh.shared.errors import MeshError, NotReady
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.v1 import coordinator_pb2, coordinator_pb2_grpc, data_pb2, data_pb2_grpc

TAKE_S_MAX = 10.0
_log = logging.getLogger(__name__)


class DataSnapshots:
    """Requests the state from the data node that is registered at the coordinator."""

    def __init__(self, layout: RunLayout) -> None:
        self._layout = layout

    async def __call__(self, ledger_position: int) -> bytes:
        """Return the state at `ledger_position` or later. Empty, with a warning, if it is not available within
        `TAKE_S_MAX`."""
        try:
            async with asyncio.timeout(TAKE_S_MAX):
                return await self._take(ledger_position)
        except (MeshError, TimeoutError) as err:
            _log.warning("checkpoint without the data service's state: %s", err or "it did not answer in time")
            return b""

    async def _take(self, ledger_position: int) -> bytes:
        access, request = self._layout.access, data_pb2.SnapshotRequest(run=self._layout.run)
        with typed_errors():
            async with open_channel(await self._address(), access=access) as channel:
                stub: Any = data_pb2_grpc.DataServiceStub(channel)
                taken = await stub.Snapshot(request, timeout=TAKE_S_MAX)
        if taken.ledger_position < ledger_position:
            raise NotReady(f"the data service is at {taken.ledger_position}, before {ledger_position}")
        return bytes(taken.state)

    async def _address(self) -> str:
        async with open_channel(self._layout.coordinators, access=self._layout.access) as channel:
            stub: Any = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
            fleet = await stub.GetFleet(
                coordinator_pb2.GetFleetRequest(kind=coordinator_pb2.NODE_KIND_DATA), timeout=TAKE_S_MAX
            )
        for node in fleet.nodes:
            if node.state == coordinator_pb2.NODE_STATE_READY:
                return str(node.address)
        raise NotReady("no data service is ready")
