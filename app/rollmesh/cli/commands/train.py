"""`rollmesh train`: train with a configuration file, or resume a run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollmesh.app.compute import set_up_compute
from rollmesh.cli.app import INTERRUPTED, AsJson, InProcess, Out, Overrides, app, console, report_errors

if TYPE_CHECKING:
    from rich.console import Console

    from rollmesh.app.views.summary import Summary


@app.command()
def train(
    config: Annotated[
        Path | None, typer.Argument(help="A configuration file, or the folder of a run to resume.")
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[
        Path | None,
        typer.Option("--resume", metavar="RUN", help="Resume the run in this folder. KEY=VALUE changes its settings."),
    ] = None,
    out: Out = None,
    in_process: InProcess = False,
    as_json: AsJson = False,
) -> None:
    """Train with a configuration file, or resume a run. `train RUN` and `train --resume RUN` are the same."""
    run_and_report(lambda: _subject(config, resume, overrides or []), out=out, in_process=in_process, as_json=as_json)


def _subject(config: Path | None, resume: Path | None, overrides: list[str]) -> tuple[Path, list[str]]:
    """Return the configuration file or run folder, and the overrides. With --resume the first argument is already an
    override."""
    from rollmesh.shared.errors import ConfigError

    if resume is None:
        if config is None:
            raise ConfigError("the configuration is missing; name a configuration file, or a run folder with --resume")
        return config, overrides
    if not resume.is_dir():
        raise ConfigError(
            f"--resume {resume}: the folder does not exist; name one that `rollmesh train` or `rollmesh demo` created"
        )
    if config is None:
        return resume, overrides
    if "=" not in str(config):
        raise ConfigError(
            f"--resume {resume} uses the configuration of the run, got {config}; remove it, or give KEY=VALUE"
        )
    return resume, [str(config), *overrides]


def run_and_report(
    subject: Callable[[], tuple[Path, list[str]]], *, out: Path | None, in_process: bool, as_json: bool
) -> None:
    """Train what `subject` returns, print the summary and exit."""
    from rollmesh.app.views.summary import encode_summary, summary_text

    with report_errors():
        path, changes = subject()
        set_up_compute()
        summary = run_training(path, changes, console=console(as_json), out=out, in_process=in_process)
    typer.echo(encode_summary(summary).decode() if as_json else summary_text(summary), nl=False)
    raise typer.Exit(INTERRUPTED if summary.outcome == "interrupted" else 0)


def run_training(
    path: Path, overrides: Sequence[str], *, console: Console, out: Path | None = None, in_process: bool = False
) -> Summary:
    """Train with a configuration file, or resume the run in a folder. Raises MeshError."""
    import asyncio

    from rollmesh.app.checks.config_notes import notes
    from rollmesh.app.checks.effective_config import headline
    from rollmesh.app.open_run import open_run
    from rollmesh.app.run_folder import logging_to, shown
    from rollmesh.app.session import TrainSession
    from rollmesh.app.views.display import open_view

    with open_run(path, overrides, command=sys.argv, out=out) as run:
        lines = (*run.notes, headline(run.config, run.base_dir), *notes(run.config, run.base_dir, run.tasks))
        for line in lines:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        with logging_to(run.folder.log, run.config.telemetry.logging()):
            view = open_view(run.config, console, shown(run.folder.root))
            try:
                session = TrainSession(
                    folder=run.folder, config=run.config, base_dir=run.base_dir, view=view, in_process=in_process
                )
                return asyncio.run(session.run())
            finally:
                view.close()
