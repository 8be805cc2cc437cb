"""`rollmesh doctor`: what this host gives to a mesh, and what falls away where it gives less."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from rollmesh.cli.app import FAILED, AsJson, app, console, told_once

if TYPE_CHECKING:
    from rollmesh.cli.doctor import Finding


@app.command()
def doctor(
    user: Annotated[
        str,
        typer.Option(
            "--user", metavar="NAME", help="Probe the isolation mechanisms as this user of the host; needs root."
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Probe every isolation mechanism of the sandbox and every program that a mesh needs; report what is missing, its consequence and its remedy.

    Exit code 1 if something required is missing: a sandbox service would refuse to start.
    """
    from rollmesh.cli.doctor import Asked, find, is_fit, user_named

    with told_once():
        from rollmesh.services.sandbox.config import SandboxConfig

        findings = find(Asked(sandbox=SandboxConfig(), user=user_named(user) if user else None))
    fit = is_fit(findings)
    if as_json:
        typer.echo(json.dumps({"fit": fit, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        _show(findings)
    if not fit:
        raise typer.Exit(FAILED)


def _show(findings: Sequence[Finding]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("", "what", "found", "so"):
        table.add_column(title, overflow="fold")
    for finding in findings:
        mark = "ok" if finding.holds else "MISSING" if finding.required else "absent"
        table.add_row(mark, finding.name, finding.detail, finding.guarantee)
    console(False).print(table)
    for finding in findings:
        if finding.remedy:
            typer.echo(f"\n{finding.name}: {finding.remedy}")
