"""`rollmesh up`: a mesh without a run, for trainers that connect over the gateway."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollmesh.app.compute import set_up_compute
from rollmesh.cli.app import Out, Overrides, app, report_errors

if TYPE_CHECKING:
    from rollmesh.app.config import TrainConfig
    from rollmesh.app.run_folder import RunFolder
    from rollmesh.mesh.supervisor import Supervisor

READY_POLL_S = 0.2


@app.command()
def up(
    config: Annotated[Path, typer.Argument(help="A configuration file, or the folder of a mesh to restart.")],
    overrides: Overrides = None,
    out: Out = None,
) -> None:
    """Start a mesh without a run, or restart one. External trainers connect to the gateway with CreateRun and
    AttachTrainer.

    A restarted mesh has its address, its token and its runs again: a trainer attaches with its checkpoint and
    continues.

    The learner and the run of the configuration are not started. A run may have any name. Its policy must be
    `inference.policy` of the configuration, and one run at a time gets the inference nodes. Ctrl-C stops the mesh, with
    exit code 0.
    """
    with report_errors():
        import asyncio

        set_up_compute()
        from rollmesh.app.checks.config_checks import load_checked
        from rollmesh.app.checks.config_notes import notes
        from rollmesh.app.open_run import open_stopped_mesh
        from rollmesh.app.run_folder import logging_to, new_folder, origin_now

        if config.is_dir():
            folder, settings, base_dir, tasks = open_stopped_mesh(config, overrides or [], out=out)
        else:
            settings, tasks = load_checked(config, overrides or [], learner=False)
            base_dir = config.parent.resolve()
            folder = new_folder(settings, origin_now(sys.argv, base_dir, is_mesh=True), out)
        for line in notes(settings, base_dir, tasks):
            typer.echo(line)
        with logging_to(folder.log):
            asyncio.run(_up(folder, settings, base_dir))


async def _up(folder: RunFolder, config: TrainConfig, base_dir: Path) -> None:
    """Run the mesh until a signal stops it. Raises MeshError."""
    from rollmesh.app.interrupts import Interrupts, Stopped
    from rollmesh.app.run_folder import run_config
    from rollmesh.app.session import make_model
    from rollmesh.mesh.supervisor import Supervisor, all_services

    with Interrupts(notice=lambda: typer.echo("stopping (press Ctrl-C again to exit at once)")) as interrupts:
        try:
            if config.made_model is not None:
                if not (folder.model / "config.json").is_file():
                    await interrupts.unless_stopped(make_model(folder, config, base_dir))
                config = run_config(folder, config)
            services = [service for service in all_services(config) if service != "learner"]
            async with Supervisor(config, run_dir=folder.root, base_dir=base_dir, services=services) as mesh:
                await interrupts.unless_stopped(_until_ready(mesh))
                typer.echo(_how_to_reach(folder, mesh))
                await interrupts.unless_stopped(mesh.finished())
        except Stopped:
            return


async def _until_ready(mesh: Supervisor) -> None:
    """Wait until the gateway reaches the coordinator. Ctrl-C or a failure of the mesh cancels the wait."""
    from rollmesh.app.mesh_client import FleetClient, MeshAddress
    from rollmesh.shared.clock import SystemClock
    from rollmesh.shared.errors import MeshError

    clock = SystemClock()
    async with FleetClient(MeshAddress(address=mesh.layout.gateway, access=mesh.layout.access)) as client:
        while True:
            try:
                await client.status()
                return
            except MeshError:
                await clock.sleep(READY_POLL_S)


def _how_to_reach(folder: RunFolder, mesh: Supervisor) -> str:
    from rollmesh.app.page_link import has_page, page_link
    from rollmesh.shared.rpc.addresses import host_of, is_loopback

    security = mesh.layout.config.security
    token = mesh.layout.base_dir / security.token_file if security.token_file else folder.root / "token"
    here = "" if is_loopback(host_of(mesh.layout.gateway)) else " network.host=ADDRESS"
    tls = " security.ca=FILE security.certificate=FILE security.key=FILE" if security.has_tls else ""
    page = f"page       {page_link(mesh.layout)}\n" if has_page(mesh.layout) else ""
    return (
        f"gateway    {mesh.layout.gateway}\n"
        f"token      {token}\n"
        f"{page}"
        f"add a node rollmesh serve inference --join {mesh.layout.gateway} --token-file {token}{here}{tls}\n"
        f"status     rollmesh status {folder.root} --watch\n"
        "Ctrl-C stops the mesh."
    )
