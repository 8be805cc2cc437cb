"""`rollmesh demo`, `train`, `check`: from a configuration to a trained model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollmesh.cli.app import (
    INTERRUPTED,
    AsJson,
    InProcess,
    Out,
    Overrides,
    app,
    console,
    set_up_compute,
    told_once,
)

if TYPE_CHECKING:
    from rollmesh.cli.summary import Summary


@app.command()
def demo(
    overrides: Overrides = None,
    seed: Annotated[int, typer.Option(help="Seed of warm start and training alike.", min=0)] = 0,
    out: Out = None,
    in_process: InProcess = False,
    as_json: AsJson = False,
) -> None:
    """Train a tiny model to use a calculator, from nothing, and watch held-out success rise."""
    with told_once():
        from rollmesh.cli import train as runs

        set_up_compute()
        summary = runs.demo(
            seed, overrides or [], command=sys.argv, console=console(as_json), out=out, in_process=in_process
        )
    _finish(summary, as_json)


@app.command()
def train(
    config: Annotated[
        Path | None, typer.Argument(help="A configuration file, or the folder of a run that is to go on.")
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume",
            metavar="RUN",
            help="Go on with the run in this folder, after Ctrl-C, a crash or its end; KEY=VALUE then changes what may change.",
        ),
    ] = None,
    out: Out = None,
    in_process: InProcess = False,
    as_json: AsJson = False,
) -> None:
    """Train by a configuration file, or go on with a run: `train RUN` and `train --resume RUN` are the same."""
    with told_once():
        from rollmesh.cli import train as runs

        path, changes = _subject(config, resume, overrides or [])
        set_up_compute()
        summary = runs.train(path, changes, command=sys.argv, console=console(as_json), out=out, in_process=in_process)
    _finish(summary, as_json)


@app.command()
def check(
    config: Annotated[Path, typer.Argument(help="A configuration file.")],
    overrides: Overrides = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Also run one episode with its scorers, and print what was said and the rewards."
        ),
    ] = False,
) -> None:
    """Find every mistake in a configuration before a run, and print every setting with the value in force."""
    with told_once():
        from rollmesh.cli import train as runs

        set_up_compute()
        text, lines = runs.check_file(config, overrides or [])
        typer.echo(text, nl=False)
        for line in lines:
            typer.echo(line, err=True)
        if dry_run:
            _dry_run(config, overrides or [])


def _dry_run(config: Path, overrides: list[str]) -> None:
    from rollmesh.cli import dry_run
    from rollmesh.cli.transcript import transcript

    terminal = console(as_json=True)
    with terminal.status("dry run") as status:
        dry_run.dry_run(
            config,
            overrides,
            on_sample=lambda line: terminal.print(transcript(line)),
            on_phase=lambda phase: status.update(f"dry run: {phase}"),
        )


def _subject(config: Path | None, resume: Path | None, overrides: list[str]) -> tuple[Path, list[str]]:
    """What to train, and the changes to it. With --resume the first argument is a change already."""
    from rollmesh.shared.errors import ConfigError

    if resume is None:
        if config is None:
            raise ConfigError("name a configuration file, or a run's folder with --resume")
        return config, overrides
    if not resume.is_dir():
        raise ConfigError(f"--resume {resume}: there is no such folder; name one that `rollmesh train` or `demo` made")
    if config is None:
        return resume, overrides
    if "=" not in str(config):
        raise ConfigError(
            f"--resume {resume} goes on under the run's own configuration; leave {config} away, or give KEY=VALUE"
        )
    return resume, [str(config), *overrides]


def _finish(summary: Summary, as_json: bool) -> None:
    from rollmesh.cli.final_summary import closing_words
    from rollmesh.cli.summary import encode_summary

    typer.echo(encode_summary(summary).decode() if as_json else closing_words(summary), nl=False)
    raise typer.Exit(INTERRUPTED if summary.outcome == "interrupted" else 0)
