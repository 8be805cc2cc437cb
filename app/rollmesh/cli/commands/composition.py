"""`rollmesh composition`: quality, diversity and complexity of exported samples."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollmesh.cli.app import AsJson, app, print_json, report_errors


@app.command()
def composition(
    run: Annotated[Path, typer.Argument(help="The folder of a run, or a folder of `rollmesh export --folder`.")],
    by: Annotated[
        str,
        typer.Option(metavar="SQL", help="What distinguishes data sets, e.g. \"labels['source']\" or 'update // 10'."),
    ] = "run",
    quality: Annotated[str, typer.Option(metavar="SQL", help="The quality of a sample.")] = "reward.correct",
    where: Annotated[
        str,
        typer.Option(metavar="SQL", help="Condition of the samples, e.g. 'reward.correct >= 1'.", show_default="all"),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Print quality, diversity and complexity per data set of exported samples. See docs/samples.md."""
    with report_errors():
        from rollmesh.app.lake.composition import compositions

        found = compositions(run, by=by, quality=quality, where=where)
    if as_json:
        print_json(found)
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("data set", "samples", "quality", "diversity", "complexity", box=None)
    for one in found:
        values = [one.quality, one.diversity, one.complexity]
        shown = ["" if value is None else f"{value:.3f}" for value in values]
        table.add_row(escape(one.data_set), str(one.num_samples), *shown)
    Console().print(table)
