"""`rollmesh bench`: measurements on this machine, as ratios to baselines of the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollmesh.cli.app import app, report_errors, set_up_compute


@app.command()
def bench(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Names of benchmarks.", show_default="all")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Run fewer repetitions as a smoke test.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the results to this file.")
    ] = None,
) -> None:
    """Measure engine and mesh against baselines of the same run. docs/benchmarks.md explains the results."""
    with report_errors():
        set_up_compute()
        from rollmesh.bench.runner import run_benches

        run_benches(names or [], quick=quick, json_file=json_file)
