"""A repository at a commit in real jails: its files in sessions, patches judged by its tests, and the environment's
digest."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollmesh.sandbox_runtime.program import Program
from rollmesh.services.sandbox.config import ProfileConfig, RepositoryConfig, SandboxConfig
from rollmesh.services.sandbox.engine import RunOutcome
from rollmesh.services.sandbox.environments import environment_digest
from rollmesh.services.sandbox.node import SandboxCore
from rollmesh.services.sandbox.oracle.judge import Judge
from rollmesh.services.sandbox.oracle.manifest import ManifestError, RepositoryManifest, manifest_of
from rollmesh.services.sandbox.oracle.verdict import JudgeVerdict
from rollmesh.services.sandbox.sessions import Sessions
from rollmesh.shared.clock import SystemClock
from rollmesh.shared.domain.ids import RandomIds
from rollmesh.shared.errors import SandboxFailed, UnknownProfile

BUGGY = "def add(a, b):\n    return a - b\n\ndef same(a):\n    return a\n"
FIXED = BUGGY.replace("a - b", "a + b")
TESTS = """import unittest
from calc import add, same
class T(unittest.TestCase):
    def test_add(self): self.assertEqual(add(2, 3), 5)
    def test_same(self): self.assertEqual(same(4), 4)
    def test_wild(self): self.assertEqual(add(1, 1), 7)
"""
NAMED = RepositoryConfig(path="/elsewhere", commit="0" * 40, name="repo")
AC, WA, RE = JudgeVerdict.AC, JudgeVerdict.WA, JudgeVerdict.RE
ADD, SAME, WILD = (f"test_calc.T.{name}" for name in ("test_add", "test_same", "test_wild"))


def git(path: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", "-C", str(path), *identity, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def history(tmp_path: Path) -> tuple[Path, str, bytes]:
    """A repository, its buggy commit, and the later fix as a patch."""
    path = tmp_path / "upstream"
    path.mkdir()
    git(path, "init", "-q", "-b", "main")
    (path / "calc.py").write_text(BUGGY)
    (path / "run.sh").write_text("#!/bin/sh\n")
    (path / "run.sh").chmod(0o755)
    (path / ".gitattributes").write_text("secret.txt export-ignore\n")
    (path / "secret.txt").write_text("kept\n")
    (path / "link").symlink_to("calc.py")
    git(path, "add", "-A")
    git(path, "commit", "-q", "-m", "base")
    commit = git(path, "rev-parse", "HEAD")
    (path / "calc.py").write_text(FIXED)
    git(path, "commit", "-q", "-a", "-m", "fix")
    return path, commit, git(path, "diff", commit, "HEAD").encode() + b"\n"


@asynccontextmanager
async def node(state_dir: Path, path: Path, commit: str, **limits: float) -> AsyncIterator[Sessions]:
    profile = ProfileConfig(repository=RepositoryConfig(path=str(path), commit=commit, name="repo"), limits=limits)
    config = SandboxConfig(profiles={"repo": profile})
    async with SandboxCore(config, state_dir=state_dir, clock=SystemClock(), ids=RandomIds()) as core:
        yield core.sessions


async def ran(sessions: Sessions, code: str, session_id: str = "s") -> str:
    result = await sessions.run(session_id, Program(code=code), 0)
    assert result.outcome is RunOutcome.OK, result
    return result.result


async def open_session(sessions: Sessions, session_id: str = "s") -> None:
    await sessions.open(session_id, profile="repo", limits={}, ttl_s=0, owner="test")


def manifest(**changes: object) -> RepositoryManifest:
    tests = [{"name": name} for name in (ADD, SAME, WILD)]
    fields = {"kind": "repository", "profile": "repo", "files": {"test_calc.py": TESTS}, "tests": tests} | changes
    made = manifest_of(fields)
    assert isinstance(made, RepositoryManifest)
    return made


async def verdicts(
    sessions: Sessions, patch: bytes, wanted: RepositoryManifest | None = None, profile: ProfileConfig | None = None
) -> dict[str, JudgeVerdict]:
    config = SandboxConfig(profiles={"repo": profile or ProfileConfig(repository=NAMED)})
    judge = Judge(sessions, config, clock=SystemClock(), ids=RandomIds())
    report = await judge.judge(wanted or manifest(), {"solution.patch": patch})
    assert all(judged.message for judged in report.verdicts if judged.verdict is not JudgeVerdict.AC)
    assert sessions.counts().live == 0
    return {judged.name: judged.verdict for judged in report.verdicts}


async def test_sessions_have_the_commits_files_to_themselves_and_no_history(
    tmp_path: Path, history: tuple[Path, str, bytes]
) -> None:
    path, commit, _ = history
    async with node(tmp_path / "state", path, commit) as sessions:
        for name in ("s", "other"):
            await open_session(sessions, name)
        listing = "import os\nsorted(os.listdir('repo')), os.readlink('repo/link'), oct(os.stat('repo/run.sh').st_mode)"
        expected = "(['.gitattributes', 'calc.py', 'link', 'run.sh', 'secret.txt'], 'calc.py', '0o100755')"
        assert await ran(sessions, listing) == expected
        await ran(sessions, "open('repo/calc.py', 'w').write('')\nos.unlink('repo/run.sh')")
        assert await ran(sessions, listing, "other") == expected
        assert await ran(sessions, "open('repo/calc.py').read()", "other") == repr(BUGGY)
    assert len(os.listdir(tmp_path / "state" / "repositories")) == 1
    async with node(tmp_path / "state", tmp_path / "gone", commit) as sessions:
        await open_session(sessions)
        assert await ran(sessions, "open('repo/calc.py').read()") == repr(BUGGY), "from the image of the earlier life"


async def test_bare_repository_serves_and_an_unknown_commit_says_so(
    tmp_path: Path, history: tuple[Path, str, bytes]
) -> None:
    path, commit, _ = history
    git(path, "clone", "-q", "--bare", str(path), str(tmp_path / "bare.git"))
    async with node(tmp_path / "a", tmp_path / "bare.git", commit) as sessions:
        await open_session(sessions)
        assert await ran(sessions, "open('repo/calc.py').read()") == repr(BUGGY)
    async with node(tmp_path / "b", path, "0" * 40) as sessions:
        with pytest.raises(SandboxFailed, match="000000000000: fatal"):
            await open_session(sessions)
        assert sessions.counts().live == 0


async def test_repository_larger_than_the_disk_is_an_error_with_its_remedy(
    tmp_path: Path, history: tuple[Path, str, bytes]
) -> None:
    path, commit, _ = history
    async with node(tmp_path / "state", path, commit, disk_bytes=4096) as sessions:
        with pytest.raises(SandboxFailed, match="disk_bytes 4096; raise it"):
            await open_session(sessions)


async def test_fork_of_a_session_has_its_changed_tree(tmp_path: Path, history: tuple[Path, str, bytes]) -> None:
    path, commit, _ = history
    profile = ProfileConfig(repository=RepositoryConfig(path=str(path), commit=commit, name="repo"))
    config = SandboxConfig(profiles={"repo": profile})
    async with SandboxCore(config, state_dir=tmp_path / "s", clock=SystemClock(), ids=RandomIds()) as core:
        await open_session(core.sessions)
        await ran(core.sessions, f"import os\nos.unlink('repo/link')\nopen('repo/calc.py', 'w').write({FIXED!r})")
        saved = await core.branches.snapshot("s", ttl_s=0)
        await core.branches.fork("fork", saved.snapshot_id, ttl_s=0, owner="test")
        code = "import os\nopen('repo/calc.py').read(), os.path.lexists('repo/link')"
        assert await ran(core.sessions, code, "fork") == repr((FIXED, False))


async def test_patch_is_judged_by_tests_on_both_trees(tmp_path: Path, history: tuple[Path, str, bytes]) -> None:
    path, commit, patch = history
    async with node(tmp_path / "state", path, commit) as sessions:
        for base in (b"", b"\n"):
            assert await verdicts(sessions, base) == {ADD: WA, SAME: AC, WILD: WA}, (
                "an empty patch leaves the tree as it is"
            )
        assert await verdicts(sessions, patch) == {ADD: AC, SAME: AC, WILD: WA}
        assert await verdicts(sessions, patch, manifest(isolate=False)) == {ADD: AC, SAME: AC, WILD: WA}


async def test_patch_applies_whole_or_not_at_all_and_only_inside(
    tmp_path: Path, history: tuple[Path, str, bytes]
) -> None:
    path, commit, patch = history
    outside = b"--- /dev/null\n+++ b/../escaped\n@@ -0,0 +1 @@\n+x\n"
    async with node(tmp_path / "state", path, commit) as sessions:
        for wrong in (b"junk", patch.replace(b"a - b", b"a * b"), outside, patch + outside, b"\xff"):
            assert await verdicts(sessions, wrong) == {ADD: RE, SAME: RE, WILD: RE}


@pytest.mark.parametrize("mode", [b"", b"new file mode 120000\n"], ids=["regular file", "behind a link"])
async def test_patch_cannot_bring_its_own_version_of_a_hidden_test(
    tmp_path: Path, history: tuple[Path, str, bytes], mode: bytes
) -> None:
    path, commit, _ = history
    content = b"raise SystemExit(0)" if not mode else b"/dev/null"
    patch = (
        b"diff --git a/test_calc.py b/test_calc.py\n" + (mode or b"new file mode 100644\n")
        + b"--- /dev/null\n+++ b/test_calc.py\n@@ -0,0 +1 @@\n+" + content + b"\n\\ No newline at end of file\n"
    )  # fmt: skip
    async with node(tmp_path / "state", path, commit) as sessions:
        got = await verdicts(sessions, patch)
    assert got == ({ADD: RE, SAME: RE, WILD: RE} if mode else {ADD: WA, SAME: AC, WILD: WA})


async def test_test_that_never_ends_is_out_of_time(tmp_path: Path, history: tuple[Path, str, bytes]) -> None:
    path, commit, _ = history
    endless = "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        while True: pass\n"
    wanted = manifest(files={"test_endless.py": endless}, tests=[{"name": "test_endless.T.test"}], limits={"wall_s": 1})
    async with node(tmp_path / "state", path, commit) as sessions:
        assert await verdicts(sessions, b"", wanted) == {"test_endless.T.test": JudgeVerdict.TLE}


async def test_profile_without_repository_is_an_error(tmp_path: Path, history: tuple[Path, str, bytes]) -> None:
    path, commit, patch = history
    async with node(tmp_path / "state", path, commit) as sessions:
        with pytest.raises(UnknownProfile, match="has no repository on this node"):
            await verdicts(sessions, patch, profile=ProfileConfig())


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"files": {"../x": ""}}, "relative paths"),
        ({"files": {"/x": ""}}, "relative paths"),
        ({"tests": [{"weight": 2}]}, r"tests\[0\].name must be given"),
        ({"command": ["make"]}, "must have {test} in it"),
        ({"profile": None}, "profile"),
    ],
)
def test_manifest_that_makes_no_sense_names_the_field(changes: dict[str, object], cause: str) -> None:
    with pytest.raises(ManifestError, match=cause):
        manifest(**changes)


# Environments ---------------------------------------------------------------------------------------------------------


def test_digest_changes_with_everything_that_makes_the_environment(tmp_path: Path) -> None:
    library, lock = tmp_path / "library", tmp_path / "lock"
    library.mkdir()
    (library / "a.py").write_text("x = 1")
    lock.write_text("a==1")
    base: dict[str, Any] = {"preload": ("json",), "library_paths": (str(library),)}
    made = {environment_digest(ProfileConfig(**base))}
    assert environment_digest(ProfileConfig(**base)) in made
    commit = RepositoryConfig(path="/a", commit="0" * 40)
    variants: list[dict[str, Any]] = [
        {"preload": ("math",)},
        {"prelude": "x = 1"},
        {"limits": {"call_s": 1.0}},
        {"tools": ("rollmesh.sandbox_runtime.tools.calc",)},
        {"library_lock": str(lock)},
        {"repository": commit},
        {"repository": msgspec.structs.replace(commit, commit="1" * 40)},
    ]
    for number, changes in enumerate(variants):
        made.add(environment_digest(ProfileConfig(**(base | changes))))
        assert len(made) == number + 2, changes
    moved = msgspec.structs.replace(commit, path="/b")
    assert environment_digest(ProfileConfig(**base, repository=moved)) in made
    (library / "a.py").write_text("x = 2")
    assert environment_digest(ProfileConfig(**base)) not in made
    locked = environment_digest(ProfileConfig(**base, library_lock=str(lock)))
    assert locked in made, "the lock represents the libraries' content"
