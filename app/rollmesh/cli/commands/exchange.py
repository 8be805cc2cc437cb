"""`rollmesh exchange`: give the finished rollouts of a run to another mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollmesh.cli.app import AsJson, Join, Tls, TokenFile, app, console, print_json, report_errors


@app.command()
def exchange(
    run: Annotated[Path, typer.Argument(help="The folder of the giving run, on the host of its mesh.")],
    to: Annotated[Path | None, typer.Argument(metavar="[TO]", help="The folder of the receiving run.")] = None,
    join: Join = "",
    token_file: TokenFile = None,
    settings: Tls = None,
    from_run: Annotated[
        str, typer.Option("--from-run", help="Name of the giving run.", show_default="that of its configuration")
    ] = "",
    to_run: Annotated[
        str, typer.Option("--to-run", help="Name of the receiving run.", show_default="that of its configuration")
    ] = "",
    mesh: Annotated[
        str, typer.Option(help="Name of the giving mesh, recorded as provenance.", show_default="the host")
    ] = "",
    reward: Annotated[
        str, typer.Option(help="Reward that the conditions compare.", show_default="run.success_reward")
    ] = "",
    variance_min: Annotated[
        float, typer.Option(min=0.0, help="Smallest variance of the reward in a group; equal ones are never given.")
    ] = 0.0,
    mean_min: Annotated[
        float | None, typer.Option(help="Smallest mean of the reward in a group.", show_default="no limit")
    ] = None,
    mean_max: Annotated[
        float | None, typer.Option(help="Largest mean of the reward in a group.", show_default="no limit")
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Give only tasks with this label. Repeatable.")
    ] = None,
    per_minute: Annotated[float, typer.Option(min=0.001, help="Most groups per minute.")] = 600.0,
    retry_s: Annotated[float, typer.Option(min=1.0, help="Seconds for which a mesh may be away.")] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Give the finished rollouts of a run to a run of another mesh, as text, until one of them ends.

    The receiving run needs an entry `peer` of `run.foreign`. Either mesh may restart. A repeated command adds nothing
    twice. Run a second command for the other direction. See docs/trainers.md.
    """
    with report_errors():
        import asyncio
        import socket

        from rollmesh.app.exchange import Exchange, ExchangeSummary
        from rollmesh.app.mesh_client import find_mesh
        from rollmesh.app.run_folder import open_folder
        from rollmesh.app.shared_rollouts import Selection, labels_of
        from rollmesh.mesh.run_layout import open_layout
        from rollmesh.shared.errors import ConfigError
        from rollmesh.shared.net.retry import RetryConfig

        folder, config, base_dir = open_folder(run, [])
        target = find_mesh(to, join, token_file, settings or [])
        if not to_run and to is not None:
            to_run = open_folder(to, [])[1].run.name
        if not to_run:
            raise ConfigError("--to-run: name the receiving run, because --join names only its mesh")
        try:
            labels = labels_of(label or [])
        except ValueError as err:
            raise ConfigError(f"--label {err}") from None
        terminal = console(as_json)

        def show(summary: ExchangeSummary) -> None:
            terminal.print(f"{summary.shared} groups given, {summary.filtered} excluded, {summary.rejected} rejected")

        work = Exchange(
            source=open_layout(config, run_dir=folder.root, base_dir=base_dir),
            run=from_run or config.run.name,
            target=target,
            to_run=to_run,
            selection=Selection(
                reward=reward, variance_min=variance_min, mean_min=mean_min, mean_max=mean_max, labels=dict(labels)
            ),
            mesh=mesh or socket.gethostname(),
            per_minute=per_minute,
            retry=RetryConfig(retry_s=retry_s),
            on_change=show,
        )
        summary = asyncio.run(work.go())
    if as_json:
        print_json(summary)
    else:
        typer.echo(f"{summary.shared} groups given; {summary.ended}")
