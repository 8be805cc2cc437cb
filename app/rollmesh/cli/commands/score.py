"""`rollmesh score`: the scorers of a configuration, without a mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer

from rollmesh.cli.app import FAILED, AsJson, Overrides, app, print_json, report_errors


@app.command()
def score(
    file: Annotated[
        Path,
        typer.Argument(
            help="JSONL: samples of `rollmesh rollout --out`, or lines with task and response. Or the folder of a run "
            "whose samples were exported."
        ),
    ],
    overrides: Overrides = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="Configuration file or run folder with the tasks and scorers.", show_default="none, it is required"
        ),
    ] = None,
    name: Annotated[
        str,
        typer.Option(help="Name of the scores of exported samples, in the column `scores` of the view `scores`."),
    ] = "",
    processes: Annotated[
        int, typer.Option(help="Number of processes that score exported samples.", min=1, max=256)
    ] = 1,
    as_json: AsJson = False,
) -> None:
    """Score samples or answers with the scorers of a configuration, without a mesh."""
    if file.is_dir():
        _score_exported(file, overrides or [], config, name, processes, as_json=as_json)
    with report_errors():
        from rollmesh.app.samples.scoring import score_file
        from rollmesh.app.samples.transcript import means_text, rewards_line
        from rollmesh.shared.errors import ConfigError

        if name or processes > 1:
            raise ConfigError(f"--name and --processes need a folder with exported samples, got {file}")

        report = score_file(file, config, overrides or [])
    if as_json:
        print_json(report)
    else:
        for line in report.lines:
            typer.echo(f"{line.line:>6}  {line.task}  {rewards_line(line.rewards)}")
        failed = f", {report.num_failed} with a scorer that failed" if report.num_failed else ""
        typer.echo(f"{report.num_lines} lines{failed}; mean {means_text(report.mean_rewards)}")
    raise typer.Exit(FAILED if report.num_failed else 0)


def _score_exported(
    folder: Path, overrides: list[str], config: Path | None, name: str, processes: int, *, as_json: bool
) -> NoReturn:
    with report_errors():
        from rollmesh.app.lake.rescore import score_exported
        from rollmesh.app.samples.transcript import means_text

        result = score_exported(folder, config, overrides, name=name, processes=processes)
    if as_json:
        print_json(result)
    else:
        failed = f", {result.num_failed} with a scorer that failed" if result.num_failed else ""
        means = means_text(result.mean_rewards)
        typer.echo(f"{result.num_samples} samples of {result.num_files} files{failed}; mean {means}")
        typer.echo(f"folder {result.folder}   (rollmesh query)")
    raise typer.Exit(FAILED if result.num_failed else 0)
