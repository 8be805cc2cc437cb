"""`rollmesh score`: the scorers of a configuration, without a mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollmesh.cli.app import FAILED, AsJson, Overrides, app, print_json, report_errors


@app.command()
def score(
    file: Annotated[
        Path, typer.Argument(help="JSONL: samples of `rollmesh rollout --out`, or lines with task and response.")
    ],
    overrides: Overrides = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="Configuration file or run folder with the tasks and scorers.", show_default="none, it is required"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Score samples or answers with the scorers of a configuration, without a mesh."""
    with report_errors():
        from rollmesh.app.samples.scoring import score_file
        from rollmesh.app.samples.transcript import means_text, rewards_line

        report = score_file(file, config, overrides or [])
    if as_json:
        print_json(report)
    else:
        for line in report.lines:
            typer.echo(f"{line.line:>6}  {line.task}  {rewards_line(line.rewards)}")
        failed = f", {report.num_failed} with a scorer that failed" if report.num_failed else ""
        typer.echo(f"{report.num_lines} lines{failed}; mean {means_text(report.mean_rewards)}")
    raise typer.Exit(FAILED if report.num_failed else 0)
