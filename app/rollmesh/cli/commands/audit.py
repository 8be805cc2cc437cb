"""`rollmesh audit`: verify a run from its ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollmesh.cli.app import FAILED, AsJson, app, report_errors


@app.command()
def audit(
    run: Annotated[Path, typer.Argument(help="The folder of a run or mesh, which may be running.")],
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Compare the ledger with the samples listed in this checkpoint folder of the built-in learner.",
            show_default="the newest checkpoint of the configured run",
        ),
    ] = None,
    head: Annotated[
        list[str] | None,
        typer.Option(
            metavar="POSITION:HASH",
            help="A ledger head stored elsewhere, which the ledger must contain. Repeatable. Heads stored in the "
            "folder are found.",
        ),
    ] = None,
    payloads: Annotated[
        bool, typer.Option("--payloads", help="Compare the metadata with every payload left in the sample stream.")
    ] = False,
    sample: Annotated[str, typer.Option(help="Print the history of this sample.")] = "",
    name: Annotated[
        str,
        typer.Option(
            "--run-name", help="Name of the run, if the mesh served several.", show_default="the configured run"
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Verify a run from its ledger. No sample is lost, trained twice, or trained beyond the staleness bound."""
    with report_errors():
        from rollmesh.app.folder_audit import audit_folder

        holds, text = audit_folder(
            run, checkpoint=checkpoint, heads=head or (), payloads=payloads, sample=sample, name=name, as_json=as_json
        )
    typer.echo(text)
    raise typer.Exit(0 if holds else FAILED)
