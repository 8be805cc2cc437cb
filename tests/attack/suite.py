"""Run the suite: attacks in sequence, controls, the neighbor's speed; and the same again as an ordinary user."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from rollmesh.sandbox_runtime import cgroups

from .arena import Arena, arena
from .attack import Attack, Verdict
from .catalog import FAMILIES, playable
from .controls import Controls, possible
from .neighbor import Latencies, percentile
from .table import Pace, Report, Row
from .world import ROOT, World, world

UID = 12345
"""Uid of an ordinary user, which needs no account."""
_PORTIONS = ("protos", "shared", "services", "app", "trainer", "sandbox_runtime")
_QUIET_CALLS = 6
"""Number of quiet calls before each attack."""
_USER_RUN_S = 1800.0


def chosen(words: Sequence[str]) -> list[Attack]:
    """Return the attacks whose family or name contains one of the words; all without words."""
    return [
        attack
        for family in FAMILIES
        for attack in family.attacks
        if playable(attack) and (not words or any(word in f"{family.name}: {attack.name}" for word in words))
    ]


async def play(attacks: Sequence[Attack], *, controls: bool, report: Callable[[str], None]) -> Report:
    """Run all attacks in one engine, and then their controls."""
    with tempfile.TemporaryDirectory(prefix="rollmesh-arena-") as folder, world() as around:
        judging = any(attack.verdict is Verdict.REJECTED for attack in attacks)
        egress = any(attack.profile != "python" for attack in attacks)
        async with arena(Path(folder), around, judging=judging, egress=egress) as running:
            rows = [await _play_one(running, attack, report) for attack in attacks]
        shown = _play_controls(around, attacks, report) if controls and possible() else {}
    return Report(
        user="root" if os.geteuid() == 0 else "an ordinary user",
        rows=rows,
        pace=_pace(running.neighbor.latencies),
        controls=shown,
    )


async def _play_one(running: Arena, attack: Attack, report: Callable[[str], None]) -> Row:
    if attack.needs and not _has_memory_cgroup():
        return Row(name=attack.name, verdict="", faults=[], missing=attack.needs)
    await running.neighbor.quiet(_QUIET_CALLS)
    score = await running.play(attack)
    for fault in score.faults:
        report(f"NOT CONTAINED {score.name}: {fault}")
    return Row(name=score.name, verdict=score.verdict, faults=list(score.faults))


def _has_memory_cgroup() -> bool:
    hierarchy = cgroups.detect_here()
    return hierarchy is not None and "memory" in hierarchy.parents


def _play_controls(around: World, attacks: Sequence[Attack], report: Callable[[str], None]) -> dict[str, str]:
    shown = {}
    controls = Controls(around)
    try:
        for attack in attacks:
            if attack.free:
                shown[attack.name] = why = controls.play(attack)
                if why:
                    report(f"control of {attack.name}: {why}")
    finally:
        controls.close()
    return shown


def _pace(measured: Latencies) -> Pace:
    worst = max(measured.worst, key=lambda name: measured.worst[name], default="")
    quiet, attacked = measured.quiet_s, measured.attacked_s
    return Pace(
        quiet_calls=len(quiet),
        quiet_p50_ms=percentile(quiet, 0.5) * 1e3,
        quiet_p99_ms=percentile(quiet, 0.99) * 1e3,
        attacked_calls=len(attacked),
        attacked_p50_ms=percentile(attacked, 0.5) * 1e3 if attacked else 0.0,
        attacked_p99_ms=percentile(attacked, 0.99) * 1e3 if attacked else 0.0,
        worst=worst,
        worst_p50_ms=measured.worst.get(worst, 0.0) * 1e3,
    )


def save(report: Report, path: Path) -> None:
    """Encode a report for another process."""
    path.write_bytes(msgspec.json.encode(report))


def can_step_down() -> bool:
    """Return whether a second run as an ordinary user is possible from here."""
    return os.geteuid() == 0 and shutil.which("setpriv") is not None and readable_python() is not None


def readable_python() -> str | None:
    """Return an interpreter of the same minor version that any user can execute; root's own may be in an inaccessible
    home."""
    name = f"python3.{sys.version_info.minor}"
    for candidate in (f"/usr/bin/{name}", f"/usr/local/bin/{name}", sys.executable):
        path = Path(candidate).resolve()
        if path.exists() and all(folder.stat().st_mode & 0o001 for folder in path.parents):
            return candidate
    return None


def play_as_ordinary_user(words: Sequence[str]) -> Report:
    """Run the same suite in a process of `UID`, where the jail uses user namespaces instead of root."""
    python = readable_python()
    assert python is not None
    folder = Path(tempfile.mkdtemp(prefix="rollmesh-attack-user-"))
    os.chown(folder, UID, UID)
    report = folder / "report.json"
    only = ["--only", *words] if words else []
    paths = [str(ROOT / portion) for portion in _PORTIONS] + site.getsitepackages()
    environment = {"PYTHONPATH": os.pathsep.join(paths), "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
    step_down = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups"]
    command = [*step_down, python, "-m", "tests.attack", "--json", str(report), *only]
    try:
        subprocess.run(command, env=environment, cwd=ROOT, timeout=_USER_RUN_S, check=True)
        return msgspec.json.decode(report.read_bytes(), type=Report)
    finally:
        shutil.rmtree(folder)


__all__ = ["can_step_down", "chosen", "play", "play_as_ordinary_user", "save"]
