"""`rollmesh dead`: what a run has given up, and another try for it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated

import typer

from rollmesh.services.cli.app import BAD_INPUT, AsJson, app, told_once

dead = typer.Typer(no_args_is_help=True, help="What a run has given up: list it, try it again.", rich_markup_mode=None)
app.add_typer(dead, name="dead")

Run = Annotated[Path, typer.Argument(help="The folder of a run, whether it is running or not.")]


@dead.command("list")
def list_(run: Run, as_json: AsJson = False) -> None:
    """List the tasks and payloads that were given up, each with its cause."""
    with told_once():
        from rollmesh.services.cli.dead import as_dicts, as_text, list_dead

        letters = asyncio.run(list_dead(run.resolve()))
        typer.echo(json.dumps(as_dicts(letters), indent=2) if as_json else as_text(letters))


@dead.command()
def replay(
    run: Run,
    ids: Annotated[list[int] | None, typer.Argument(metavar="[ID]...", help="Letters, as listed.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="All that can be replayed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Try given-up tasks again: each is reserved as a new group, once."""
    if bool(ids) == all_:
        typer.echo("error: name letters or --all, and not both", err=True)
        raise typer.Exit(BAD_INPUT)
    with told_once():
        from rollmesh.services.cli.dead import replay_dead

        taken = asyncio.run(replay_dead(run.resolve(), ids or []))
    words = f"{len(taken)} tasks will be tried again" + (f": letters {', '.join(map(str, taken))}" if taken else "")
    typer.echo(json.dumps(taken) if as_json else words)
