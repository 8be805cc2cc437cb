"""`rollmesh bench`: figures of this machine, as ratios against baselines of the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollmesh.cli.app import app, set_up_compute, told_once


@app.command()
def bench(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Benches; all by default.")] = None,
    quick: Annotated[bool, typer.Option(help="Fewer repetitions: does it run, not how fast is it.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there too.")
    ] = None,
) -> None:
    """Measure engine and mesh against baselines of the same run (docs/benchmarks.md says how to read it)."""
    with told_once():
        set_up_compute()
        from rollmesh.bench.runner import run_benches

        run_benches(names or [], quick=quick, json_file=json_file)
