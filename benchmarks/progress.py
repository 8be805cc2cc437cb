"""Wait for the progress of a run, as its gateway reports it."""

from __future__ import annotations

import asyncio
from typing import Any

from rollmesh.mesh.run_layout import RunLayout
from rollmesh.shared.errors import MeshError
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.v1 import run_pb2, run_pb2_grpc

POLL_S = 0.02
CALL_S_MAX = 2.0


async def until_update(layout: RunLayout, update: int, *, limit_s: float) -> int:
    """Wait until `update` is committed, and return the newest one. The gateway may be unavailable meanwhile. Raises
    TimeoutError."""
    async with asyncio.timeout(limit_s), open_channel(layout.gateway, access=layout.access) as channel:
        stub: Any = run_pb2_grpc.RunServiceStub(channel)
        while True:
            try:
                with typed_errors():
                    reply = await stub.GetRun(run_pb2.GetRunRequest(run=layout.run), timeout=CALL_S_MAX)
                if reply.state.policies and reply.state.policies[0].applied_step >= update:
                    return int(reply.state.policies[0].applied_step)
            except MeshError:
                pass  # not started yet, or restarting
            await asyncio.sleep(POLL_S)
