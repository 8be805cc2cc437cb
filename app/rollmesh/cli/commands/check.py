"""`rollmesh check`: find the mistakes in a configuration before a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollmesh.app.compute import set_up_compute
from rollmesh.cli.app import FAILED, Overrides, app, console, report_errors


@app.command()
def check(
    config: Annotated[Path | None, typer.Argument(help="A configuration file.")] = None,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Also run one episode, and print its transcript and rewards.")
    ] = False,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe",
            help="Also score answers that solve nothing, such as an empty one or every option at once, and list the "
            "tasks that pay them. A judge is asked about 250 times per task. Exit code 1 if a task pays.",
        ),
    ] = False,
    probe_tasks: Annotated[int, typer.Option(help="With --probe: number of training tasks.", min=1)] = 16,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of a configuration file instead, for an editor.")
    ] = False,
) -> None:
    """Find every mistake in a configuration, and print each setting with its effective value."""
    if schema:
        import msgspec

        from rollmesh.app.config import TrainConfig
        from rollmesh.shared.config.config_schema import json_schema

        typer.echo(msgspec.json.format(msgspec.json.encode(json_schema(TrainConfig)), indent=2).decode())
        return
    if config is None:
        raise typer.BadParameter("name a configuration file, or use --schema", param_hint="config")
    with report_errors():
        set_up_compute()
        from rollmesh.app.checks.config_checks import load_checked
        from rollmesh.app.checks.config_notes import notes
        from rollmesh.app.checks.effective_config import effective_config, headline
        from rollmesh.app.checks.model_checks import call_note, memory_note
        from rollmesh.shared.config.loader import to_yaml

        (settings, tasks), base_dir = load_checked(config, overrides or []), config.parent
        typer.echo(to_yaml(effective_config(settings, base_dir)), nl=False)
        remarks = (*notes(settings, base_dir, tasks), *call_note(settings, base_dir), *memory_note(settings, base_dir))
        for line in (headline(settings, base_dir), *remarks):
            typer.echo(line, err=True)
        if probe:
            from rollmesh.app.checks.probe import probe as probe_tasks_of
            from rollmesh.app.checks.probe import report_lines

            terminal = console(as_json=True)
            with terminal.status("probe") as status:
                report = probe_tasks_of(
                    settings,
                    base_dir,
                    num_tasks=probe_tasks,
                    on_task=lambda done, of: status.update(f"probe: task {done + 1} of {of}"),
                )
            for line in report_lines(report):
                typer.echo(line, err=True)
            if report.paid:
                raise typer.Exit(FAILED)
        if dry_run:
            from rollmesh.app.samples.dry_run import run_dry
            from rollmesh.app.samples.transcript import transcript

            terminal = console(as_json=True)
            with terminal.status("dry run") as status:
                run_dry(
                    config,
                    overrides or [],
                    on_sample=lambda line: terminal.print(transcript(line)),
                    on_phase=lambda phase: status.update(f"dry run: {phase}"),
                )
