"""`rollmesh serve`: one service of a mesh in a process, as a container, a unit or a job runs it."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollmesh.app.compute import set_up_compute
from rollmesh.cli.app import TERMINATED, app, report_errors

if TYPE_CHECKING:
    from rollmesh.mesh.run_layout import RunLayout

STOP_S = 30.0
"""Timeout of a clean stop of the node, in seconds. A drain comes before it and has the limits of the node."""


@app.command()
def serve(
    service: Annotated[
        str,
        typer.Argument(
            help="inference, rollout, sandbox, reward, data, gateway or endpoint-NAME for a frozen endpoint (any "
            "number of each), depot or "
            "learner (one per mesh); coordinator (one) with the configuration file of the mesh."
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [KEY=VALUE]...",
            help="Settings to override, e.g. inference.capacity=8. A coordinator needs the configuration file before "
            "them.",
        ),
    ] = None,
    join: Annotated[
        str,
        typer.Option(
            "--join",
            metavar="HOST:PORT",
            help="Gateway or coordinator of the mesh. Every service needs it except the coordinator.",
        ),
    ] = "",
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="File with the token of the mesh. Only its owner may read it.")
    ] = None,
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
    """Run one service of a mesh in this process.

    A node joins a running mesh: it needs one address and the token, from this host or another. A coordinator starts a
    mesh with the NATS cluster at bus.url. SIGTERM drains a node within the limits of its service; a second signal ends
    it at once.

    It exits with code 0 after a drain or SIGTERM, 143 after Ctrl-C, 1 after a failure, 2 for invalid input.
    """
    signal.signal(signal.SIGTERM, _leave)  # a process without a handler ignores it as the first process of a container
    with report_errors():
        import asyncio

        from rollmesh.app.coordinator_alone import COORDINATOR, open_coordinator, refuse_second
        from rollmesh.mesh.host import run_until_ended
        from rollmesh.mesh.joining import JoinOptions, open_joined, until_away
        from rollmesh.mesh.mesh import Mesh
        from rollmesh.mesh.mesh_services import learner_config
        from rollmesh.shared.errors import ConfigError
        from rollmesh.shared.telemetry import set_up_logging

        set_up_compute()
        set_up_logging()

        async def coordinate() -> bool:
            """Return whether another signal than SIGTERM stopped the coordinator."""
            layout = opened
            set_up_logging(layout.config.telemetry.logging())
            await refuse_second(layout)
            mesh = Mesh(layout.config, run_dir=layout.run_dir, layout=layout, services=[COORDINATOR])
            return await run_until_ended(
                mesh,
                STOP_S,
                on_started=lambda: _announce(f"the coordinator serves at {layout.coordinator}"),
                drains=True,
            )

        async def join_mesh() -> bool:
            """Return whether another signal than SIGTERM stopped the node."""
            layout, node = await open_joined(options)
            if service == "learner" and "RANK" in os.environ:  # other launchers set it too, without ranks of torchrun
                from rollmesh.services.learner.engines.rank_group import rank_of_torchrun
                from rollmesh.services.learner.engines.rank_process import run_torchrun_rank

                if rank_of_torchrun() > 0:  # rank 0 is the node
                    run_torchrun_rank(learner_config(layout))
                    return False
            _announce(f"{node} joins the mesh at {join}; its folder is {layout.run_dir}")
            mesh = Mesh(layout.config, run_dir=layout.run_dir, layout=layout, services=[node])

            def print_address() -> None:
                if service == "gateway":
                    _announce(f"{node} serves at {mesh.service(node).address}")

            return await run_until_ended(
                mesh,
                STOP_S,
                on_started=print_address,
                away=lambda: until_away(layout.coordinators, layout.access, limit_s=away_s),
                drains=True,
            )

        if service == COORDINATOR:
            if join or token_file is not None:
                raise ConfigError(
                    "--join and --token-file are for nodes; a coordinator reads its token from the file that "
                    "`security.token_file` names"
                )
            opened: RunLayout = open_coordinator(settings or [], folder, base_dir)
            stopped = asyncio.run(coordinate())
        else:
            if not join or token_file is None:
                raise ConfigError("a node needs --join HOST:PORT and --token-file FILE")
            options = JoinOptions(
                kind=service,
                address=join,
                token_file=token_file,
                name=name,
                base_dir=base_dir,
                folder=folder,
                overrides=tuple(settings or ()),
            )
            stopped = asyncio.run(join_mesh())
    raise typer.Exit(TERMINATED if stopped else 0)


def _announce(line: str) -> None:
    typer.echo(line, err=True)


def _leave(number: int, frame: object) -> None:
    """End a process that has not joined yet. Afterwards `run_until_ended` handles the signal."""
    sys.exit(TERMINATED)
