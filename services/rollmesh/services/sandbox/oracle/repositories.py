"""Judge patches: apply the candidate's patch to a repository's tree and run the tests of that tree one by one.

    fresh session -> patch applied -> hidden test files written over it -> each test in a separate process

The hidden test files are written last, so a patch cannot replace them. FAIL_TO_PASS are the tests that fail with an
empty patch, and PASS_TO_PASS those that pass with it.

Limits of these verdicts: in-tree tests import the candidate's code and run in the same process. The service provides
the commands that start them, the patch tool and the files, and a test passes only by the exit status of its
process. But code that a test imports can end that process with status 0, or change the test framework first. No
isolation mechanism of the sandbox prevents that. Verdicts that must not be forged need tests that use the candidate
over a pipe, as the other kinds do. A pass is evidence about an honest patch, and not proof about a cheating one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rollmesh.sandbox_runtime.program import Program
from rollmesh.services.sandbox.engine import RunResult
from rollmesh.services.sandbox.oracle.candidate import Candidate, Prepare
from rollmesh.services.sandbox.oracle.judging_session import JudgingSession
from rollmesh.services.sandbox.oracle.manifest import TEST, RepositoryManifest, RepositoryTest
from rollmesh.services.sandbox.oracle.verdict import CandidateFailed, JudgeVerdict, require_ok
from rollmesh.shared.errors import InvalidInput

_APPLY = """
def _rollmesh(directory, patch):
    import os, shutil, subprocess
    patch = os.path.abspath(patch)
    if not open(patch, "rb").read().strip():
        return {"status": 0, "text": ""}
    tool = ["git", "apply", "--whitespace=nowarn", patch] if shutil.which("git") else ["patch", "-p1", "-s", "-i", patch]
    done = subprocess.run(tool, cwd=directory, stdin=subprocess.DEVNULL, capture_output=True)
    return {"status": done.returncode, "text": (done.stdout + done.stderr).decode("utf-8", "replace")[:2000]}
"""  # noqa: E501
_TEST = """
def _rollmesh(directory, command):
    import os, signal, subprocess
    process = subprocess.Popen(
        command, cwd=directory, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True)
    try:
        return {"status": process.wait(), "text": ""}
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
"""
"""The session's interpreter runs both helpers and none of the candidate's code; its time limit ends them."""


def patching(manifest: RepositoryManifest, directory: str) -> Prepare:
    """Return a `Prepare` that applies the candidate's patch, completely or not at all, with git if the host has it, and
    then writes the hidden files."""
    hidden = {f"{directory}/{path}": text.encode() for path, text in manifest.files.items()}

    async def patch(session: JudgingSession) -> None:
        status, text = _decode(require_ok(await session.run(_program(_APPLY, directory, manifest.entry))))
        if status != 0:
            raise CandidateFailed(JudgeVerdict.RE, f"the patch does not apply: {text}")
        try:
            await session.put(hidden)
        except InvalidInput as error:  # a link or a directory at their path, or a full disk
            raise CandidateFailed(
                JudgeVerdict.RE, f"cannot write the hidden test files into the patched tree: {error}"
            ) from None

    return patch


async def try_repository(
    manifest: RepositoryManifest, test: RepositoryTest, candidate: Candidate, directory: str
) -> None:
    """Run one test on the patched tree."""
    command = [part.replace(TEST, test.name) for part in manifest.command]
    status, text = _decode(await candidate.run(_program(_TEST, directory, command)))
    if status != 0:
        how = f"signal {-status}" if status < 0 else f"status {status}"
        raise CandidateFailed(JudgeVerdict.WA, text or f"the test ended with {how}")


def _program(helper: str, *arguments: str | Sequence[str]) -> Program:
    return Program(code=f"{helper}\nimport json\nprint(json.dumps(_rollmesh(*json.loads({json.dumps(arguments)!r}))))")


def _decode(result: RunResult) -> tuple[int, str]:
    """Decode the exit status and text of a helper. Raises `CandidateFailed` for anything else."""
    try:
        answer: Any = json.loads(result.stdout.splitlines()[-1])
        return int(answer["status"]), str(answer["text"])
    except (ValueError, LookupError, TypeError):
        raise CandidateFailed(JudgeVerdict.RE, "the session's protocol was broken") from None
