"""`rollmesh health`: one gRPC health check, as a probe of a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollmesh.cli.app import FAILED, OnHost, Tls, app, report_errors

if TYPE_CHECKING:
    from rollmesh.shared.rpc.access import Access

NO_TOKEN = "health-checks-need-none"
"""Replaces the token, because Health/Check does not need one."""


@app.command()
def health(
    run: OnHost = None,
    address: Annotated[
        str, typer.Option("--address", metavar="HOST:PORT", help="Address of a service, instead of a run folder.")
    ] = "",
    service: Annotated[
        str, typer.Option(help="Full gRPC name, e.g. rollmesh.v1.RunService.", show_default="the whole server")
    ] = "",
    timeout_s: Annotated[float, typer.Option(help="Timeout of the check, in seconds.", min=0.1)] = 5.0,
    settings: Tls = None,
) -> None:
    """Check the health of a service. The exit code is 0 if it serves and 1 if not, as a Kubernetes probe expects.

    It needs no token. With TLS, name the certificates: --set security.ca=FILE, security.certificate=FILE,
    security.key=FILE.
    """
    with report_errors():
        serves, text = check_health(run, address, settings or [], service=service, timeout_s=timeout_s)
    typer.echo(text)
    raise typer.Exit(0 if serves else FAILED)


def check_health(
    run: Path | None, address: str, overrides: Sequence[str], *, service: str, timeout_s: float
) -> tuple[bool, str]:
    """Return (whether it serves, the line to print). Raises ConfigError unless one of `run` and `address` is given."""
    import asyncio

    from rollmesh.app.run_folder import open_folder
    from rollmesh.mesh.joining import own_security
    from rollmesh.mesh.run_layout import open_layout
    from rollmesh.mesh.security import open_tls
    from rollmesh.shared.errors import ConfigError
    from rollmesh.shared.rpc.access import Access

    if (run is None) == (not address):
        raise ConfigError("name either the folder of a run on this host or --address HOST:PORT")
    if run is not None:
        folder, config, base_dir = open_folder(run, [])
        layout = open_layout(config, run_dir=folder.root, base_dir=base_dir)
        address, access = layout.gateway, layout.access
    else:
        access = Access(NO_TOKEN, open_tls(own_security(overrides), base_dir=Path.cwd()))
    state = asyncio.run(_state(address, access, service, timeout_s))
    if state.startswith(("UNAVAILABLE", "DEADLINE_EXCEEDED")):
        files = ", or it needs --set security.ca=FILE --set security.certificate=FILE --set security.key=FILE"
        state += f"; it does not respond: it is not running{'' if access.tls else files}"
    return state == "SERVING", f"{address} {service or 'server'}: {state}"


async def _state(address: str, access: Access, service: str, timeout_s: float) -> str:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from rollmesh.shared.errors import MeshError
    from rollmesh.shared.rpc.channel import open_channel
    from rollmesh.shared.rpc.status import typed_errors

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
