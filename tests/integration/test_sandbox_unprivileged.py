"""The guarantees that depend on another mechanism without root, tested again as an ordinary user, where the jail uses
user namespaces."""

from __future__ import annotations

import os
import re
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest

UID = 12345
CLAIMS = (
    "sockets or abstract or host_paths or written or remounted or each_other or inherits or privileges"
    " or memory_bomb or fork_bomb or endless or disk or distinguished or process_group"
)
LANGUAGES = "bash_keeps or has_a_terminal or out_of_time or exit_ends or reads_stdin or distinguished or asked_for"
SNAPSHOTS = "keep_living or files_directories or same_bounds or runs_commands or hostile or restore_undoes"
SUITES = {
    "test_sandbox_isolation.py": CLAIMS,
    "test_sandbox_languages.py": LANGUAGES,
    "test_sandbox_snapshots.py": SNAPSHOTS,
    "test_sandbox_repository.py": "to_themselves or both_trees or only_inside or own_version",
}
WHOLE = (
    "conformance/test_sandbox_engine.py",
    "integration/test_landlock.py",
    "integration/test_sandbox_drivers.py",
    "integration/test_sandbox_isolation.py",
    "integration/test_sandbox_networks.py",
    "integration/test_sandbox_pools.py",
    "integration/test_sandbox_pools_making.py",
    "verdicts/test_verdicts.py",
)
HERE = Path(__file__).parent
ROOTS = ("protos", "shared", "services", "app", "trainer", "sandbox_runtime")


def readable_python() -> str | None:
    """Return an interpreter of the same minor version that any user can execute; root's own may be in an inaccessible
    home."""
    name = f"python3.{sys.version_info.minor}"
    for candidate in (f"/usr/bin/{name}", f"/usr/local/bin/{name}", sys.executable):
        path = Path(candidate).resolve()
        if path.exists() and all(folder.stat().st_mode & 0o001 for folder in path.parents):
            return candidate
    return None


needs_a_way_down = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="already an ordinary user, or no setpriv"
)


@pytest.mark.parametrize("suite", SUITES)
def test_each_word_selects_a_test(suite: str) -> None:
    names = re.findall(r"^(?:async )?def (test_\w+)", (HERE / suite).read_text(), re.MULTILINE)
    assert [word for word in SUITES[suite].split(" or ") if not any(word in name for name in names)] == []


@pytest.mark.row("S001")
@needs_a_way_down
@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES)
def test_isolation_holds_for_an_ordinary_user(suite: str) -> None:
    run_as_ordinary_user(HERE / suite, "-k", SUITES[suite], timeout_s=110)


@pytest.mark.slow
@pytest.mark.timeout(900)
@needs_a_way_down
@pytest.mark.parametrize("suite", WHOLE)
def test_whole_suite_holds_for_an_ordinary_user(suite: str) -> None:
    run_as_ordinary_user(HERE.parent / suite, timeout_s=840)


def run_as_ordinary_user(suite: Path, *options: str, timeout_s: float) -> None:
    """Run pytest again in a process that has dropped root."""
    python = readable_python()
    if python is None:
        pytest.skip("no interpreter that another user may execute")
    folder = Path("/tmp") / f"rollmesh-unprivileged-{os.getpid()}"
    folder.mkdir()
    os.chown(folder, UID, UID)
    paths = [str(HERE.parents[1] / root) for root in ROOTS] + site.getsitepackages()
    try:
        done = subprocess.run(
            ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", python, "-m", "pytest", "-q", str(suite),
             "-p", "no:cacheprovider", f"--basetemp={folder / 'base'}", *options],
            env={"PYTHONPATH": os.pathsep.join(paths), "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"},
            cwd=HERE.parents[1], capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
    finally:
        shutil.rmtree(folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
