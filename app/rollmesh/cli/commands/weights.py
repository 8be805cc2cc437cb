"""`rollmesh weights`: list the versions that the inference nodes of a running mesh have."""

from __future__ import annotations

import typer

from rollmesh.cli.app import AsJson, Join, OnHost, Tls, TokenFile, app, console, report_errors


@app.command()
def weights(
    run: OnHost = None,
    join: Join = "",
    token_file: TokenFile = None,
    settings: Tls = None,
    as_json: AsJson = False,
) -> None:
    """List the versions that inference nodes serve, hold or have prepared, with precision, size, kind and base."""
    with report_errors():
        import msgspec

        from rollmesh.app.mesh_client import call_mesh, find_mesh
        from rollmesh.app.views.weights_view import versions_of, weights_table

        mesh = find_mesh(run, join, token_file, settings or [])
        found = call_mesh(mesh, lambda client: versions_of(mesh, client))
        if as_json:
            typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        else:
            console(as_json).print(weights_table(found))
