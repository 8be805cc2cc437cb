"""`rollmesh dead list` and `rollmesh dead replay`: the dead letters of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollmesh.cli.app import BAD_INPUT, AsJson, app, report_errors

dead = typer.Typer(no_args_is_help=True, help="List and retry dead letters.", rich_markup_mode=None)
app.add_typer(dead, name="dead")

Run = Annotated[Path, typer.Argument(help="The folder of a run, which may be running.")]


@dead.command("list")
def list_(
    run: Run,
    all_: Annotated[bool, typer.Option("--all", help="Print a line per letter instead of a line per cause.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the causes of dead letters with counts. --all and --json list each letter."""
    with report_errors():
        import asyncio
        import json

        from rollmesh.app.dead_letters import as_dicts, as_text, by_cause, list_dead

        letters = asyncio.run(list_dead(run.resolve()))
        text = as_text(letters) if all_ else by_cause(letters)
        typer.echo(json.dumps(as_dicts(letters), indent=2) if as_json else text)


@dead.command()
def replay(
    run: Run,
    ids: Annotated[list[int] | None, typer.Argument(metavar="[ID]...", help="Ids of letters, as listed.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Retry every letter that can be retried.")] = False,
    as_json: AsJson = False,
) -> None:
    """Retry the tasks of dead letters. Each task is reserved as a new group, once."""
    import asyncio
    import json

    if bool(ids) == all_:
        typer.echo("error: name ids of letters or --all, not both", err=True)
        raise typer.Exit(BAD_INPUT)
    with report_errors():
        from rollmesh.app.dead_letters import replay_dead

        taken = asyncio.run(replay_dead(run.resolve(), ids or []))
    text = f"{len(taken):,} tasks will be retried" + (
        f": letters {', '.join(map(str, taken))}" if ids and taken else ""
    )
    typer.echo(json.dumps(taken) if as_json else text)
