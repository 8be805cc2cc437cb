"""`rollmesh drain`: let one node of a running mesh finish its work and leave."""

from __future__ import annotations

from typing import Annotated

import typer

from rollmesh.cli.app import Join, OnHost, Tls, TokenFile, app, report_errors


@app.command()
def drain(
    node: Annotated[str, typer.Argument(help="Id of a node, as `rollmesh status` lists it.")],
    run: OnHost = None,
    join: Join = "",
    token_file: TokenFile = None,
    settings: Tls = None,
    wait: Annotated[bool, typer.Option("--wait", help="Return after the node has left.")] = False,
    wait_s: Annotated[float, typer.Option(help="Timeout of --wait, in seconds.", min=0.1)] = 600.0,
) -> None:
    """Drain a node. It finishes or releases its work and leaves. No work is lost, and the node is not restarted."""
    with report_errors():
        from rollmesh.app.mesh_client import FleetClient, call_mesh, find_mesh
        from rollmesh.shared.clock import SystemClock

        async def call(client: FleetClient) -> None:
            await client.drain(node)
            if wait:
                await client.until_gone(node, limit_s=wait_s, clock=SystemClock())

        call_mesh(find_mesh(run, join, token_file, settings or []), call)
    typer.echo(f"{node} has left" if wait else f"{node} accepts no new work, and leaves when its work is finished")
