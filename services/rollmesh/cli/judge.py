"""`rollmesh judge`: a candidate's files against a manifest of hidden tests, in jails on this machine, without a mesh."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from rollmesh.cli.config import load_train_config
from rollmesh.services.sandbox.config import SandboxConfig
from rollmesh.services.sandbox.node import SandboxCore
from rollmesh.services.sandbox.oracle.judge import Judge
from rollmesh.services.sandbox.oracle.manifest import Manifest
from rollmesh.services.sandbox.oracle.store import read_manifest
from rollmesh.services.sandbox.oracle.verdict import JudgeReport
from rollmesh.shared.clock import SystemClock
from rollmesh.shared.errors import ConfigError, InvalidInput
from rollmesh.shared.ids import RandomIds


async def judge_files(manifest_path: Path, paths: Sequence[Path], config_path: Path | None = None) -> JudgeReport:
    """The report. The profiles are those of a run's configuration, if one is named. Raises MeshError for files that cannot be read and
    for a host that cannot make jails."""
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
    """A single file is the entry, whatever its name; several keep their names."""
    try:
        files = {path.name: path.read_bytes() for path in paths}
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename}: {error.strerror}; give the candidate's files") from error
    if len(files) < len(paths):
        raise InvalidInput("two of the candidate's files have one name; they lie in one folder when they are judged")
    return {manifest.entry: next(iter(files.values()))} if len(files) == 1 else files


def table(report: JudgeReport) -> str:
    """A line per test, and the sum."""
    width = max((len(verdict.name) for verdict in report.verdicts), default=0)
    lines = [
        f"{v.name:<{width}}  {v.verdict.name:<3}  {1000 * v.wall_s:8.1f} ms  {v.message}".rstrip()
        for v in report.verdicts
    ]
    lines.append(f"{report.num_accepted} of {report.num_tests} accepted, share {report.accepted_share:.3f}")
    return "\n".join(lines)


def as_plain(report: JudgeReport) -> dict[str, object]:
    """For a machine."""
    return {
        "verdicts": [
            {"name": v.name, "verdict": v.verdict.name, "message": v.message, "wall_s": v.wall_s}
            for v in report.verdicts
        ],
        "num_tests": report.num_tests,
        "num_accepted": report.num_accepted,
        "accepted_share": report.accepted_share,
    }
