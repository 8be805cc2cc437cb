"""Patches on a repository's tree, and its tests before and after: two sessions of a profile that names a repository.

    base     fresh session -> hidden test files written -> each test alone
    patched  fresh session -> patch applied -> hidden test files written over it -> each test alone

A patch that brings its own version of a hidden test file loses it: the files are written last. FAIL_TO_PASS are the tests that failed
before and pass after, PASS_TO_PASS those that passed and still do.

What a verdict here is worth: in-tree tests import the candidate's code and run beside it, in one process. The commands that start
them, the patch tool and the files come from this side, and a test counts as passed only by the exit status of its own process; but code
that is imported by a test can end that process with status 0, or change the test framework first. No wall of the sandbox prevents that:
what must not be forged needs tests that talk to the candidate over a pipe, as the other kinds of oracle do. `passed`
is evidence against a patch that fails, not proof for one that wants to cheat.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rollmesh.sandbox_runtime.program import Program
from rollmesh.services.sandbox.engine import Outcome
from rollmesh.services.sandbox.sessions import Sessions
from rollmesh.shared.errors import InvalidInput, SandboxFailed

TEST = "{test}"
"""Stands for a test's name in `TestPlan.command`."""

_PATCH = ".rollmesh.patch"
_MESSAGE_CHARS = 2000
_APPLY = """
def _rollmesh(directory, patch, limit_s):
    import os, shutil, subprocess
    tool = ["git", "apply", "--whitespace=nowarn", patch] if shutil.which("git") else ["patch", "-p1", "-s", "-i", patch]
    done = subprocess.run(tool, cwd=directory, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s)
    os.unlink(patch)
    return {"status": done.returncode, "text": (done.stdout + done.stderr).decode("utf-8", "replace")}
"""
_TEST = """
def _rollmesh(directory, command, limit_s):
    import os, signal, subprocess
    process = subprocess.Popen(
        command, cwd=directory, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True)
    try:
        return {"status": process.wait(limit_s), "text": ""}
    except subprocess.TimeoutExpired:
        return {"status": -1, "text": "out of time"}
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchResult:
    """Whether a patch applied, and what the tool said."""

    applied: bool
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TestPlan:
    """How the tests of a repository are run."""

    __test__ = False

    profile: str
    """A profile with a repository."""
    directory: str
    """The repository's name in that profile."""
    tests: Sequence[str]
    """Their names, each unique."""
    command: Sequence[str] = ("python3", "-B", "-m", "unittest", TEST)
    """Runs one test in the repository's directory; exit status 0 means that it passed."""
    test_files: Mapping[str, bytes]
    """Hidden test files by path within the repository, written over whatever lies there."""
    test_s: float
    """Wall seconds of one test."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The same tests on both trees, by name: whether each passed. Nothing is in `patched` if the patch did not apply."""

    patch: PatchResult
    base: Mapping[str, bool]
    patched: Mapping[str, bool]

    @property
    def fail_to_pass(self) -> tuple[str, ...]:
        return tuple(name for name, passed in self.base.items() if not passed and self.patched.get(name, False))

    @property
    def pass_to_pass(self) -> tuple[str, ...]:
        return tuple(name for name, passed in self.base.items() if passed and self.patched.get(name, False))

    @property
    def broken(self) -> tuple[str, ...]:
        """Passed before and do not any more."""
        return tuple(name for name, passed in self.base.items() if passed and not self.patched.get(name, False))


async def apply_patch(
    sessions: Sessions, session_id: str, directory: str, patch: bytes, *, wall_s: float
) -> PatchResult:
    """Apply a unified diff (with a/ and b/ prefixes) inside the session: all of it or nothing, by git where the host has it."""
    await sessions.put_files(session_id, {_PATCH: patch})
    arguments = [f"/session/{directory}", f"/session/{_PATCH}", wall_s]
    status, text = await _ran(sessions, session_id, _APPLY, arguments, wall_s)
    return PatchResult(applied=status == 0, message=text[:_MESSAGE_CHARS])


async def run_tests(
    sessions: Sessions, plan: TestPlan, *, session_id: str, owner: str, patch: bytes | None = None
) -> tuple[PatchResult, dict[str, bool]]:
    """All tests on one tree, in a session of its own. None if the patch does not apply. Raises as `Sessions.open` and `run` do."""
    async with _opened(sessions, plan.profile, session_id, owner):
        done = PatchResult(applied=True, message="")
        if patch is not None:
            done = await apply_patch(sessions, session_id, plan.directory, patch, wall_s=plan.test_s)
        if not done.applied:
            return done, {}
        await sessions.put_files(
            session_id, {f"{plan.directory}/{path}": data for path, data in plan.test_files.items()}
        )
        return done, {name: await _passed(sessions, session_id, plan, name) for name in plan.tests}


async def compare(sessions: Sessions, plan: TestPlan, patch: bytes, *, session_id: str, owner: str) -> Comparison:
    """The tests on the base and on the patched tree, one after the other."""
    _, base = await run_tests(sessions, plan, session_id=f"{session_id}.base", owner=owner)
    done, patched = await run_tests(sessions, plan, session_id=f"{session_id}.patched", owner=owner, patch=patch)
    return Comparison(patch=done, base=base, patched=patched)


async def _passed(sessions: Sessions, session_id: str, plan: TestPlan, test: str) -> bool:
    command = [part.replace(TEST, test) for part in plan.command]
    arguments = [f"/session/{plan.directory}", command, plan.test_s]
    status, _ = await _ran(sessions, session_id, _TEST, arguments, plan.test_s)
    return status == 0


async def _ran(
    sessions: Sessions, session_id: str, helper: str, arguments: Sequence[object], limit_s: float
) -> tuple[int, str]:
    """Exit status and output of a program that the session's interpreter starts, which itself runs none of the candidate's code."""
    code = f"{helper}\nimport json\nprint(json.dumps(_rollmesh(*json.loads({json.dumps(arguments)!r}))))"
    result = await sessions.run(session_id, Program(code=code), 0)
    if not result.session_alive:
        raise SandboxFailed(f"the session of a test ended: {result.error_message}", session=session_id)
    if result.outcome is not Outcome.OK:
        return -1, f"{result.error_type}: {result.error_message}"
    try:
        answer = json.loads(result.stdout.splitlines()[-1])
        return int(answer["status"]), str(answer["text"])
    except (ValueError, LookupError, TypeError) as error:
        raise InvalidInput(f"the session's answer is none of the helper's: {error}", session=session_id) from error


@asynccontextmanager
async def _opened(sessions: Sessions, profile: str, session_id: str, owner: str) -> AsyncIterator[None]:
    await sessions.open(session_id, profile=profile, limits={}, ttl_s=0, owner=owner)
    try:
        yield
    finally:
        await sessions.close(session_id)
