"""The application that the commands register on: exit codes, shared options, and one form for errors.

`--help` is instant, because neither this file nor a module of `commands` imports gRPC or torch before a command runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

FAILED, BAD_INPUT, INTERRUPTED, TERMINATED = 1, 2, 130, 143
"""Exit codes; `main` below describes them."""

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
    """Asynchronous reinforcement learning for LLM agents, as a mesh of small gRPC services.

    Exit codes: 0 success; 1 a run, an audit or a check failed; 2 invalid input; 130 interrupted by Ctrl-C; 143 a node
    of `serve` was stopped by SIGTERM or Ctrl-C.
    """


Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings to override, e.g. run.max_staleness=1."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout, and progress on stderr.")]
Out = Annotated[Path | None, typer.Option("--out", help="Folder of the run.", show_default="runs/NAME-TIME")]
InProcess = Annotated[
    bool,
    typer.Option("--in-process", help="Run all services in this process. Overrides processes.enabled."),
]
OnHost = Annotated[Path | None, typer.Argument(metavar="[RUN]", help="The folder of a run on this host.")]
Join = Annotated[str, typer.Option("--join", metavar="HOST:PORT", help="Gateway of the mesh, instead of a run folder.")]
TokenFile = Annotated[
    Path | None, typer.Option("--token-file", help="File with the token of the mesh. Only its owner may read it.")
]
Tls = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A TLS file, e.g. security.ca=ca.pem. Repeatable."),
]


@contextmanager
def report_errors() -> Iterator[None]:
    """Print an error of the mesh as one message and exit. A bug keeps its traceback."""
    from rollmesh.shared.config.extras import libraries_needed
    from rollmesh.shared.errors import AlreadyExists, ChangeRefused, InvalidInput, MeshError
    from rollmesh.shared.store.disk import is_disk_full

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
            f"error: {err.filename or 'the run folder'}: no space left on the device; free some, then resume", err=True
        )
        raise typer.Exit(FAILED) from err
    except KeyboardInterrupt as err:
        typer.echo("interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from err


def console(as_json: bool) -> Console:
    """Return the terminal: stderr if stdout is for JSON."""
    from rich.console import Console

    return Console(stderr=as_json)


def print_json(value: object) -> None:
    """Print a msgspec struct, or a list of them, as indented JSON."""
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
