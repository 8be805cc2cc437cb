"""The `rollmesh` command. `--help` is instant: only the sub-commands import torch, gRPC and the services.

Exit codes: 0 done; 1 a run or an audit failed; 2 bad input; 130 interrupted by Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from rollmesh.services.cli.summary import Summary

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130

app = typer.Typer(
    name="rollmesh",
    help="Asynchronous reinforcement learning for LLM agents, as a mesh of small gRPC services.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the configuration, e.g. run.max_staleness=1."),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON on standard output; progress goes to stderr.")
]
Out = Annotated[Path | None, typer.Option("--out", help="Folder of the run; by default runs/NAME-TIME.")]


@app.command()
def demo(
    overrides: Overrides = None,
    seed: Annotated[int, typer.Option(help="Seed of warm start and training alike.", min=0)] = 0,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Train a tiny model to use a calculator, from nothing, and watch held-out success rise."""
    with _told_once():
        from rollmesh.services.cli import train as commands

        _set_up_compute()
        summary = commands.demo(seed, overrides or [], command=sys.argv, console=_console(as_json), out=out)
    _finish(summary, as_json)


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="A configuration file, or the folder of a run that is to go on.")],
    overrides: Overrides = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Train by a configuration file, or go on with an interrupted run."""
    with _told_once():
        from rollmesh.services.cli import train as commands

        _set_up_compute()
        summary = commands.train(config, overrides or [], command=sys.argv, console=_console(as_json), out=out)
    _finish(summary, as_json)


@app.command()
def check(config: Annotated[Path, typer.Argument(help="A configuration file.")], overrides: Overrides = None) -> None:
    """Find every mistake in a configuration before a run, and print what it resolves to."""
    with _told_once():
        from rollmesh.services.cli import train as commands

        _set_up_compute()
        typer.echo(commands.check_file(config, overrides or []), nl=False)


@app.command()
def audit(
    run: Annotated[Path, typer.Argument(help="The folder of a run that is not running.")],
    checkpoint: Annotated[
        Path | None, typer.Option(help="Hold the ledger against what this checkpoint was trained on.")
    ] = None,
    sample: Annotated[str, typer.Option(help="Tell the life of this sample.")] = "",
    as_json: AsJson = False,
) -> None:
    """Prove from the ledger that nothing was lost, nothing trained twice, nothing beyond the bound."""
    with _told_once():
        from rollmesh.services.cli.audit import audit_folder

        holds, text = audit_folder(run, checkpoint=checkpoint, sample=sample, as_json=as_json)
    typer.echo(text)
    raise typer.Exit(0 if holds else FAILED)


def main() -> None:
    """The entry point of the package."""
    app(prog_name="rollmesh")


@contextmanager
def _told_once() -> Iterator[None]:
    """Errors of the mesh as one message without a traceback; a bug keeps its traceback."""
    from rollmesh.shared.errors import AlreadyExists, InvalidInput, MeshError

    try:
        yield
    except MeshError as err:
        typer.echo(f"error: {err}", err=True)
        raise typer.Exit(BAD_INPUT if isinstance(err, InvalidInput | AlreadyExists) else FAILED) from err
    except KeyboardInterrupt as err:
        typer.echo("interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from err


def _set_up_compute() -> None:
    """Before torch is loaded: threads that spin on barriers cost up to 70 times on busy cores."""
    for name, value in {
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TQDM_DISABLE": "1",  # loading bars would tear the live display
    }.items():
        os.environ.setdefault(name, value)


def _console(as_json: bool) -> Console:
    from rich.console import Console

    return Console(stderr=as_json)


def _finish(summary: Summary, as_json: bool) -> None:
    from rollmesh.services.cli.closing import closing_words
    from rollmesh.services.cli.summary import encode_summary

    typer.echo(encode_summary(summary).decode() if as_json else closing_words(summary), nl=False)
    raise typer.Exit(INTERRUPTED if summary.outcome == "interrupted" else 0)


if __name__ == "__main__":
    main()
