"""Judgments: run the tests of a manifest on a candidate, in the manifest's order, a bounded number of judgments at a
time.

    candidate's session   the candidate's files; each input when it is needed
    this process          expected answers; compares plain data
    oracle's session      checkers and hidden test code; answers as data

Verdicts are created only here and in the oracle's session. A lost jail, a missing slot or a broken manifest is an error
of the whole judgment, never a verdict.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rollmesh.sandbox_runtime.limits import Limits
from rollmesh.services.sandbox.config import ProfileConfig, SandboxConfig
from rollmesh.services.sandbox.oracle.candidate import Candidate, OpenSession, Prepare, loading
from rollmesh.services.sandbox.oracle.checking import CheckerSession
from rollmesh.services.sandbox.oracle.judging_session import TimeBudget, open_session
from rollmesh.services.sandbox.oracle.manifest import (
    Checker,
    FunctionManifest,
    LimitsPerTest,
    Manifest,
    ManifestError,
    RepositoryManifest,
    SqlManifest,
    StdioManifest,
    UnitManifest,
    name_of,
    require_room,
    with_prelude,
)
from rollmesh.services.sandbox.oracle.queries import try_sql
from rollmesh.services.sandbox.oracle.repositories import patching, try_repository
from rollmesh.services.sandbox.oracle.trials import try_function, try_stdio
from rollmesh.services.sandbox.oracle.unit import try_unit
from rollmesh.services.sandbox.oracle.verdict import CandidateFailed, HiddenTestResult, JudgeReport, JudgeVerdict
from rollmesh.services.sandbox.sessions import Sessions
from rollmesh.shared.clock import Clock
from rollmesh.shared.domain.ids import IdSource
from rollmesh.shared.errors import Overloaded, UnknownProfile, field_error

Trial = Callable[[int], Awaitable[None]]
"""Runs the test with an index; raises `CandidateFailed`."""

_LIMITS = {name: "call_s" if name == "wall_s" else name for name in LimitsPerTest.__struct_fields__}
"""Field of LimitsPerTest -> field of the sessions' Limits."""
_OUT_OF_TIME = "not run, because too many earlier tests were out of time"
_BUDGET_SPENT = "not run, because the candidate took more than {:g} s in earlier tests"


@dataclass(frozen=True, slots=True)
class _Request:
    manifest: Manifest
    files: Mapping[str, bytes]
    limits: Mapping[str, float]
    owner: str
    budget: TimeBudget


class Judge:
    """Judges candidates in sessions of a node."""

    def __init__(self, sessions: Sessions, config: SandboxConfig, *, clock: Clock, ids: IdSource) -> None:
        self._sessions = sessions
        self._config = config
        self._clock = clock
        self._ids = ids
        self._permits = asyncio.Semaphore(config.judgments_inflight_max)
        self._num_asked = 0

    async def judge(
        self,
        manifest: Manifest,
        files: Mapping[str, bytes],
        *,
        limits: LimitsPerTest | None = None,
        owner: str = "",
        budget_s: float = 0.0,
    ) -> JudgeReport:
        """Judge a candidate. `budget_s` > 0 limits the time that it may take in all tests together; the remaining tests
        count as out of time. Raises InvalidInput for limits above the manifest's or too low for it, and the errors of
        opening and using sessions."""
        if not (math.isfinite(budget_s) and budget_s >= 0):
            raise field_error("budget_s", "be finite and >= 0", budget_s)
        narrowed = _narrow(manifest.limits, limits or LimitsPerTest())
        budget = TimeBudget(
            call_s=narrowed["call_s"] or self._limits(manifest.profile).call_s, total_s=budget_s or math.inf
        )
        request = _Request(manifest, with_prelude(manifest, files), narrowed, owner or "RunTests", budget)
        try:
            require_room(manifest, int(request.limits["output_bytes"]) or self._limits(manifest.profile).output_bytes)
        except ManifestError as error:
            raise field_error("manifest", "be valid", error) from None
        if self._num_asked >= self._config.judgments_inflight_max + self._config.judgments_queued_max:
            raise Overloaded(
                f"{self._num_asked} judgments are waiting or running on this sandbox node; wait or use another node",
                retry_after_s=self._config.retry_after_s,
            )
        self._num_asked += 1
        try:
            async with self._permits, self._trial(request) as (trial, candidate):
                return await self._run(manifest, trial, candidate)
        finally:
            self._num_asked -= 1

    def check(self, manifest: Manifest) -> None:
        """Raise ManifestError for a manifest that no candidate can pass under the limits of its profile, if that
        profile is configured."""
        if manifest.profile in self._config.profiles:
            require_room(manifest, manifest.limits.output_bytes or self._limits(manifest.profile).output_bytes)

    async def _run(self, manifest: Manifest, trial: Trial, candidate: Candidate) -> JudgeReport:
        verdicts: list[HiddenTestResult] = []
        num_late = 0
        for index in range(len(manifest.tests)):
            if num_late >= manifest.time_limits_max:
                verdicts.append(_verdict(manifest, index, CandidateFailed(JudgeVerdict.TLE, _OUT_OF_TIME)))
                continue
            if candidate.budget.exhausted:
                message = _BUDGET_SPENT.format(candidate.budget.total_s)
                verdicts.append(_verdict(manifest, index, CandidateFailed(JudgeVerdict.TLE, message)))
                continue
            failed = None
            try:
                await trial(index)
            except CandidateFailed as raised:
                failed = raised
            verdicts.append(_verdict(manifest, index, failed, await candidate.end_test()))
            num_late += verdicts[-1].verdict is JudgeVerdict.TLE
            if failed is not None and manifest.stop_at_first_failure:
                break
        weight = sum(test.weight for test in manifest.tests)
        return JudgeReport(verdicts=verdicts, num_tests=len(manifest.tests), weight=weight)

    @asynccontextmanager
    async def _trial(self, request: _Request) -> AsyncIterator[tuple[Trial, Candidate]]:
        manifest = request.manifest
        candidate = Candidate(
            self._opener(manifest.profile, request.limits, request.owner),
            request.files,
            entry=manifest.entry,
            prepare=self._preparation(manifest),
            isolate=manifest.isolate,
            budget=request.budget,
        )
        checker = manifest.checker if isinstance(manifest, FunctionManifest | StdioManifest) else None
        async with candidate, self._checker(checker, request) as session:
            yield self._put_to(candidate, request, session), candidate

    def _preparation(self, manifest: Manifest) -> Prepare | None:
        match manifest:
            case FunctionManifest() | UnitManifest():
                return loading(manifest.entry)
            case RepositoryManifest():
                return patching(manifest, self._directory(manifest.profile))
        return None

    def _put_to(self, candidate: Candidate, request: _Request, checker: CheckerSession | None) -> Trial:
        match request.manifest:
            case FunctionManifest() as function:
                return lambda index: try_function(function, function.tests[index], candidate, checker)
            case StdioManifest() as stdio:
                cpu_s = request.limits["cpu_s"] or self._limits(stdio.profile).cpu_s
                return lambda index: try_stdio(stdio, stdio.tests[index], candidate, checker, cpu_s)
            case UnitManifest() as unit:
                oracle = self._opener(unit.oracle_profile, {}, request.owner)
                return lambda index: try_unit(unit, unit.tests[index], candidate, oracle, request.budget.call_s)
            case SqlManifest() as sql:
                reference = self._opener(sql.profile, {}, request.owner)
                return lambda index: try_sql(sql, sql.tests[index], candidate, reference)
            case RepositoryManifest() as patched:
                directory = self._directory(patched.profile)
                return lambda index: try_repository(patched, patched.tests[index], candidate, directory)

    def _limits(self, profile: str) -> Limits:
        return self._profile(profile).resolved_limits()

    def _directory(self, profile: str) -> str:
        """Return the directory of the repository in the profile's sessions, relative to the private directory."""
        repository = self._profile(profile).repository
        if repository is None:
            raise UnknownProfile(
                f"sandbox profile {profile!r} has no repository on this node; configure `repository`, or name another "
                "profile in the manifest",
                profile=profile,
            )
        return repository.name

    def _profile(self, name: str) -> ProfileConfig:
        if name not in self._config.profiles:
            raise UnknownProfile(
                f"the manifest names sandbox profile {name!r}, which is not configured on this node", profile=name
            )
        return self._config.profiles[name]

    @asynccontextmanager
    async def _checker(self, checker: Checker | None, request: _Request) -> AsyncIterator[CheckerSession | None]:
        if checker is None:
            yield None
            return
        opener = self._opener(checker.profile, {}, request.owner)
        async with CheckerSession(opener, checker, request.budget) as session:
            yield session

    def _opener(self, profile: str, limits: Mapping[str, float], owner: str) -> OpenSession:
        return lambda: open_session(
            self._sessions, self._clock, self._ids.new("judge"), profile=profile, limits=limits, owner=owner
        )


def _verdict(manifest: Manifest, index: int, failed: CandidateFailed | None, wall_s: float = 0.0) -> HiddenTestResult:
    test = manifest.tests[index]
    return HiddenTestResult(
        name=name_of(test, index),
        verdict=failed.verdict if failed else JudgeVerdict.AC,
        message=failed.message if failed else "",
        wall_s=wall_s,
        weight=test.weight,
    )


def _narrow(manifest: LimitsPerTest, asked: LimitsPerTest) -> dict[str, float]:
    """Return the manifest's limits, lowered where requested, by the names that sessions use."""
    narrowed: dict[str, float] = {}
    for name, theirs in _LIMITS.items():
        most, wanted = getattr(manifest, name), getattr(asked, name)
        if most and wanted > most:
            raise field_error(f"limits.{name}", f"be in [0, {most}], the manifest's limit", wanted)
        narrowed[theirs] = wanted or most
    return narrowed
