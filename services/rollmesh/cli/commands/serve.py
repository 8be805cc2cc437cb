"""`rollmesh serve`: one node of a mesh that runs elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollmesh.cli.app import TERMINATED, Overrides, app, report_errors, set_up_compute

STOP_S = 30.0
"""Timeout of a clean stop of the node, in seconds."""


@app.command()
def serve(
    service: Annotated[
        str,
        typer.Argument(
            help="inference, rollout, sandbox, reward, data or gateway (any number of each), depot or learner (one per mesh)."
        ),
    ],
    join: Annotated[str, typer.Option("--join", metavar="HOST:PORT", help="Gateway or coordinator of the mesh.")],
    token_file: Annotated[
        Path, typer.Option("--token-file", help="File with the token of the mesh. Only its owner may read it.")
    ],
    overrides: Overrides = None,
    name: Annotated[str, typer.Option(help="Suffix of the node's id: SERVICE-NAME.", show_default="HOST-RANDOM")] = "",
    base_dir: Annotated[
        Path | None,
        typer.Option(
            "--base-dir",
            help="Folder of the files that the configuration names (agents, scorers, tasks).",
            show_default="the folder that the mesh uses if this host has it, else the current one",
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--dir", help="Folder of the node, for the files that it fetches.", show_default="nodes/NAME"),
    ] = None,
    away_s: Annotated[
        float, typer.Option(help="Leave after this many seconds without a response of the coordinator.", min=1.0)
    ] = 600.0,
) -> None:
    """Add a node to a running mesh. It needs one address and the token, from this host or another.

    It exits with code 0 after a drain, 143 after SIGTERM or Ctrl-C, 1 after a failure, 2 for invalid input.
    """
    with report_errors():
        import asyncio

        from rollmesh.mesh.host import run_until_ended
        from rollmesh.mesh.joining import JoinOptions, open_joined, until_away
        from rollmesh.mesh.mesh import Mesh
        from rollmesh.shared.telemetry import set_up_logging

        set_up_compute()
        set_up_logging()
        options = JoinOptions(
            kind=service,
            address=join,
            token_file=token_file,
            name=name,
            base_dir=base_dir,
            folder=folder,
            overrides=tuple(overrides or ()),
        )

        async def run() -> bool:
            """Return whether a signal stopped the node, not a drain."""
            layout, node = await open_joined(options)
            typer.echo(f"{node} joins the mesh at {join}; its folder is {layout.run_dir}", err=True)
            mesh = Mesh(layout.config, run_dir=layout.run_dir, layout=layout, services=[node])

            def print_address() -> None:
                if service == "gateway":
                    typer.echo(f"{node} serves at {mesh.service(node).address}", err=True)

            return await run_until_ended(
                mesh,
                STOP_S,
                on_started=print_address,
                away=lambda: until_away(layout.coordinator, layout.access, limit_s=away_s),
            )

        stopped = asyncio.run(run())
    raise typer.Exit(TERMINATED if stopped else 0)
