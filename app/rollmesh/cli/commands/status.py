"""`rollmesh status`: show a running mesh once, or every second."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rollmesh.cli.app import AsJson, Join, OnHost, Tls, TokenFile, app, console, report_errors

if TYPE_CHECKING:
    from rollmesh.app.mesh_client import MeshAddress

REFRESH_S = 1.0


@app.command()
def status(
    run: OnHost = None,
    join: Join = "",
    token_file: TokenFile = None,
    settings: Tls = None,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every second until Ctrl-C.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show a running mesh. The output lists nodes, versions, leases, groups, waits and sample counts."""
    with report_errors():
        import asyncio

        from rollmesh.app.mesh_client import call_mesh, find_mesh
        from rollmesh.app.views.status_view import status_json, status_view

        mesh = find_mesh(run, join, token_file, settings or [])
        if watch and not as_json:
            asyncio.run(_watch(mesh))
            return
        found = call_mesh(mesh, lambda client: client.status())
        if as_json:
            typer.echo(status_json(found).decode())
        else:
            console(as_json).print(status_view(found))


async def _watch(mesh: MeshAddress) -> None:
    """Refresh until Ctrl-C. If the mesh does not respond, show the error."""
    from rich.live import Live
    from rich.text import Text

    from rollmesh.app.mesh_client import FleetClient
    from rollmesh.app.views.status_view import status_view
    from rollmesh.shared.clock import SystemClock
    from rollmesh.shared.errors import MeshError

    clock, terminal = SystemClock(), console(as_json=False)
    async with FleetClient(mesh) as client:
        with Live(console=terminal, auto_refresh=False, screen=terminal.is_terminal) as live:
            while True:
                try:
                    live.update(status_view(await client.status()), refresh=True)
                except MeshError as err:
                    live.update(Text(f"{mesh.address}: {err}"), refresh=True)
                await clock.sleep(REFRESH_S)
