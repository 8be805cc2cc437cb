"""Hidden tests that call the candidate: this module relays requests of the oracle's session to the candidate's session.

Both sessions end with the test. The test's source and verdict never leave the oracle's session and this process. The
candidate gets only the arguments of its calls.
"""

from __future__ import annotations

from typing import Any

from rollmesh.sandbox_runtime.program import Program
from rollmesh.services.sandbox.engine import RunOutcome
from rollmesh.services.sandbox.oracle.candidate import Candidate, OpenSession
from rollmesh.services.sandbox.oracle.compare import strict_json
from rollmesh.services.sandbox.oracle.judging_session import JudgingSession
from rollmesh.services.sandbox.oracle.manifest import UnitManifest, UnitTest
from rollmesh.services.sandbox.oracle.trials import read_answer
from rollmesh.services.sandbox.oracle.verdict import CandidateFailed, JudgeVerdict
from rollmesh.shared.errors import BrokenOracle

_PRELUDE = "from rollmesh.sandbox_runtime.judging.unit import more, resume, start"
_VERBS = ("look_up", "invoke", "contents", "names")


async def try_unit(
    manifest: UnitManifest, test: UnitTest, candidate: Candidate, open_oracle: OpenSession, wall_s: float
) -> None:
    """Run one test to its end. `wall_s` bounds the total time of the candidate. A failed test is charged to its budget
    with the time of the test's own code, because the candidate's answers may make that slow."""
    async with open_oracle() as session:
        try:
            await _run_test(manifest, test, candidate, session, wall_s)
        except CandidateFailed:
            candidate.budget.spent_s += session.spent_s
            raise


async def _run_test(
    manifest: UnitManifest, test: UnitTest, candidate: Candidate, session: JudgingSession, wall_s: float
) -> None:
    result = await session.run(Program(code=_PRELUDE))
    session.spent_s = 0.0
    if result.outcome is not RunOutcome.OK:
        raise BrokenOracle(f"the tests' session is not usable: {result.error_type}: {result.error_message}")
    objects = "yes" if manifest.objects else "no"
    message = await _exchange(session, "start", manifest.source, test.name, manifest.module, objects)
    for _ in range(manifest.requests_max):
        if "ask" not in message:
            _conclude(message)
            return
        reply = await _answer(candidate, *message["ask"])
        if candidate.spent_s > wall_s:
            raise CandidateFailed(JudgeVerdict.TLE, f"the candidate took more than {wall_s} s in total")
        if session.spent_s > candidate.budget.total_s:
            raise CandidateFailed(JudgeVerdict.TLE, "the hidden test took too long on the candidate's answers")
        message = await _exchange(session, "resume", reply)
    raise CandidateFailed(JudgeVerdict.RE, f"the test used the candidate more than {manifest.requests_max} times")


async def _answer(candidate: Candidate, verb: str, question: str) -> str:
    assert verb in _VERBS, verb
    result = await candidate.ask(verb, question)
    read_answer(result)
    return result.result


async def _exchange(session: JudgingSession, function: str, *arguments: str) -> dict[str, Any]:
    """Return the next message of the tests' session. It contains no code of the candidate, but the candidate's answer
    may be too large for it."""
    pieces: list[str] = []
    message = await _reply(session, function, *arguments)
    while "piece" in message:
        pieces.append(message["piece"])
        if message["last"]:
            whole: dict[str, Any] = strict_json("".join(pieces))
            return whole
        message = await _reply(session, "more")
    return message


async def _reply(session: JudgingSession, function: str, *arguments: str) -> dict[str, Any]:
    result = await session.call(function, *arguments)
    if result.outcome is not RunOutcome.OK:
        raise CandidateFailed(JudgeVerdict.WA, f"the hidden test failed on the answer ({result.error_type})")
    try:
        message: dict[str, Any] = strict_json(result.result)
    except ValueError:
        raise CandidateFailed(JudgeVerdict.WA, "a message of the hidden test exceeds the size limit") from None
    return message


def _conclude(message: dict[str, Any]) -> None:
    if "broken" in message:
        raise BrokenOracle(f"the hidden tests are not usable: {message['broken']}; fix the manifest")
    verdict, text = message["end"]
    if JudgeVerdict[verdict] is not JudgeVerdict.AC:
        raise CandidateFailed(JudgeVerdict[verdict], text)
