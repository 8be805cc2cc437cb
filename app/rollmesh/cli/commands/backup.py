"""`rollmesh backup` and `rollmesh restore`: the ledger and the other streams of a run as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollmesh.cli.app import AsJson, Join, Overrides, Tls, TokenFile, app, print_json, report_errors


@app.command()
def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write. It must not exist.")],
    run: Annotated[
        Path | None, typer.Option("--run", help="The folder of a run or mesh, which may be running.")
    ] = None,
    join: Join = "",
    token_file: TokenFile = None,
    overrides: Tls = None,
    login_file: Annotated[
        Path | None,
        typer.Option("--login-file", help="Login of the operator at the NATS of a mesh that is named by --join."),
    ] = None,
    name: Annotated[
        str,
        typer.Option(
            "--run-name", help="Name of the run, if the mesh served several.", show_default="the configured run"
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Write the ledger, the live samples and the dead letters of a run to a file. Checkpoints are not included."""
    with report_errors():
        from rollmesh.app.backup.backup import back_up_folder, back_up_mesh, summary_text
        from rollmesh.app.mesh_client import find_mesh

        if run is not None and not join:
            summary = back_up_folder(run, file, name=name)
        else:
            summary = back_up_mesh(
                find_mesh(run, join, token_file, overrides or ()), file, name=name, login_file=login_file
            )
    if as_json:
        print_json(summary)
        return
    typer.echo(summary_text(summary, file))


@app.command()
def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file of `rollmesh backup`.")],
    out: Annotated[
        Path,
        typer.Option(
            "--out", help="Folder of the restored run. It must be empty, or of the same restore that was interrupted."
        ),
    ],
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Restore a run from a backup, into streams that do not exist. It never overwrites."""
    with report_errors():
        from rollmesh.app.backup.backup import summary_text
        from rollmesh.app.backup.restore import restore_backup

        summary = restore_backup(file, out, overrides or ())
    if as_json:
        print_json(summary)
        return
    typer.echo(summary_text(summary, out))
    typer.echo(f"copy the checkpoints to {out / 'checkpoints'}, then resume the run with `rollmesh train {out}`")
