"""`rollmesh audit`, `judge`: what a run's ledger proves, and what hidden tests say of a candidate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollmesh.cli.app import FAILED, AsJson, app, told_once


@app.command()
def audit(
    run: Annotated[Path, typer.Argument(help="The folder of a run that is not running.")],
    checkpoint: Annotated[
        Path | None, typer.Option(help="Hold the ledger against what this checkpoint was trained on.")
    ] = None,
    head: Annotated[
        list[str] | None,
        typer.Option(
            metavar="POSITION:HASH",
            help="A head of the ledger stored elsewhere, which it must still contain; may be repeated. Heads in the folder are found.",
        ),
    ] = None,
    payloads: Annotated[
        bool,
        typer.Option("--payloads", help="Compare metadata with every payload that the sample stream still holds."),
    ] = False,
    sample: Annotated[str, typer.Option(help="Tell the life of this sample.")] = "",
    name: Annotated[
        str, typer.Option("--run-name", help="Which run of a mesh that was up; by default the configuration's.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Prove from the ledger that nothing was lost, nothing trained twice, nothing beyond the bound."""
    with told_once():
        from rollmesh.cli.audit import audit_folder

        holds, text = audit_folder(
            run, checkpoint=checkpoint, heads=head or (), payloads=payloads, sample=sample, name=name, as_json=as_json
        )
    typer.echo(text)
    raise typer.Exit(0 if holds else FAILED)


@app.command()
def judge(
    manifest: Annotated[Path, typer.Argument(help="JSON file with one manifest of hidden tests, see docs/sandbox.md.")],
    files: Annotated[
        list[Path], typer.Argument(help="The candidate's files; a single one is the entry, whatever its name.")
    ],
    config: Annotated[
        Path | None, typer.Option(help="A run's configuration, whose sandbox profiles the manifest names.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Judge a candidate by hidden tests in jails on this machine: to try a manifest before a run depends on it."""
    with told_once():
        import asyncio
        import json

        from rollmesh.cli.judge import as_plain, judge_files, table

        report = asyncio.run(judge_files(manifest, files, config))
        text = json.dumps(as_plain(report), indent=2) if as_json else table(report)
    typer.echo(text)
    raise typer.Exit(0 if report.num_accepted == report.num_tests else FAILED)
