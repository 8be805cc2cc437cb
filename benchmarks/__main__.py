"""`python -m benchmarks`: measurements on this machine, as ratios to baselines of the same run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from rollmesh.app.compute import set_up_compute
from rollmesh.cli.app import FAILED, report_errors

if TYPE_CHECKING:
    from benchmarks.methods.bench import MethodsOptions, MethodsOutcome

Number = TypeVar("Number", int, float)
ROOT = Path(__file__).parents[1]
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def bench(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Names of benchmarks.", show_default="all")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Run fewer repetitions as a smoke test.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the results to this file.")
    ] = None,
    methods: Annotated[
        str,
        typer.Option(
            help="With `methods`: recipes by name or file, separated by commas. Default: all built-in ones.",
            show_default=False,
        ),
    ] = "",
    tasks: Annotated[
        str,
        typer.Option(
            help="With `methods`: tasks, separated by commas. Default: those on which a recipe expects a difference, "
            "or calc.",
            show_default=False,
        ),
    ] = "",
    lags: Annotated[
        str,
        typer.Option(
            help="With `methods`: ages of the generating weights in updates, separated by commas. Default: 0, and "
            "0,4,16 where a recipe "
            "expects something of stale data.",
            show_default=False,
        ),
    ] = "",
    seeds: Annotated[
        str,
        typer.Option(help="With `methods` and `race`: seeds, separated by commas. With `methods` they screen."),
    ] = "0,1,2",
    confirm: Annotated[
        str,
        typer.Option(
            help="With `methods`: recipes that get verdicts, from other seeds, at most 20, separated by commas. "
            "Default: none.",
            show_default=False,
        ),
    ] = "",
    confirm_seeds: Annotated[
        int, typer.Option("--confirm-seeds", help="With `methods`: seeds for verdicts: 5, 10 or 20.")
    ] = 5,
    old: Annotated[
        Path | None,
        typer.Option(
            help="With `race`: another checkout with an environment in .venv, to compare with.",
            show_default=False,
        ),
    ] = None,
    updates: Annotated[int, typer.Option(help="With `race`: updates of each arm.", min=5)] = 50,
    lr: Annotated[str, typer.Option(help="With `methods`: learning rates, separated by commas.")] = "5e-4,1.5e-4",
    cpu_s: Annotated[
        float, typer.Option("--cpu-s", help="With `methods`: budget of this call, in CPU seconds.")
    ] = 3600.0,
    processes: Annotated[int, typer.Option(help="With `methods`: arms that run at once, with one thread each.")] = 1,
    out: Annotated[
        Path | None,
        typer.Option(
            help="With `methods` and `race`: folder of records, initial models and the report. Arms with a record are "
            "not run again. "
            "Default: bench-methods with `methods`, a temporary folder with `race`.",
            show_default=False,
        ),
    ] = None,
    report: Annotated[
        bool, typer.Option("--report", help="With `methods`: write the report from the records and run nothing.")
    ] = False,
    any_commit: Annotated[
        bool,
        typer.Option("--any-commit", help="With `methods`: accept records of other commits with the same settings."),
    ] = False,
) -> None:
    """Measure engine and mesh against baselines of the same run. benchmarks/README.md explains the results.

    A bench that misses one of its targets fails with exit code 1. `python -m benchmarks methods` trains tiny models
    with recipes and compares each with its baseline. It writes a record when a run ends, and resumes.
    """
    with report_errors():
        set_up_compute()
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
        )  # for processes
        if names != ["methods"]:
            from benchmarks.runner import run_benches

            options: dict[str, Any] = {"seeds": _numbers("--seeds", seeds, int), "old": old}
            if names == ["race"]:
                options |= {"updates": updates, "out": out}
            if not run_benches(names or [], quick=quick, json_file=json_file, options=options):
                raise typer.Exit(FAILED)
            return
        from benchmarks.methods.bench import MethodsOptions

        chosen = MethodsOptions(
            methods=_split(methods),
            tasks=_split(tasks),
            lags=_numbers("--lags", lags, int),
            seeds=_numbers("--seeds", seeds, int),
            confirm=_split(confirm),
            confirm_seeds=confirm_seeds,
            lrs=_numbers("--lr", lr, float),
            cpu_s=cpu_s,
            processes=processes,
            out=out or Path("bench-methods"),
            any_commit=any_commit,
            quick=quick,
        )
        _methods(chosen, json_file, run=not report)


def _methods(options: MethodsOptions, json_file: Path | None, *, run: bool) -> None:
    import asyncio

    import msgspec

    from benchmarks.methods.bench import read_outcome, run_methods

    if run:
        outcome = asyncio.run(run_methods(options, lambda line: typer.echo(line, err=True)))
    else:
        outcome = read_outcome(options)
    text = _write_report(options, outcome)
    typer.echo(text)
    if json_file is not None:
        rows: dict[str, Any] = {"rows": outcome.rows, "missing": outcome.missing, "crashed": outcome.crashed}
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(rows)) + b"\n")
    if outcome.crashed:
        raise typer.Exit(FAILED)


def _write_report(options: MethodsOptions, outcome: MethodsOutcome) -> str:
    """Write `report/` with the curves of each task, and return its text."""
    from benchmarks.methods.figure import draw_task
    from benchmarks.methods.report import markdown
    from rollmesh.app.views.figure import to_svg

    folder = options.out / "report"
    folder.mkdir(parents=True, exist_ok=True)
    good = [arm for arm, record in outcome.records.items() if not record.error]
    pictures = {}
    for task in sorted({arm.task for arm in good}):
        methods = sorted({arm.label for arm in good if arm.task == task})
        (folder / f"{task}.svg").write_text(to_svg(draw_task(task, outcome.records, methods)))
        pictures[task] = f"{task}.svg"
    text = markdown(outcome.rows, outcome.records, len(outcome.missing), pictures)
    (folder / "methods.md").write_text(text)
    return text


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _numbers(option: str, text: str, number: Callable[[str], Number]) -> tuple[Number, ...]:
    """Raise InvalidInput for a part that is not such a number."""
    from rollmesh.shared.errors import InvalidInput

    try:
        return tuple(number(part) for part in _split(text))
    except ValueError as err:
        kind = "integers" if number is int else "numbers"
        raise InvalidInput(f"{option} must be {kind} separated by commas, got {text!r}") from err


if __name__ == "__main__":
    app(prog_name="python -m benchmarks")
