"""`rollmesh show`: the samples of a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollmesh.cli.app import AsJson, app, console, print_json, report_errors


@app.command()
def show(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    sample: Annotated[str, typer.Argument(help="Id of a sample or an episode.", show_default="list the samples")] = "",
    limit: Annotated[int, typer.Option(help="Number of samples to list, the newest ones.", min=1)] = 50,
    as_json: AsJson = False,
) -> None:
    """Show the samples of a run. With an id it prints the conversation and the history from the ledger."""
    with report_errors():
        from rollmesh.app.samples.stored_samples import list_samples, show_sample
        from rollmesh.app.samples.transcript import rewards_line, transcript

        if not sample:
            found = list_samples(run, limit)
            if as_json:
                print_json(found)
                return
            for one in found:
                what = one.lost or f"{one.num_tokens} tokens  {rewards_line(one.rewards)}"
                typer.echo(f"{one.sample_id}  {one.task}  {what}")
            if not found:
                typer.echo("no episode has ended yet")
            return
        shown = show_sample(run, sample)
    if as_json:
        print_json(shown)
        return
    if shown.sample is not None:
        console(as_json).print(transcript(shown.sample))
    else:
        typer.echo("its payload is no longer in the sample stream; its history in the ledger:")
    typer.echo("\n".join(f"#{line.position} {line.what}" for line in shown.history))
