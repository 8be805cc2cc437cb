"""Requests and results of hidden tests for clients. See `SandboxService.RunTests`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from rollmesh.v1 import sandbox_pb2


class TestOutcome(IntEnum):
    """The outcome of one test. Numbers equal `rollmesh.v1.TestOutcome`."""

    AC = 1
    WA = 2
    RE = 3
    TLE = 4
    MLE = 5
    OLE = 6
    PE = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedTest:
    """One test; the fields are those of `rollmesh.v1.TestVerdict`."""

    name: str
    outcome: TestOutcome
    message: str = ""
    wall_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TestReport:
    """A result; the fields are those of `rollmesh.v1.RunTestsResponse`."""

    verdicts: tuple[JudgedTest, ...]
    num_tests: int
    num_accepted: int
    accepted_share: float

    @property
    def accepted(self) -> bool:
        """Whether every test was accepted."""
        return self.num_accepted == self.num_tests > 0


def tests_request(
    files: Mapping[str, bytes],
    *,
    oracle_ref: str,
    manifest: str,
    limits: Mapping[str, float] | None,
    owner: str,
    budget_s: float,
) -> sandbox_pb2.RunTestsRequest:
    """Return the request. `limits` has the field names of `rollmesh.v1.SandboxLimits`."""
    request = sandbox_pb2.RunTestsRequest(oracle_ref=oracle_ref, manifest=manifest, owner=owner, budget_s=budget_s)
    for name, value in (limits or {}).items():
        setattr(request.limits, name, value)
    for path, content in files.items():
        request.files.add(path=path, content=content)
    return request


def read_report(response: sandbox_pb2.RunTestsResponse) -> TestReport:
    """Return the report of a response. An unknown verdict counts as a runtime error, because it is not acceptance."""
    verdicts = tuple(
        JudgedTest(
            name=verdict.name,
            outcome=_outcome(verdict.outcome),
            message=verdict.message,
            wall_s=verdict.wall_s,
        )
        for verdict in response.verdicts
    )
    return TestReport(
        verdicts=verdicts,
        num_tests=response.num_tests,
        num_accepted=response.num_accepted,
        accepted_share=response.accepted_share,
    )


def _outcome(number: int) -> TestOutcome:
    return TestOutcome(number) if number in set(TestOutcome) else TestOutcome.RE
