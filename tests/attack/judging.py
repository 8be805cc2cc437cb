"""Judge a candidate by one hidden test, in a separate sandbox core beside the arena's engine."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from rollmesh.services.sandbox.config import SandboxConfig
from rollmesh.services.sandbox.node import SandboxCore
from rollmesh.services.sandbox.oracle.judge import Judge
from rollmesh.services.sandbox.oracle.manifest import Manifest, manifest_of
from rollmesh.shared.clock import SystemClock
from rollmesh.shared.domain.ids import RandomIds

from .forgeries import PROGRAM, SOLUTION

_LIMITS = {"wall_s": 1.0, "cpu_s": 1.0, "processes_max": 8, "memory_bytes": 256 << 20}
_TEXT, _NUMBER, _EXPECTED = "abc", 3, "882:cba"
"""The hidden test of `mix`, the task of `forgeries`."""


def _manifest(kind: str) -> Manifest:
    if kind == "function":
        test = {"arguments": [_TEXT, _NUMBER], "expected": _EXPECTED}
        return manifest_of({"kind": "function", "function": "mix", "tests": [test], "limits": _LIMITS})
    test = {"stdin": f"{_TEXT} {_NUMBER}\n", "stdout": _EXPECTED}
    return manifest_of({"kind": "stdio", "tests": [test], "limits": _LIMITS})


class Bench:
    """Judges candidates."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._manifests = {kind: _manifest(kind) for kind in ("function", "program")}

    async def verdict(self, kind: str, source: str) -> str:
        """Return the verdict on the test, by its short name."""
        report = await self._judge.judge(self._manifests[kind], {"solution.py": source.encode()})
        return " ".join(verdict.verdict.name for verdict in report.verdicts)


@contextlib.asynccontextmanager
async def bench(state_dir: Path) -> AsyncIterator[Bench]:
    """Yield a judge that ends with the arena."""
    config, clock, ids = SandboxConfig(grace_s=0.3), SystemClock(), RandomIds()
    async with SandboxCore(config, state_dir=state_dir, clock=clock, ids=ids) as core:
        made = Bench(Judge(core.sessions, config, clock=clock, ids=ids))
        for kind, source in (("function", SOLUTION), ("program", PROGRAM)):
            given = await made.verdict(kind, source)
            assert given == "AC", f"what solves the task as a {kind} must be accepted, was {given}"
        yield made
