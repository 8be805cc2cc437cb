"""What the drivers without namespaces guarantee, in real sessions: `landlock` against attacks, and the clean-up of
both."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import textwrap
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rollmesh.sandbox_runtime import landlock, reaper
from rollmesh.sandbox_runtime.program import Program
from rollmesh.services.sandbox import capability_probe
from rollmesh.services.sandbox.config import PoolsConfig, ProfileConfig, SandboxConfig
from rollmesh.services.sandbox.describe import describe
from rollmesh.services.sandbox.engine import RunOutcome, RunResult
from rollmesh.services.sandbox.engines.cleanup import StateDir
from rollmesh.services.sandbox.engines.file_trees import remove_tree
from rollmesh.services.sandbox.engines.jail_engine import JailEngine
from rollmesh.services.sandbox.engines.private_folders import PrivateFolders
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.ids import SeededIds
from rollmesh.shared.errors import SandboxFailed

IS_ROOT = os.geteuid() == 0
pytestmark = pytest.mark.skipif(
    landlock.abi() < (1 if IS_ROOT else landlock.SCOPES_SINCE),
    reason="this kernel's Landlock does not carry the driver",
)

UID_BASE = 61050
NUM_UIDS = 100


def config_for(engine: str, folder: str = "") -> SandboxConfig:
    limits: dict[str, int | float] = {"processes_max": 12, "memory_bytes": 96 << 20}
    return SandboxConfig(
        engine=Extension(engine), profiles={"python": ProfileConfig(limits=limits)}, uid_base=UID_BASE, sessions_max=40,
        sessions_dir=folder, pools=PoolsConfig(ready_max=0), without=() if IS_ROOT or engine != "landlock" else ("pids cgroup",),
    )  # fmt: skip


async def started(driver: str, state_dir: Path) -> JailEngine:
    engine = JailEngine(config_for(driver), state_dir=state_dir, ids=SeededIds(os.getpid()))
    await engine.start()
    return engine


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[JailEngine]:
    made = await started("landlock", tmp_path)
    yield made
    await made.close()


async def run(engine: JailEngine, code: str, session_id: str = "s", wall_s: float = 5.0) -> RunResult:
    if session_id not in engine._live:
        await engine.open(session_id, "python", engine.limits("python"))
    return await engine.run(session_id, Program(code=textwrap.dedent(code)), wall_s)


def session_processes(engine: JailEngine) -> list[int]:
    """Return processes that are still in the sessions' directory."""
    assert engine._folders is not None
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            at = os.readlink(f"/proc/{entry}/cwd")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if at.startswith(engine._folders._root):
            found.append(int(entry))
    return found


@pytest.fixture
def open_file() -> Iterator[Path]:
    """Return a directory that every user of the host may read and write."""
    path = Path(f"/var/tmp/rollmesh-test-drivers-{os.getpid()}")
    path.write_text("the host's")
    path.chmod(0o666)
    yield path
    path.unlink()


def content(path: Path) -> str:
    return path.read_text()


@pytest.mark.parametrize("mode", ["r", "w", "a"])
async def test_host_files_open_to_everybody_are_closed_to_a_session(
    engine: JailEngine, open_file: Path, mode: str
) -> None:
    result = await run(engine, f"open({str(open_file)!r}, {mode!r})")
    assert (result.outcome, result.error_type) == (RunOutcome.ERROR, "PermissionError")
    assert content(open_file) == "the host's"


@pytest.mark.parametrize(
    "attempt",
    [
        "os.chmod({path!r}, 0)", "os.utime({path!r}, (0, 0))", "os.chown({path!r}, os.getuid(), os.getgid())",
        "__import__('resource').prlimit({pid}, 7, (20, 20))", "os.sched_setaffinity({pid}, {{0}})",
        "os.setpriority(os.PRIO_PROCESS, {pid}, 19)", "os.setpriority(os.PRIO_USER, 0, 19); raise OSError",
    ],
    ids=["mode", "times", "owner", "limits", "cores", "priority", "priority of all"],
)  # fmt: skip
async def test_what_the_services_own_user_may_do_a_session_may_not(
    engine: JailEngine, open_file: Path, attempt: str
) -> None:
    def seen() -> object:
        about = open_file.stat()
        limits, cores = resource.getrlimit(resource.RLIMIT_NOFILE), os.sched_getaffinity(0)
        return about.st_mode, about.st_mtime, limits, cores, os.getpriority(os.PRIO_PROCESS, 0)

    before = seen()
    code = attempt.format(path=str(open_file), pid=os.getpid())
    assert (await run(engine, f"import os\n{code}")).outcome is RunOutcome.ERROR
    assert seen() == before


async def test_the_same_file_is_open_where_nothing_is_isolated(tmp_path: Path, open_file: Path) -> None:
    engine = await started("none", tmp_path)
    try:
        assert (await run(engine, f"open({str(open_file)!r}).read()")).result == repr("the host's")
    finally:
        await engine.close()


@pytest.mark.parametrize("attempt", ["open('/etc/passwd')", "open('/proc/self/status')", "__import__('os').listdir('/tmp')",
                                     "open('/tmp/rollmesh-written', 'w')", "open('/usr/x', 'w')", "open('/dev/shm/x', 'w')"])  # fmt: skip
async def test_what_lies_outside_the_declared_paths_is_closed(engine: JailEngine, attempt: str) -> None:
    result = await run(engine, attempt)
    assert (result.outcome, result.error_type) == (RunOutcome.ERROR, "PermissionError")


@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK"])
async def test_sockets_cannot_be_made(engine: JailEngine, family: str) -> None:
    result = await run(engine, f"import _socket\n_socket.socket(_socket.{family}, _socket.SOCK_DGRAM)")
    assert (result.outcome, result.error_type) == (RunOutcome.ERROR, "PermissionError")


async def test_another_sessions_directory_and_processes_are_out_of_reach(engine: JailEngine) -> None:
    said = await run(
        engine,
        f"import os\nopen('secret', 'w').write('1')\n{'os.chmod(chr(46), 0o777)' if IS_ROOT else ''}\nos.getcwd(), os.getpid()",
        "one",
    )
    layout, pid = eval(said.result)
    assert content(Path(layout, "secret")) == "1"
    for attempt in (
        f"open({layout!r} + '/secret')",
        f"os.listdir({layout!r})",
        f"os.kill({pid}, 9)",
        "os.kill(os.getppid(), 9)",
    ):
        result = await run(engine, f"import os\n{attempt}", "two")
        assert (result.outcome, result.error_type) == (RunOutcome.ERROR, "PermissionError"), attempt
    assert (await run(engine, "6*7", "one")).result == "42"


FAMILY = """
import os, signal, time
for _ in range(4):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in range(1, 32):
                if number not in (9, 19):
                    signal.signal(number, signal.SIG_IGN)
            while True:
                time.sleep(100)
        os._exit(0)
    os.wait()
"""


@pytest.mark.parametrize("driver", ["landlock", "none"])
async def test_the_end_of_a_session_leaves_no_process_and_no_file(tmp_path: Path, driver: str) -> None:
    engine = await started(driver, tmp_path)
    try:
        layout = (await run(engine, FAMILY + "\nos.getcwd()")).result.strip("'")
        assert len(session_processes(engine)) >= 5
        await engine.end("s")
        assert session_processes(engine) == []
    finally:
        await engine.close()
    assert not Path(layout).parent.exists()


async def test_a_session_that_ends_itself_takes_its_children_along(engine: JailEngine) -> None:
    result = await run(engine, FAMILY + "\nos._exit(3)")
    assert (result.outcome, result.session_alive) == (RunOutcome.EXITED, False)
    assert "status 3" in result.error_message
    assert session_processes(engine) == []


async def test_the_zygote_ends_the_session_of_a_killed_reaper(engine: JailEngine) -> None:
    pid = int((await run(engine, FAMILY + "\nos.getppid()")).result)
    assert len(session_processes(engine)) >= 5
    os.kill(pid, signal.SIGKILL)
    await engine._live["s"].ended
    assert session_processes(engine) == []
    assert (await run(engine, "6*7", "next")).result == "42"


async def test_a_killed_reaper_is_an_infra_failure(engine: JailEngine) -> None:
    pid = int((await run(engine, "import os; os.getppid()")).result)
    os.kill(pid, signal.SIGKILL)
    await engine._live["s"].ended
    with pytest.raises(SandboxFailed, match="another process killed"):
        await run(engine, "6*7")


KILLS_ITS_WARDEN = "import os; os.kill(os.getppid(), 9); os.kill(os.getpid(), 9)"
LOWERS_ITS_CPU_LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_CPU, (1, 1))\nwhile True: pass"


@pytest.mark.parametrize(
    ("driver", "code"),
    [
        ("landlock", "import os; os.kill(os.getpid(), 9)"),
        ("landlock", LOWERS_ITS_CPU_LIMIT),
        ("none", KILLS_ITS_WARDEN),
    ],
    ids=["kills itself", "lowers its CPU limit", "tries to kill its reaper"],
)
async def test_a_program_cannot_pass_its_own_end_off_as_ours(tmp_path: Path, driver: str, code: str) -> None:
    engine = await started(driver, tmp_path)
    try:
        code = f"try:\n{textwrap.indent(code, '  ')}\nexcept OSError:\n  os.kill(os.getpid(), 9)"
        result = await run(engine, code, wall_s=60.0)
        assert (result.outcome, result.session_alive) == (RunOutcome.EXITED, False), result.error_message
    finally:
        await engine.close()


async def test_using_up_the_cpu_time_of_a_session_is_a_time_limit(tmp_path: Path) -> None:
    engine = await started("landlock", tmp_path)
    try:
        limits = replace(engine.limits("python"), cpu_total_s=1)
        await engine.open("s", "python", limits)
        result = await run(engine, "while True: pass", wall_s=60.0)
        assert (result.outcome, result.session_alive) == (RunOutcome.TIME, False), result.error_message
    finally:
        await engine.close()


async def test_a_lost_zygote_is_reported_when_its_sessions_are_cleared(engine: JailEngine) -> None:
    reaper_pid = int((await run(engine, FAMILY + "\nos.getppid()")).result)
    os.kill(parent_of(reaper_pid), signal.SIGKILL)
    assert (await engine._live["s"].ended).lost
    assert session_processes(engine) == []
    assert (await run(engine, "6*7", "next")).result == "42"


async def test_a_stopped_reaper_ends_with_its_zygote(engine: JailEngine) -> None:
    reaper_pid = int((await run(engine, FAMILY + "\nos.getppid()")).result)
    os.kill(reaper_pid, signal.SIGSTOP)
    try:
        os.kill(parent_of(reaper_pid), signal.SIGKILL)
        async with asyncio.timeout(10.0):
            assert (await engine._live["s"].ended).lost
        assert session_processes(engine) == []
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(reaper_pid, signal.SIGCONT)


async def test_a_reaper_that_was_stopped_for_a_while_continues(engine: JailEngine) -> None:
    reaper_pid = int((await run(engine, "import os; os.getppid()")).result)
    os.kill(reaper_pid, signal.SIGSTOP)
    os.kill(reaper_pid, signal.SIGCONT)
    assert (await run(engine, "6*7")).result == "42"
    await engine.end("s")
    assert session_processes(engine) == []


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_the_description_names_what_is_lacking() -> None:
    said = describe(config_for("landlock"))
    mechanisms = {mechanism.name: mechanism for mechanism in said.mechanisms}
    assert said.driver == "landlock"
    assert mechanisms["landlock"].enforced
    assert not mechanisms["mount namespace"].enforced
    assert "bounded per file only" in mechanisms["mount namespace"].guarantee
    nothing = describe(config_for("none"))
    assert (nothing.driver, {mechanism.name: mechanism.enforced for mechanism in nothing.mechanisms}["seccomp"]) == (
        "none",
        False,
    )


@pytest.mark.parametrize(
    ("driver", "said"), [("landlock", "guarantees less than the jail"), ("none", "NOTHING IS ISOLATED")]
)
def test_every_start_warns_in_one_line(driver: str, said: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        capability_probe.plan(config_for(driver))
    (record,) = (record for record in caplog.records if "disables" not in record.getMessage())
    assert said in record.getMessage()
    assert "network namespace" in record.getMessage()


def test_the_next_start_deletes_what_a_killed_service_left(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    folders = PrivateFolders(str(tmp_path), state, "life")
    layout = Path(folders.make(UID_BASE))
    (layout / "link").symlink_to("/etc")
    state.clean_up(None)
    assert not layout.parent.exists()
    assert not list(tmp_path.glob("folders-*"))


def test_a_tree_deeper_than_any_path_is_deleted(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    folder = os.open(top, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", 0o700, dir_fd=folder)
        inner = os.open("d", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = inner
    os.close(folder)
    remove_tree(str(top))
    assert not top.exists()


def test_a_killer_without_uids_of_its_own_is_refused() -> None:
    for session, killer in ((0, 5), (5, 0), (5, 5)):
        with pytest.raises(ValueError, match="separate uids"):
            reaper.Uids(session=session, killer=killer)


def test_landlock_cannot_be_disabled_if_it_is_the_driver() -> None:
    with pytest.raises(ValueError, match="needs the mechanism landlock"):
        SandboxConfig(engine=Extension("landlock"), without=("landlock",))
