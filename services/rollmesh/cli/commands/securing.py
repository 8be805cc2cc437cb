"""Sub-commands that make what a mesh beyond one machine needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollmesh.cli.app import AsJson, app, told_once


@app.command()
def certs(
    out: Annotated[Path, typer.Option("--out", help="Folder for the files; none of them may be there yet.")],
    host: Annotated[
        list[str] | None,
        typer.Option("--host", help="Name or address by which others call this host; may be repeated."),
    ] = None,
    ca: Annotated[
        Path | None, typer.Option("--ca", help="Folder of an earlier CA that signs; by default a new CA is made.")
    ] = None,
    days: Annotated[int, typer.Option("--days", min=1, max=3650, help="How long the certificates are valid.")] = 365,
    as_json: AsJson = False,
) -> None:
    """Make a development CA, a certificate for this host's services, and a token, with the openssl command."""
    from rollmesh.cli.certs import make_certificates

    with told_once():
        files = make_certificates(out, hosts=host or (), ca_dir=ca, valid_days=days)
    if as_json:
        import msgspec

        typer.echo(msgspec.json.encode(files).decode())
        return
    section = {name: getattr(files, name) for name in ("ca", "certificate", "key", "token_file")}
    typer.echo(
        f"# valid {files.valid_days} days, for {', '.join(files.hosts)}; put this into the configuration:\nsecurity:"
    )
    for name, path in section.items():
        typer.echo(f"  {name}: {path}")
