"""`rollmesh delete`: delete an ended run from a running mesh."""

from __future__ import annotations

from typing import Annotated

import typer

from rollmesh.cli.app import Join, OnHost, Tls, TokenFile, app, report_errors


@app.command()
def delete(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of a run, as `rollmesh status` lists it.")],
    run: OnHost = None,
    join: Join = "",
    token_file: TokenFile = None,
    settings: Tls = None,
) -> None:
    """Delete an ended run from a running mesh. This removes its ledger, samples, snapshots and weights.

    It cannot be audited or resumed afterwards, and its name may be used again. Run folders with checkpoints are kept.
    """
    with report_errors():
        from rollmesh.app.mesh_client import call_mesh, find_mesh

        call_mesh(find_mesh(run, join, token_file, settings or []), lambda client: client.delete(name))
    typer.echo(f"run {name} is deleted")
