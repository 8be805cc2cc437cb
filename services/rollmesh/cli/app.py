"""What every sub-command shares: the application, exit codes, options, and how errors are told.

`--help` is instant: this file and the sub-commands' import neither torch nor gRPC before a command runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
"""Exit codes beside 0: a run or an audit failed; the input is wrong; Ctrl-C."""

app = typer.Typer(
    name="rollmesh",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"rollmesh {version('rollmesh')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Asynchronous reinforcement learning for LLM agents, as a mesh of small gRPC services."""


Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the configuration, e.g. run.max_staleness=1."),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON on standard output; progress goes to stderr.")
]
Out = Annotated[Path | None, typer.Option("--out", help="Folder of the run; by default runs/NAME-TIME.")]
InProcess = Annotated[
    bool,
    typer.Option("--in-process", help="All services in this process, instead of one for each (processes.enabled)."),
]


@contextmanager
def told_once() -> Iterator[None]:
    """Errors of the mesh as one message without a traceback; a bug keeps its traceback."""
    from rollmesh.shared.disk import is_disk_full
    from rollmesh.shared.errors import AlreadyExists, ChangeRefused, InvalidInput, MeshError
    from rollmesh.shared.extras import libraries_needed

    try:
        with libraries_needed("this command"):
            yield
    except MeshError as err:
        typer.echo(f"error: {err}", err=True)
        raise typer.Exit(
            BAD_INPUT if isinstance(err, InvalidInput | AlreadyExists | ChangeRefused) else FAILED
        ) from err
    except OSError as err:
        if not is_disk_full(err):
            raise
        typer.echo(
            f"error: {err.filename or 'the run folder'}: no space left on the device; free some, then go on", err=True
        )
        raise typer.Exit(FAILED) from err
    except KeyboardInterrupt as err:
        typer.echo("interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from err


def set_up_compute() -> None:
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


def console(as_json: bool) -> Console:
    """The terminal; on stderr if standard output is for JSON."""
    from rich.console import Console

    return Console(stderr=as_json)
