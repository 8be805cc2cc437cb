"""`rollmesh page`: print a link to the live page of a running mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollmesh.cli.app import app, report_errors


@app.command()
def page(run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run or mesh on this host.")]) -> None:
    """Print a link to the live page of a mesh. The link logs a browser in once, within an hour.

    The page shows runs, nodes, samples and the audit, and changes nothing. Without the link, log in with the token of
    the run.
    """
    with report_errors():
        from rollmesh.app.page_link import page_link
        from rollmesh.app.run_folder import open_folder
        from rollmesh.mesh.run_layout import open_layout

        folder, config, base_dir = open_folder(run, [])
        typer.echo(page_link(open_layout(config, run_dir=folder.root, base_dir=base_dir)))
