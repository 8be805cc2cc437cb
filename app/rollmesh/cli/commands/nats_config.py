"""`rollmesh nats-config`: the configuration and the logins of a NATS cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollmesh.cli.app import AsJson, app, print_json, report_errors


@app.command("nats-config")
def nats_config(
    out: Annotated[Path, typer.Option("--out", help="Folder for the files. Passwords that it contains are kept.")],
    server: Annotated[
        list[str],
        typer.Option(
            "--server",
            metavar="[NAME=]HOST",
            help="Name by which clients and the other servers reach a server. Give 1, 3 or 5 of them.",
        ),
    ],
    mesh: Annotated[
        list[str] | None,
        typer.Option(
            "--mesh",
            help="Name of a mesh, which gets an account with one user per kind of service. Repeatable.",
            show_default="mesh",
        ),
    ] = None,
    tls: Annotated[
        str,
        typer.Option(
            "--tls",
            metavar="DIR",
            help="Folder on the servers with ca.pem, rollmesh.pem and rollmesh.key of `rollmesh certs`.",
        ),
    ] = "",
    store: Annotated[
        str, typer.Option("--store", metavar="DIR", help="Folder on the servers for the streams.")
    ] = "/data/jetstream",
    store_bytes: Annotated[
        int, typer.Option("--store-bytes", min=1, help="Disk that the streams of one server may reserve, in bytes.")
    ] = 16 * 1024**3,
    sync_always: Annotated[
        bool,
        typer.Option(
            "--sync-always",
            help="Force each record to disk before its acknowledgment. Slower, and safe against power loss of every "
            "host.",
        ),
    ] = False,
    monitor: Annotated[
        str,
        typer.Option(
            "--monitor", metavar="HOST:PORT", help="Address of /healthz and the other HTTP endpoints, without login."
        ),
    ] = "127.0.0.1:8222",
    as_json: AsJson = False,
) -> None:
    """Write the configuration of each server of a NATS cluster, and the logins of the meshes that use it."""
    with report_errors():
        from rollmesh.app.nats_files import NatsPlan, write_nats_files

        plan = NatsPlan(
            out=out,
            servers=tuple(server),
            meshes=tuple(mesh or ("mesh",)),
            tls=tls,
            store=store,
            store_bytes_max=store_bytes,
            sync_always=sync_always,
            monitor=monitor,
        )
        files = write_nats_files(plan)
    if as_json:
        print_json(files)
        return
    typer.echo("\n".join(f"# nats-server -c {path}" for path in files.servers))
    for name, path in files.logins.items():
        typer.echo(f"# configuration of mesh {name}:\nbus:\n  url: {files.url}\n  login_file: {path}")
        typer.echo(f"coordinator:\n  streams: {{num_replicas: {files.num_replicas}}}")
