"""`rollmesh stop`: end a live run of a running mesh."""

from __future__ import annotations

from typing import Annotated

import typer

from rollmesh.cli.app import Join, OnHost, Tls, TokenFile, app, report_errors


@app.command()
def stop(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of a run, as `rollmesh status` lists it.")],
    run: OnHost = None,
    join: Join = "",
    token_file: TokenFile = None,
    settings: Tls = None,
    reason: Annotated[str, typer.Option(help="Recorded with the end of the run.")] = "",
) -> None:
    """End a live run of a running mesh. The coordinator admits no new groups, and its trainer gets the command to stop.

    The mesh keeps running. The run stays stopped when it is resumed. `rollmesh audit` and `rollmesh delete` accept it.
    """
    with report_errors():
        from rollmesh.app.mesh_client import call_mesh, find_mesh

        ended = call_mesh(find_mesh(run, join, token_file, settings or []), lambda client: client.stop(name, reason))
    typer.echo(f"run {name} has ended: {ended}")
