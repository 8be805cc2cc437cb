"""`rollmesh mixture`: shares of sources and evaluation scores of runs, and the shares to try next."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollmesh.cli.app import AsJson, app, print_json, report_errors

if TYPE_CHECKING:
    from rollmesh.app.mixture_trials import Proposal


@app.command()
def mixture(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs that have ended.")],
    score: Annotated[
        list[str] | None,
        typer.Option(
            help="A score of the last evaluation: success, or one of a label, e.g. source=sums. Repeatable: their mean "
            "counts.",
            show_default="success",
        ),
    ] = None,
    least: Annotated[float, typer.Option(help="Least share of each source in the proposal.")] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Compare runs with different mixtures, and propose the weights of the next one. See docs/task_families.md."""
    with report_errors():
        from rollmesh.app.mixture_trials import propose, read_trial

        found = propose([read_trial(run) for run in runs], score or (), least=least)
    if as_json:
        print_json(found)
    else:
        _print(found)


def _print(found: Proposal) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("run", "seed", "updates", *map(escape, found.weights), *map(escape, found.score), box=None)
    for trial in found.trials:
        shares = [f"{trial.shares[name]:.3f}" for name in found.weights]
        scores = [f"{trial.scores[name]:.3f}" for name in found.score]
        table.add_row(escape(Path(trial.folder).name), str(trial.seed), str(trial.updates), *shares, *scores)
    Console().print(table)
    weights = ", ".join(f"{name}: {share:g}" for name, share in found.weights.items())
    typer.echo(f"data: {{selector: {{name: mixture, options: {{weights: {{{weights}}}}}}}}}")
    typer.echo(
        f"predicted {found.predicted:.3f}, best run {found.best_measured:.3f}; error on a run that is held out "
        f"{found.error:.3f}, of the mean of the others {found.error_of_mean:.3f}"
    )
    if found.error >= found.error_of_mean:
        typer.echo("the predictor is not better than a mean: these runs do not tell which mixture is better")
