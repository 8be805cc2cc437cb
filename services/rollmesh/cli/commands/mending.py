"""`rollmesh dead`: what a run has given up, and another try for it; `rollmesh clean`: disk that a run can do without."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated

import typer

from rollmesh.cli.app import BAD_INPUT, AsJson, app, told_once

dead = typer.Typer(no_args_is_help=True, help="What a run has given up: list it, try it again.", rich_markup_mode=None)
app.add_typer(dead, name="dead")

Run = Annotated[Path, typer.Argument(help="The folder of a run, whether it is running or not.")]


@dead.command("list")
def list_(
    run: Run,
    all_: Annotated[bool, typer.Option("--all", help="A line for each instead of one for each cause.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the causes for which tasks and payloads were given up, with counts; --all and --json list each one."""
    with told_once():
        from rollmesh.cli.dead import as_dicts, as_text, by_cause, list_dead

        letters = asyncio.run(list_dead(run.resolve()))
        text = as_text(letters) if all_ else by_cause(letters)
        typer.echo(json.dumps(as_dicts(letters), indent=2) if as_json else text)


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
        from rollmesh.cli.dead import replay_dead

        taken = asyncio.run(replay_dead(run.resolve(), ids or []))
    words = f"{len(taken)} tasks will be tried again" + (f": letters {', '.join(map(str, taken))}" if taken else "")
    typer.echo(json.dumps(taken) if as_json else words)


@app.command()
def clean(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs that are not running.")],
    keep_last: Annotated[int, typer.Option(min=1, help="Checkpoints that stay, the newest.")] = 1,
    for_good: Annotated[
        bool, typer.Option("--for-good", help="Also remove what a resume needs: ledger and streams.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove old checkpoints and cached weights; with --for-good also ledger and streams, after an audit."""
    with told_once():
        from rollmesh.cli.clean import CleanOptions, clean_folder

        options = CleanOptions(keep_last=keep_last, for_good=for_good, dry_run=dry_run)
        for run in runs:
            removals, remark = clean_folder(run, options)
            if as_json:
                found = [{"path": r.path, "num_bytes": r.num_bytes, "why": r.why} for r in removals]
                typer.echo(json.dumps({"run": str(run), "dry_run": dry_run, "removed": found, "remark": remark}))
                continue
            for removal in removals:
                typer.echo(f"{removal.num_bytes / 2**20:>10.1f} MiB  {removal.path}  ({removal.why})")
            total = sum(removal.num_bytes for removal in removals) / 2**20
            typer.echo(f"{total:>10.1f} MiB  {'would be freed' if dry_run else 'freed'} in {run}")
            if remark:
                typer.echo(remark, err=True)
