"""`rollmesh judge`: judge the files of a candidate with hidden tests in sandbox sessions on this host, without a
mesh."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollmesh.cli.app import FAILED, AsJson, app, report_errors

if TYPE_CHECKING:
    from rollmesh.services.sandbox.oracle.manifest import Manifest
    from rollmesh.services.sandbox.oracle.verdict import JudgeReport


@app.command()
def judge(
    manifest: Annotated[
        Path, typer.Argument(help="JSON file with one manifest of hidden tests; see docs/sandbox/judging.md.")
    ],
    files: Annotated[
        list[Path], typer.Argument(help="Files of the candidate. A single file with any name is the entry.")
    ],
    config: Annotated[
        Path | None, typer.Option(help="Configuration with the sandbox profiles that the manifest names.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Judge a candidate with hidden tests on this host. Use it to try a manifest before a run depends on it."""
    with report_errors():
        import asyncio
        import json

        report = asyncio.run(judge_files(manifest, files, config))
        text = json.dumps(as_plain(report), indent=2) if as_json else table(report)
    typer.echo(text)
    raise typer.Exit(0 if report.num_accepted == report.num_tests else FAILED)


async def judge_files(manifest_path: Path, paths: Sequence[Path], config_path: Path | None = None) -> JudgeReport:
    """Run the hidden tests. `config_path` names the configuration with the sandbox profiles.

    Raises MeshError for files that cannot be read and for a host that cannot isolate sessions.
    """
    import tempfile

    from rollmesh.app.config import load_train_config
    from rollmesh.services.sandbox.config import SandboxConfig
    from rollmesh.services.sandbox.node import SandboxCore
    from rollmesh.services.sandbox.oracle.judge import Judge
    from rollmesh.services.sandbox.oracle.store import read_manifest
    from rollmesh.shared.clock import SystemClock
    from rollmesh.shared.domain.ids import RandomIds

    manifest = read_manifest(manifest_path)
    files = _candidate(manifest, paths)
    config = SandboxConfig() if config_path is None else load_train_config(config_path).sandbox
    clock, ids = SystemClock(), RandomIds()
    with tempfile.TemporaryDirectory(prefix="rollmesh-judge-") as folder:
        async with SandboxCore(config, state_dir=Path(folder), clock=clock, ids=ids) as core:
            return await Judge(core.sessions, config, clock=clock, ids=ids).judge(
                manifest, files, owner="rollmesh judge"
            )


def _candidate(manifest: Manifest, paths: Sequence[Path]) -> dict[str, bytes]:
    """Return the files by name. A single file with any name becomes the entry."""
    from rollmesh.shared.errors import ConfigError, InvalidInput

    try:
        files = {path.name: path.read_bytes() for path in paths}
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename}: {error.strerror}; give the candidate's files") from error
    if len(files) < len(paths):
        raise InvalidInput(
            "two of the candidate's files have the same name; rename one, because they are judged in one folder"
        )
    return {manifest.entry: next(iter(files.values()))} if len(files) == 1 else files


def table(report: JudgeReport) -> str:
    """Return a line per test, and the sum."""
    width = max((len(verdict.name) for verdict in report.verdicts), default=0)
    lines = [
        f"{v.name:<{width}}  {v.verdict.name:<3}  {1000 * v.wall_s:8.1f} ms  {v.message}".rstrip()
        for v in report.verdicts
    ]
    lines.append(f"{report.num_accepted} of {report.num_tests} accepted, share {report.accepted_share:.3f}")
    return "\n".join(lines)


def as_plain(report: JudgeReport) -> dict[str, object]:
    """Return the report for --json."""
    return {
        "verdicts": [
            {"name": v.name, "verdict": v.verdict.name, "message": v.message, "wall_s": v.wall_s}
            for v in report.verdicts
        ],
        "num_tests": report.num_tests,
        "num_accepted": report.num_accepted,
        "accepted_share": report.accepted_share,
    }
