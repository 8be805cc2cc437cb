"""`rollmesh doctor`: check whether this host can run a mesh."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from rollmesh.cli.app import FAILED, AsJson, app, console, report_errors

if TYPE_CHECKING:
    from rollmesh.app.checks.host_checks import HostFinding


@app.command()
def doctor(
    user: Annotated[
        str, typer.Option("--user", metavar="NAME", help="Run the sandbox checks as this user of the host. Needs root.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Check whether this host can run a mesh. The output lists missing items, what they disable and how to fix them.

    The exit code is 1 if a required item is missing. A sandbox service does not start then.
    """
    from rollmesh.app.checks.host_checks import CheckRequest, find, is_fit, user_named

    with report_errors():
        from rollmesh.services.sandbox.config import SandboxConfig

        findings = find(CheckRequest(sandbox=SandboxConfig(), user=user_named(user) if user else None))
    fit = is_fit(findings)
    if as_json:
        typer.echo(json.dumps({"fit": fit, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        _show(findings)
    if not fit:
        raise typer.Exit(FAILED)


def _show(findings: Sequence[HostFinding]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("", "check", "found", "effect"):
        table.add_column(title, overflow="fold")
    for finding in findings:
        mark = "ok" if finding.holds else "MISSING" if finding.required else "absent"
        table.add_row(mark, finding.name, finding.detail, finding.guarantee)
    console(False).print(table)
    for finding in findings:
        if finding.remedy:
            typer.echo(f"\n{finding.name}: {finding.remedy}")
