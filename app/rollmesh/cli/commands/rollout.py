"""`rollmesh rollout`: samples of a configuration or a run, without training."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollmesh.app.compute import set_up_compute
from rollmesh.cli.app import (
    FAILED,
    INTERRUPTED,
    AsJson,
    Overrides,
    app,
    console,
    print_json,
    report_errors,
)

if TYPE_CHECKING:
    from rollmesh.app.samples.export_run import RolloutSummary


@app.command()
def rollout(
    config: Annotated[
        Path, typer.Argument(help="A configuration file, or a run folder, whose newest checkpoint then generates.")
    ],
    overrides: Overrides = None,
    num: Annotated[int, typer.Option("-n", "--num", help="Number of tasks.", min=1)] = 8,
    per_task: Annotated[int, typer.Option(help="Number of episodes per task.", min=1)] = 1,
    split: Annotated[str, typer.Option(help="Split of the tasks: train, validation or test.")] = "test",
    model: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the model that generates, e.g. a checkpoint.", show_default="the configured model"
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File for the samples, one JSON line each.")] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder of the run.", show_default="runs/NAME-rollout-TIME")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Roll out tasks without training. The output shows each conversation, its weights and its rewards."""
    terminal = console(as_json)
    with report_errors():
        set_up_compute()
        from rollmesh.app.samples.export_run import RolloutOptions, prepare, run_rollout
        from rollmesh.app.samples.transcript import transcript

        options = RolloutOptions(num=num, per_task=per_task, split=split, model=model, folder=run_dir)
        with terminal.status("reading the configuration") as status:
            summary = run_rollout(
                *prepare(config, overrides or [], options, sys.argv),
                out,
                on_sample=lambda line: terminal.print(transcript(line)),
                on_phase=lambda phase: status.update(phase),
            )
    if as_json:
        print_json(summary)
    else:
        typer.echo(_text(summary))
    raise typer.Exit(INTERRUPTED if summary.interrupted else 0 if summary.samples.get("exported") else FAILED)


def _text(summary: RolloutSummary) -> str:
    from rollmesh.app.samples.transcript import means_text

    counts = ", ".join(f"{name} {value}" for name, value in summary.samples.items())
    lines = [
        f"samples       {counts or 'none'}",
        f"mean rewards  {means_text(summary.mean_rewards)}",
        f"tokens        {summary.num_tokens}",
        f"folder        {summary.folder}   (rollmesh show, rollmesh audit)",
    ]
    if summary.out:
        lines.append(f"written to    {summary.out}   (rollmesh score)")
    if summary.failure:
        lines.append(f"newest failure\n{summary.failure}")
    if summary.interrupted:
        lines.insert(0, "interrupted: the samples above are finished; the others are lost")
    return "\n".join(lines)
