"""A repository at a commit in real jails: what sessions see of it, patches, tests before and after, and the environment's digest."""

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
from rollmesh.services.sandbox import repository
from rollmesh.services.sandbox.config import ProfileConfig, SandboxConfig
from rollmesh.services.sandbox.engine import Outcome
from rollmesh.services.sandbox.environments import environment_digest
from rollmesh.services.sandbox.node import SandboxCore
from rollmesh.services.sandbox.repository_config import RepositoryConfig
from rollmesh.services.sandbox.sessions import Sessions
from rollmesh.shared.clock import SystemClock
from rollmesh.shared.errors import SandboxFailed
from rollmesh.shared.ids import RandomIds

BUGGY = "def add(a, b):\n    return a - b\n\ndef same(a):\n    return a\n"
FIXED = BUGGY.replace("a - b", "a + b")
TESTS = """import unittest
from calc import add, same
class T(unittest.TestCase):
    def test_add(self): self.assertEqual(add(2, 3), 5)
    def test_same(self): self.assertEqual(same(4), 4)
    def test_wild(self): self.assertEqual(add(1, 1), 7)
"""
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
    assert result.outcome is Outcome.OK, result
    return result.result


async def open_session(sessions: Sessions, session_id: str = "s") -> None:
    await sessions.open(session_id, profile="repo", limits={}, ttl_s=0, owner="test")


def plan(**changes: object) -> repository.TestPlan:
    fields: dict[str, object] = {"tests": (ADD, SAME, WILD), "test_files": {"test_calc.py": TESTS.encode()}} | changes
    return repository.TestPlan(profile="repo", directory="repo", test_s=8.0, **fields)  # type: ignore[arg-type]


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


async def test_repository_larger_than_the_disk_is_told_with_the_remedy(
    tmp_path: Path, history: tuple[Path, str, bytes]
) -> None:
    path, commit, _ = history
    async with node(tmp_path / "state", path, commit, disk_bytes=4096) as sessions:
        with pytest.raises(SandboxFailed, match="disk_bytes 4096; raise it"):
            await open_session(sessions)


async def test_fork_of_a_session_has_its_changed_tree(tmp_path: Path, history: tuple[Path, str, bytes]) -> None:
    path, commit, patch = history
    profile = ProfileConfig(repository=RepositoryConfig(path=str(path), commit=commit, name="repo"))
    config = SandboxConfig(profiles={"repo": profile})
    async with SandboxCore(config, state_dir=tmp_path / "s", clock=SystemClock(), ids=RandomIds()) as core:
        await open_session(core.sessions)
        assert (await repository.apply_patch(core.sessions, "s", "repo", patch, wall_s=5)).applied
        await ran(core.sessions, "import os\nos.unlink('repo/link')")
        saved = await core.branches.snapshot("s", ttl_s=0)
        await core.branches.fork("fork", saved.snapshot_id, ttl_s=0, owner="test")
        code = "import os\nopen('repo/calc.py').read(), os.path.lexists('repo/link')"
        assert await ran(core.sessions, code, "fork") == repr((FIXED, False))


async def test_patch_applies_whole_or_not_at_all_and_only_inside(
    tmp_path: Path, history: tuple[Path, str, bytes]
) -> None:
    path, commit, patch = history
    outside = b"--- /dev/null\n+++ b/../escaped\n@@ -0,0 +1 @@\n+x\n"
    async with node(tmp_path / "state", path, commit) as sessions:
        await open_session(sessions)
        for wrong in (b"junk", patch.replace(b"a - b", b"a * b"), outside):
            refused = await repository.apply_patch(sessions, "s", "repo", wrong, wall_s=5)
            assert not refused.applied
            assert refused.message
        assert (await repository.apply_patch(sessions, "s", "repo", patch, wall_s=5)).applied
        assert await ran(sessions, "import os\nopen('repo/calc.py').read(), os.listdir('.')") == repr((FIXED, ["repo"]))


async def test_tests_on_base_and_patched_tree(tmp_path: Path, history: tuple[Path, str, bytes]) -> None:
    path, commit, patch = history
    overwriting = b"--- /dev/null\n+++ b/test_calc.py\n@@ -0,0 +1 @@\n+raise SystemExit(0)\n"
    async with node(tmp_path / "state", path, commit) as sessions:
        good = await repository.compare(sessions, plan(), patch, session_id="good", owner="t")
        assert (good.fail_to_pass, good.pass_to_pass, good.broken) == ((ADD,), (SAME,), ())
        cheat = await repository.compare(sessions, plan(), overwriting, session_id="cheat", owner="t")
        assert cheat.patch.applied
        assert (cheat.fail_to_pass, cheat.pass_to_pass) == ((), (SAME,))
        wrong = await repository.compare(sessions, plan(tests=(SAME,)), b"junk", session_id="wrong", owner="t")
        assert (wrong.patch.applied, wrong.patched, wrong.broken) == (False, {}, (SAME,))
        assert sessions.counts().live == 0


async def test_test_that_never_ends_is_a_failed_one(tmp_path: Path, history: tuple[Path, str, bytes]) -> None:
    path, commit, _ = history
    endless = b"import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        while True: pass\n"
    endless_plan = repository.TestPlan(
        profile="repo",
        directory="repo",
        tests=("test_endless.T.test",),
        test_files={"test_endless.py": endless},
        test_s=1.0,
    )
    async with node(tmp_path / "state", path, commit) as sessions:
        _, passed = await repository.run_tests(sessions, endless_plan, session_id="s", owner="t")
        assert passed == {"test_endless.T.test": False}


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
    assert locked in made, "the lock stands for the libraries' content"
