"""`rollmesh up`, `serve`, `drain`, `delete` and `status`: from the command line to a mesh that runs. Loaded by the sub-commands that need it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.live import Live
from rich.text import Text

from rollmesh.cli.check import load_checked, notes
from rollmesh.cli.config import TrainConfig
from rollmesh.cli.fleet_client import FleetClient, MeshStatus
from rollmesh.cli.interrupts import Interrupts, Stopped
from rollmesh.cli.mesh_address import MeshAddress
from rollmesh.cli.run_folder import RunFolder, new_folder, origin_now
from rollmesh.cli.session import MAKE_MODEL_S_MAX
from rollmesh.cli.status import status_view
from rollmesh.demo.model_process import make_in_process
from rollmesh.mesh.host import run_until_ended
from rollmesh.mesh.joining import JoinOptions, open_joined, until_away
from rollmesh.mesh.mesh import Mesh
from rollmesh.mesh.supervisor import Supervisor, all_parts
from rollmesh.shared.clock import SystemClock
from rollmesh.shared.errors import MeshError
from rollmesh.shared.telemetry import set_up_logging

REFRESH_S = 1.0
STOP_S = 30.0
"""Limit of a joined node's orderly stop."""
Say = Callable[[str], None]


def up(path: Path, overrides: Sequence[str], *, command: list[str], out: Path | None, say: Say) -> None:
    """Runs a mesh without a run until it is told to stop. Raises MeshError."""
    config, base_dir = load_checked(path, overrides, learner=False), path.parent.resolve()
    folder = new_folder(config, origin_now(command, base_dir), out)
    for line in notes(config, base_dir):
        say(line)
    with folder.log.open("a", encoding="utf-8") as log:
        set_up_logging(stream=log)
        try:
            asyncio.run(_up(folder, config, base_dir, say))
        finally:
            logging.shutdown()
            logging.getLogger().handlers.clear()


async def _up(folder: RunFolder, config: TrainConfig, base_dir: Path, say: Say) -> None:
    with Interrupts(notice=lambda: say("stopping (Ctrl-C again leaves at once)")) as interrupts:
        try:
            config = await interrupts.unless_stopped(_with_model(folder, config))
            parts = [part for part in all_parts(config) if part != "learner"]
            async with Supervisor(config, run_dir=folder.root, base_dir=base_dir, parts=parts) as mesh:
                mesh_address = MeshAddress(address=mesh.layout.gateway, access=mesh.layout.access)
                await interrupts.unless_stopped(_answers(mesh_address))
                say(_how_to_reach(folder, mesh))
                await interrupts.unless_stopped(mesh.finished())
        except Stopped:
            return


async def _with_model(folder: RunFolder, config: TrainConfig) -> TrainConfig:
    """The configuration with the place of a model that it makes."""
    plan = config.made_model
    if plan is None:
        return config
    await make_in_process(
        plan, folder.model, seed=plan.seed or config.run.seed, limit_s=MAKE_MODEL_S_MAX, on_step=lambda _: None
    )
    return msgspec.structs.replace(config, made_model=None, model=str(folder.model))


async def _answers(mesh: MeshAddress) -> None:
    """Until the gateway answers for the coordinator. Cancelled by Ctrl-C, and by whatever breaks the mesh."""
    clock = SystemClock()
    async with FleetClient(mesh) as client:
        while True:
            try:
                await client.status()
                return
            except MeshError:
                await clock.sleep(0.2)


def _how_to_reach(folder: RunFolder, mesh: Supervisor) -> str:
    security = mesh.layout.config.security
    token = mesh.layout.base_dir / security.token_file if security.token_file else folder.root / "token"
    tls = " security.ca=FILE security.certificate=FILE security.key=FILE" if security.has_tls else ""
    return (
        f"gateway    {mesh.layout.gateway}\n"
        f"token in   {token}\n"
        f"add a node rollmesh serve inference --join {mesh.layout.gateway} --token-file {token}{tls}\n"
        f"look       rollmesh status {folder.root} --watch\n"
        "Ctrl-C stops the mesh."
    )


def serve(options: JoinOptions, *, away_s: float, say: Say) -> bool:
    """Runs one node of a mesh elsewhere: whether it was told to stop by a signal, not drained. Raises MeshError, Unavailable once the
    mesh has been away for `away_s`."""
    set_up_logging()

    async def run() -> bool:
        layout, name = await open_joined(options)
        say(f"{name} joins the mesh at {options.address}; its folder is {layout.run_dir}")
        mesh = Mesh(layout.config, run_dir=layout.run_dir, layout=layout, parts=[name])

        def tell_address() -> None:
            if options.kind == "gateway":
                say(f"{name} serves at {mesh.part(name).address}")

        return await run_until_ended(
            mesh,
            STOP_S,
            on_started=tell_address,
            away=lambda: until_away(layout.coordinator, layout.access, limit_s=away_s),
        )

    return asyncio.run(run())


def drain(mesh: MeshAddress, node_id: str, *, wait_s: float) -> None:
    """Tells a node to finish and leave; with `wait_s`, returns once it has left. Raises UnknownNode, DeadlineExceeded."""

    async def run() -> None:
        async with FleetClient(mesh) as client:
            await client.drain(node_id)
            if wait_s:
                await client.until_gone(node_id, limit_s=wait_s, clock=SystemClock())

    with mesh.running():
        asyncio.run(run())


def delete(mesh: MeshAddress, run: str) -> None:
    """Delete a run that has ended. Raises UnknownRun, RunLive."""

    async def call() -> None:
        async with FleetClient(mesh) as client:
            await client.delete(run)

    with mesh.running():
        asyncio.run(call())


def status(mesh: MeshAddress) -> MeshStatus:
    """One look. Raises MeshError."""

    async def run() -> MeshStatus:
        async with FleetClient(mesh) as client:
            return await client.status()

    with mesh.running():
        return asyncio.run(run())


def watch(mesh: MeshAddress, console: Console) -> None:
    """Looks again and again until Ctrl-C; a mesh that is away for a while is shown as that."""

    async def run() -> None:
        clock = SystemClock()
        async with FleetClient(mesh) as client:
            with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
                while True:
                    try:
                        live.update(status_view(await client.status()), refresh=True)
                    except MeshError as err:
                        live.update(Text(f"{mesh.address}: {err}"), refresh=True)
                    await clock.sleep(REFRESH_S)

    asyncio.run(run())
