"""`rollmesh demo`: the shipped configuration of a calculator task."""

from __future__ import annotations

from typing import Annotated

import typer

from rollmesh.cli.app import AsJson, InProcess, Out, Overrides, app
from rollmesh.cli.commands.train import run_and_report


@app.command()
def demo(
    overrides: Overrides = None,
    seed: Annotated[int, typer.Option(help="Seed of the warm start and of training.", min=0)] = 0,
    out: Out = None,
    in_process: InProcess = False,
    as_json: AsJson = False,
) -> None:
    """Train a tiny model to use a calculator. The display shows held-out success while it trains."""
    from rollmesh.app.config import DEMO_CONFIG

    changes = [f"run.seed={seed}", *(overrides or [])]
    run_and_report(lambda: (DEMO_CONFIG, changes), out=out, in_process=in_process, as_json=as_json)
