"""`rollmesh audit`: what a run's ledger proves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollmesh.services.cli.app import FAILED, AsJson, app, told_once


@app.command()
def audit(
    run: Annotated[Path, typer.Argument(help="The folder of a run that is not running.")],
    checkpoint: Annotated[
        Path | None, typer.Option(help="Hold the ledger against what this checkpoint was trained on.")
    ] = None,
    sample: Annotated[str, typer.Option(help="Tell the life of this sample.")] = "",
    name: Annotated[
        str, typer.Option("--run-name", help="Which run of a mesh that was up; by default the configuration's.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Prove from the ledger that nothing was lost, nothing trained twice, nothing beyond the bound."""
    with told_once():
        from rollmesh.services.cli.audit import audit_folder

        holds, text = audit_folder(run, checkpoint=checkpoint, sample=sample, name=name, as_json=as_json)
    typer.echo(text)
    raise typer.Exit(0 if holds else FAILED)
