"""Verdicts, and the mapping from outcomes of a candidate to verdicts.

A verdict describes what the candidate did. An error of a jail or of the node is a `MeshError` of the whole judgment and
never a verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from rollmesh.services.sandbox.engine import RunOutcome, RunResult

MESSAGE_CHARS_MAX = 300


class JudgeVerdict(Enum):
    """Result of one test. Values are the numbers of `rollmesh.v1.TestOutcome`."""

    AC = 1
    """Accepted."""
    WA = 2
    """Wrong answer."""
    RE = 3
    """Raised, did not load or compile, or ended with a status other than 0."""
    TLE = 4
    """Out of wall or CPU time."""
    MLE = 5
    """Out of memory."""
    OLE = 6
    """The output or answer exceeds the limit."""
    PE = 7
    """The right answer with wrong white space."""


_BY_OUTCOME = {
    RunOutcome.TIME: JudgeVerdict.TLE,
    RunOutcome.MEMORY: JudgeVerdict.MLE,
    RunOutcome.OUTPUT: JudgeVerdict.OLE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenTestResult:
    """Verdict of one hidden test."""

    name: str
    verdict: JudgeVerdict
    message: str = ""
    """One line; never the expected answer."""
    wall_s: float = 0.0
    """Seconds that the candidate took, by the service's clock, because the candidate can forge the jail's time."""
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeReport:
    """The verdicts of the tests that ran, in the manifest's order."""

    verdicts: Sequence[HiddenTestResult]
    num_tests: int
    weight: float
    """Total weight of the manifest's tests."""

    @property
    def num_accepted(self) -> int:
        """Tests accepted."""
        return sum(verdict.verdict is JudgeVerdict.AC for verdict in self.verdicts)

    @property
    def accepted_share(self) -> float:
        """Accepted share of the total weight, 0 to 1; exactly 1 if and only if every test was accepted."""
        if self.num_accepted == self.num_tests:
            return 1.0
        return sum(verdict.weight for verdict in self.verdicts if verdict.verdict is JudgeVerdict.AC) / self.weight


class CandidateFailed(Exception):
    """The candidate failed a test. The judge catches it and records the verdict."""

    def __init__(self, verdict: JudgeVerdict, message: str) -> None:
        super().__init__(message)
        self.verdict = verdict
        self.message = one_line(message)


def failure_of(result: RunResult) -> CandidateFailed | None:
    """Return the failure that a result means; None if its outcome is OK."""
    if result.outcome is RunOutcome.OK:
        return None
    message = f"{result.error_type}: {result.error_message}".strip().removesuffix(":")
    return CandidateFailed(_BY_OUTCOME.get(result.outcome, JudgeVerdict.RE), message)


def require_ok(result: RunResult) -> RunResult:
    """Return the result if its outcome is OK. Raises `CandidateFailed` otherwise."""
    if (failed := failure_of(result)) is not None:
        raise failed
    return result


def one_line(text: str) -> str:
    """Convert to one printable line. A candidate's text may contain anything, including lone surrogates that protobuf
    rejects."""
    printable = "".join(char if char.isprintable() else " " for char in text[: 4 * MESSAGE_CHARS_MAX])
    return " ".join(printable.split())[:MESSAGE_CHARS_MAX]
