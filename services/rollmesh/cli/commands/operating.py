"""`rollmesh up`, `serve`, `drain`, `delete`, `status`: a mesh that runs, and hands on it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from rollmesh.cli.app import FAILED, AsJson, Out, Overrides, app, console, set_up_compute, told_once

STOPPED = 143
"""Exit code of a node that was told to stop by a signal, as of every process of a mesh."""
Run = Annotated[Path | None, typer.Argument(metavar="[RUN]", help="The folder of a run on this host.")]
Join = Annotated[str, typer.Option("--join", metavar="HOST:PORT", help="The mesh's gateway, instead of a folder.")]
TokenFile = Annotated[
    Path | None, typer.Option("--token-file", help="File with the mesh's token; readable by you alone.")
]
Tls = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="TLS files, e.g. security.ca=ca.pem; repeatable.")
]


@app.command()
def up(
    config: Annotated[Path, typer.Argument(help="A configuration file.")], overrides: Overrides = None, out: Out = None
) -> None:
    """Leave a mesh running without a run, for trainers that come over the gateway: CreateRun, AttachTrainer.

    Learner and run of the configuration are not started. A run of any name is served; its policy must be the configuration's
    (inference.policy), and one run at a time gets the inference nodes.
    """
    with told_once():
        from rollmesh.cli import operating

        set_up_compute()
        operating.up(config, overrides or [], command=sys.argv, out=out, say=typer.echo)


@app.command()
def serve(
    service: Annotated[
        str,
        typer.Argument(
            help="inference, rollout, sandbox, reward, data, gateway: any number of each; depot, learner: one in a mesh."
        ),
    ],
    join: Annotated[str, typer.Option("--join", metavar="HOST:PORT", help="The mesh's gateway, or its coordinator.")],
    token_file: Annotated[
        Path, typer.Option("--token-file", help="File with the mesh's token; readable by you alone.")
    ],
    overrides: Overrides = None,
    name: Annotated[
        str,
        typer.Option(help="Name of the node, unique in the mesh, its kind in front; by default of host and chance."),
    ] = "",
    base_dir: Annotated[
        Path | None,
        typer.Option(
            "--base-dir",
            help="Where files that the configuration names (agents, scorers, tasks) are looked up; by default the mesh's own "
            "folder if this host has it, else the current one.",
        ),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--dir", help="The node's folder, for what it fetches; by default nodes/NAME.")
    ] = None,
    away_s: Annotated[
        float,
        typer.Option(
            help="Seconds without an answer of the coordinator after which the mesh counts as ended and the node leaves.",
            min=1.0,
        ),
    ] = 600.0,
) -> None:
    """Add a node to a running mesh, from this host or another. One address and the token are enough.

    Ends with code 0 when it was drained, 143 after SIGTERM or Ctrl-C, 1 for trouble, 2 for bad input.
    """
    with told_once():
        from rollmesh.cli import operating
        from rollmesh.mesh.joining import JoinOptions

        set_up_compute()
        options = JoinOptions(
            kind=service,
            address=join,
            token_file=token_file,
            name=name,
            base_dir=base_dir,
            folder=folder,
            overrides=tuple(overrides or ()),
        )
        stopped = operating.serve(options, away_s=away_s, say=lambda text: typer.echo(text, err=True))
    raise typer.Exit(STOPPED if stopped else 0)


@app.command()
def drain(
    node: Annotated[str, typer.Argument(help="A node's id, as `rollmesh status` lists it.")],
    run: Run = None,
    join: Join = "",
    token_file: TokenFile = None,
    settings: Tls = None,
    wait: Annotated[bool, typer.Option("--wait", help="Return once the node has left.")] = False,
    wait_s: Annotated[float, typer.Option(help="Longest such wait, seconds.", min=0.1)] = 600.0,
) -> None:
    """Let a node finish or hand over what it has, and leave. Nothing is lost, and it is not started again."""
    with told_once():
        from rollmesh.cli import operating
        from rollmesh.cli.mesh_address import find_mesh

        operating.drain(find_mesh(run, join, token_file, settings or []), node, wait_s=wait_s if wait else 0.0)
    typer.echo(f"{node} has left" if wait else f"{node} takes nothing new, and leaves when it is done")


@app.command()
def delete(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of a run, as `rollmesh status` lists it.")],
    run: Run = None,
    join: Join = "",
    token_file: TokenFile = None,
    settings: Tls = None,
) -> None:
    """Delete a run that has ended from a running mesh: its ledger and samples, its snapshots and its weights.

    It cannot be audited or resumed afterwards, and its name may be used again. Run folders with checkpoints are not touched.
    """
    with told_once():
        from rollmesh.cli import operating
        from rollmesh.cli.mesh_address import find_mesh

        operating.delete(find_mesh(run, join, token_file, settings or []), name)
    typer.echo(f"run {name} is deleted")


@app.command()
def status(
    run: Run = None,
    join: Join = "",
    token_file: TokenFile = None,
    settings: Tls = None,
    watch: Annotated[bool, typer.Option("--watch", help="Look again every second until Ctrl-C.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show a running mesh: nodes and their versions, leases, groups, who waits for what, sample accounts."""
    with told_once():
        from rollmesh.cli import operating
        from rollmesh.cli.mesh_address import find_mesh
        from rollmesh.cli.status import status_json, status_view

        mesh = find_mesh(run, join, token_file, settings or [])
        if watch and not as_json:
            operating.watch(mesh, console(as_json))
            return
        found = operating.status(mesh)
        if as_json:
            typer.echo(status_json(found).decode())
        else:
            console(as_json).print(status_view(found))


@app.command()
def health(
    run: Run = None,
    address: Annotated[
        str, typer.Option("--address", metavar="HOST:PORT", help="A service, instead of a folder.")
    ] = "",
    service: Annotated[
        str, typer.Option(help="Full gRPC name, e.g. rollmesh.v1.RunService. Default: the server as a whole.")
    ] = "",
    timeout_s: Annotated[float, typer.Option(help="Longest wait for the answer, in seconds.", min=0.1)] = 5.0,
    settings: Tls = None,
) -> None:
    """Check the health of a service, e.g. as a probe of Kubernetes: exit code 0 if it serves, 1 if not.

    Needs no token. With TLS, name the certificates: --set security.ca=FILE, security.certificate=FILE, security.key=FILE.
    """
    with told_once():
        from rollmesh.cli.health import check_health

        serves, text = check_health(run, address, settings or [], service=service, timeout_s=timeout_s)
    typer.echo(text)
    raise typer.Exit(0 if serves else FAILED)
