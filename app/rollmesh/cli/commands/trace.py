"""`rollmesh trace`: the spans of one episode."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollmesh.cli.app import AsJson, app, report_errors


@app.command()
def trace(
    run: Annotated[Path, typer.Argument(help="The folder of a run with telemetry.traces=file, which may be running.")],
    episode: Annotated[
        str, typer.Argument(help="Id of an episode or a trace.", show_default="the newest episode that was trained")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Print the trace of one episode as a tree. It shows lease, turns, tools, scores, report, batch lease and
    commit."""
    with report_errors():
        from rollmesh.app.episode_trace import load_trace, to_json, to_text

        spans = load_trace(run, episode)
    typer.echo(to_json(spans) if as_json else to_text(spans))
