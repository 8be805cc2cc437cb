"""`rollmesh scale`: change the number of nodes of a running mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollmesh.cli.app import app, report_errors


@app.command()
def scale(
    items: Annotated[
        list[str],
        typer.Argument(
            metavar="KIND=N... RUN",
            help="New number of inference, rollout, sandbox or reward nodes on this host, and the folder of the run or "
            "mesh.",
        ),
    ],
    wait: Annotated[bool, typer.Option("--wait", help="Return after the nodes are in the mesh, or have left.")] = False,
    wait_s: Annotated[float, typer.Option(help="Timeout of --wait, in seconds.", min=0.1)] = 600.0,
) -> None:
    """Start or drain nodes of a running mesh on this host. The counts stay when the run is resumed.

    Surplus nodes finish or release their work and leave. No work is lost.
    """
    with report_errors():
        from rollmesh.app.scale_run import scale_run

        run, wanted = _parse(items)
        answer = scale_run(run, wanted, wait_s=wait_s if wait else None)
    for name in answer.started:
        typer.echo(f"{name} {'is in the mesh' if wait else 'starts'}")
    for name in answer.draining:
        typer.echo(f"{name} {'has left' if wait else 'leaves when its work is finished'}")
    if not answer.started and not answer.draining:
        typer.echo("nothing to change")


def _parse(items: list[str]) -> tuple[Path, dict[str, int]]:
    """Return the folder and the wanted counts. Raises ConfigError."""
    from rollmesh.shared.errors import ConfigError

    folders, wanted = [item for item in items if "=" not in item], {}
    for kind, _, num in (item.partition("=") for item in items if "=" in item):
        if kind in wanted:
            raise ConfigError(f"`{kind}` is given twice; give each kind once")
        if not num.isdecimal():
            raise ConfigError(f"`{kind}` must be a number of nodes, got {num!r}; for example {kind}=2")
        wanted[kind] = int(num)
    if len(folders) != 1 or not wanted:
        raise ConfigError(
            "expected KIND=N and the folder of one run, for example: rollmesh scale rollout=4 inference=2 runs/mine"
        )
    return Path(folders[0]), wanted
