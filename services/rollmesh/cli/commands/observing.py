"""`rollmesh trace`: what became of one episode."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollmesh.cli.app import AsJson, app, told_once


@app.command()
def trace(
    run: Annotated[Path, typer.Argument(help="The folder of a run with telemetry.traces=file; it may be running.")],
    episode: Annotated[
        str, typer.Argument(help="Episode or trace id; by default the newest episode that was trained on.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Print the trace of one episode as a tree: lease, turns, tools, scores, report, batch lease, commit."""
    with told_once():
        from rollmesh.cli.trace import load_trace, to_json, to_text

        spans = load_trace(run, episode)
    typer.echo(to_json(spans) if as_json else to_text(spans))
