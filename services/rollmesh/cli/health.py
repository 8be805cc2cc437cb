"""`rollmesh health`: one gRPC health check, as a probe of a scheduler calls it. It needs no token, but certificates where there is TLS."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from rollmesh.cli.run_folder import open_folder
from rollmesh.mesh.joining import own_security
from rollmesh.mesh.run_layout import open_place
from rollmesh.mesh.security import open_tls
from rollmesh.shared.errors import ConfigError, MeshError
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.status import typed_errors

NO_TOKEN = "health-checks-need-none"
"""Sent where a token belongs: Health/Check is served without one."""


def check_health(
    run: Path | None, address: str, overrides: Sequence[str], *, service: str, timeout_s: float
) -> tuple[bool, str]:
    """Return (whether it serves, what to print). Raises ConfigError for both or neither of `run` and `address`."""
    if (run is None) == (not address):
        raise ConfigError("name the folder of a run on this host, or --address HOST:PORT of a service, and not both")
    if run is not None:
        folder, config, base_dir = open_folder(run, [])
        layout = open_place(config, run_dir=folder.root, base_dir=base_dir)
        address, access = layout.gateway, layout.access
    else:
        access = Access(NO_TOKEN, open_tls(own_security(overrides), base_dir=Path.cwd()))
    state = asyncio.run(_state(address, access, service, timeout_s))
    return state == "SERVING", f"{address} {service or 'server'}: {state}"


async def _state(address: str, access: Access, service: str, timeout_s: float) -> str:
    async with open_channel(address, access=access) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            with typed_errors():
                answer = await stub.Check(
                    health_pb2.HealthCheckRequest(service=service), timeout=timeout_s, wait_for_ready=True
                )
        except MeshError as error:
            return f"{error.code.name}: {error}"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
