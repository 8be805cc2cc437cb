"""`rollmesh certs`: development certificates and a token for a mesh on several hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollmesh.cli.app import AsJson, app, print_json, report_errors


@app.command()
def certs(
    out: Annotated[Path, typer.Option("--out", help="Folder for the files. Existing files are never overwritten.")],
    host: Annotated[
        list[str] | None,
        typer.Option("--host", help="Name or address by which other hosts reach this one. Repeatable."),
    ] = None,
    ca: Annotated[
        Path | None, typer.Option("--ca", help="Folder of the CA that signs.", show_default="create a new CA")
    ] = None,
    days: Annotated[int, typer.Option("--days", min=1, max=3650, help="Validity of the certificates, in days.")] = 365,
    as_json: AsJson = False,
) -> None:
    """Create a development CA, a certificate for this host and a token. It calls the openssl command."""
    with report_errors():
        from rollmesh.app.certificates import make_certificates

        files = make_certificates(out, hosts=host or (), ca_dir=ca, valid_days=days)
    if as_json:
        print_json(files)
        return
    typer.echo(
        f"# valid {files.valid_days} days, for {', '.join(files.hosts)}; add this to the configuration:\nsecurity:"
    )
    for name in ("ca", "certificate", "key", "token_file"):
        typer.echo(f"  {name}: {getattr(files, name)}")
