"""`rollmesh rollout`, `show`, `score`: samples without training, and how to look at them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollmesh.cli.app import FAILED, INTERRUPTED, AsJson, Overrides, app, console, set_up_compute, told_once

if TYPE_CHECKING:
    from rollmesh.cli.rollout import RolloutSummary
    from rollmesh.cli.samples import RewardLine
    from rollmesh.cli.score import ScoreReport
    from rollmesh.cli.show import ListedSample


@app.command()
def rollout(
    config: Annotated[
        Path, typer.Argument(help="A configuration file, or the folder of a run whose newest checkpoint is to act.")
    ],
    overrides: Overrides = None,
    num: Annotated[int, typer.Option("-n", "--num", help="Number of tasks.", min=1)] = 8,
    per_task: Annotated[int, typer.Option(help="Episodes of each task.", min=1)] = 1,
    split: Annotated[str, typer.Option(help="Split the tasks come from: train, validation or test.")] = "test",
    model: Annotated[
        Path | None,
        typer.Option(help="Folder of the model that acts, e.g. a checkpoint; by default the configuration's."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write one JSON line per sample to this file.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Folder of the run; by default runs/NAME-rollout-TIME.")] = None,
    as_json: AsJson = False,
) -> None:
    """Roll out tasks without training, and print what was said, by which weights, and what it scored."""
    terminal = console(as_json)
    with told_once():
        set_up_compute()
        from rollmesh.cli.rollout import RolloutOptions
        from rollmesh.cli.rollout import rollout as roll_out
        from rollmesh.cli.transcript import transcript

        options = RolloutOptions(num=num, per_task=per_task, split=split, model=model, samples=out, folder=run_dir)
        with terminal.status("reading the configuration") as status:
            summary = roll_out(
                config,
                overrides or [],
                options,
                command=sys.argv,
                on_sample=lambda line: terminal.print(transcript(line)),
                on_phase=lambda phase: status.update(phase),
            )
    if as_json:
        _print_json(summary)
    else:
        typer.echo(_rollout_words(summary))
    raise typer.Exit(INTERRUPTED if summary.interrupted else 0 if summary.samples.get("exported") else FAILED)


@app.command()
def show(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    sample: Annotated[str, typer.Argument(help="A sample's or an episode's id; without one, samples are listed.")] = "",
    limit: Annotated[int, typer.Option(help="Newest samples listed.", min=1)] = 50,
    as_json: AsJson = False,
) -> None:
    """Show a sample of a run: what was said, and its life from the ledger."""
    with told_once():
        from rollmesh.cli.show import list_samples, show_sample

        if not sample:
            found = list_samples(run, limit)
            if as_json:
                _print_json(found)
            else:
                typer.echo("\n".join(map(_listed_words, found)) or "no episode has ended yet")
            return
        shown = show_sample(run, sample)
    if as_json:
        _print_json(shown)
        return
    from rollmesh.cli.transcript import transcript

    if shown.sample is not None:
        console(as_json).print(transcript(shown.sample))
    else:
        typer.echo("its payload is no longer in the sample stream; the ledger knows:")
    typer.echo("\n".join(f"#{line.position} {line.what}" for line in shown.story))


@app.command()
def score(
    file: Annotated[
        Path, typer.Argument(help="JSONL: samples of `rollmesh rollout --out`, or lines with task and response.")
    ],
    overrides: Overrides = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Configuration file or run folder with the tasks and scorers; required."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Score samples or answers with a configuration's scorers, without running anything else."""
    with told_once():
        from rollmesh.cli.score import score_file

        report = score_file(file, config, overrides or [])
    if as_json:
        _print_json(report)
    else:
        typer.echo(_score_words(report))
    raise typer.Exit(FAILED if report.num_failed else 0)


def _print_json(value: object) -> None:
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def _rollout_words(summary: RolloutSummary) -> str:
    counts = ", ".join(f"{name} {value}" for name, value in summary.samples.items())
    lines = [
        f"samples       {counts or 'none'}",
        f"mean rewards  {_means(summary.mean_rewards)}",
        f"tokens        {summary.num_tokens}",
        f"folder        {summary.folder}   (rollmesh show, rollmesh audit)",
    ]
    if summary.out:
        lines.append(f"written to    {summary.out}   (rollmesh score)")
    if summary.failure:
        lines.append(f"newest failure\n{summary.failure}")
    if summary.interrupted:
        lines.insert(0, "interrupted: what is above was finished, the rest is lost")
    return "\n".join(lines)


def _listed_words(found: ListedSample) -> str:
    what = found.lost or f"{found.num_tokens} tokens  {_words(found.rewards)}"
    return f"{found.sample_id}  {found.task}  {what}"


def _score_words(report: ScoreReport) -> str:
    lines = [f"{line.line:>6}  {line.task}  {_words(line.rewards)}" for line in report.lines]
    failed = f", {report.num_failed} with a scorer that failed" if report.num_failed else ""
    return "\n".join([*lines, f"{report.num_lines} lines{failed}; mean {_means(report.mean_rewards)}"])


def _words(rewards: list[RewardLine]) -> str:
    return "  ".join(
        f"{r.name} {r.value:g}" if r.outcome == "ok" else f"{r.name} {r.outcome}: {r.evidence}" for r in rewards
    )


def _means(means: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in means.items()) or "none"
