"""Audits for the page: at most one at a time, each outside this process, at most one per run and interval."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from rollmesh.services.gateway.heads import NAME, read_heads
from rollmesh.services.gateway.page.parts import LedgerAuditor
from rollmesh.shared.clock import Clock
from rollmesh.shared.errors import MeshError

RUNS_MAX = 16
"""Number of runs whose verdict is stored."""
_log = logging.getLogger(__name__)


class AuditVerdict(msgspec.Struct, kw_only=True):
    """The newest audit of a run, as the page shows it."""

    state: str = "none"
    """none, waiting, running, done or failed."""
    report: msgspec.Raw = msgspec.Raw(b"null")
    """The report as `rollmesh audit --json` prints it; null before the first audit."""
    finished_unix_s: float = 0.0
    cause: str = ""
    """Why there is no verdict, or why the newest audit failed."""
    next_in_s: float = 0.0
    """Seconds until another audit may start."""


class Audits:
    """Runs and stores audits. `moved` is called with the run when its verdict changes."""

    def __init__(
        self, auditor: LedgerAuditor | None, *, folder: Path, every_s: float, clock: Clock, moved: Callable[[str], None]
    ) -> None:
        """`folder` is that of the gateway's heads."""
        self._auditor = auditor if every_s > 0 else None
        self._folder = folder
        self._every_s = every_s
        self._clock = clock
        self._moved = moved
        self._verdicts: dict[str, AuditVerdict] = {}
        self._begun_s: dict[str, float] = {}
        self._positions: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._one = asyncio.Lock()

    def verdict(self, run: str) -> AuditVerdict:
        """Return the newest verdict of a run."""
        if self._auditor is None:
            return AuditVerdict(cause="This gateway does not audit; `rollmesh audit RUN` does.")
        found = self._verdicts.get(run, AuditVerdict())
        found.next_in_s = round(self._wait_s(run), 1)
        return found

    @property
    def every_s(self) -> float:
        """Shortest time between two audits of a run, in seconds."""
        return self._every_s

    def request(self, run: str, position: int = 0) -> AuditVerdict:
        """Start an audit unless one is running, or the last one is younger than the interval. Return the verdict.

        `position`: the newest ledger record that is known. If it is the same as at the last request that started an
        audit, and not 0, there is nothing new to audit.
        """
        known = position > 0 and position == self._positions.get(run)
        busy = run in self._verdicts and self._verdicts[run].state in ("waiting", "running")
        if self._auditor is not None and not busy and not known and self._wait_s(run) <= 0:
            self._begun_s[run] = self._clock.monotonic_s()
            self._positions[run] = position
            self._set(run, "waiting")
            task = asyncio.create_task(self._audit(self._auditor, run), name=f"audit {run}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return self.verdict(run)

    async def close(self) -> None:
        """Cancel the audits."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _wait_s(self, run: str) -> float:
        begun_s = self._begun_s.get(run)
        return 0.0 if begun_s is None else max(0.0, begun_s + self._every_s - self._clock.monotonic_s())

    async def _audit(self, auditor: LedgerAuditor, run: str) -> None:
        async with self._one:
            self._set(run, "running")
            try:
                heads = [
                    ("this gateway", head) for name, head in read_heads(self._folder / NAME).items() if name == run
                ]
                report = await auditor(run, heads)
            except (MeshError, OSError) as error:  # OSError: the process of the audit cannot be started
                _log.warning("audit for the page failed: run=%s cause=%s", run, error)
                self._positions.pop(run, None)
                self._set(run, "failed", cause=str(error))
                return
            self._set(run, "done", report=msgspec.Raw(report))

    def _set(self, run: str, state: str, *, cause: str = "", report: msgspec.Raw | None = None) -> None:
        found = self._verdicts.setdefault(run, AuditVerdict())
        found.state, found.cause = state, cause
        if report is not None:
            found.report, found.finished_unix_s = report, self._clock.wall_s()
        while len(self._verdicts) > RUNS_MAX:
            oldest = next(iter(self._verdicts))
            del self._verdicts[oldest]
            self._begun_s.pop(oldest, None)
            self._positions.pop(oldest, None)
        self._moved(run)
