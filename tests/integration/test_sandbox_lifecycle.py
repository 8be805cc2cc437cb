"""Nothing of a session survives: after a close, a kill of its zygote, or a kill of the whole service."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy
import pytest

from rollmesh.sandbox_runtime import cgroups
from rollmesh.sandbox_runtime.program import Program
from rollmesh.services.sandbox.config import PoolsConfig, SandboxConfig
from rollmesh.services.sandbox.engine import RunOutcome
from rollmesh.services.sandbox.engines.cleanup import StateDir, start_ticks
from rollmesh.services.sandbox.engines.jail_engine import JailEngine
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.domain.ids import RandomIds
from rollmesh.shared.errors import ConfigError, Overloaded, SandboxFailed, UnknownSession

WAIT_S = 10.0
STRAYS = "import subprocess\nfor _ in range(2): subprocess.Popen(['setsid', 'sleep', '300'])"


def make_engine(state_dir: Path, **changes: object) -> JailEngine:
    return JailEngine(SandboxConfig(**changes), state_dir=state_dir, ids=RandomIds())  # type: ignore[arg-type]


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[JailEngine]:
    made = make_engine(tmp_path, pools=PoolsConfig(ready_max=0))  # processes are counted
    await made.start()
    yield made
    await made.close()


async def open_session(engine: JailEngine, session_id: str) -> None:
    await engine.open(session_id, "python", engine.limits("python"))


def children(pid: int) -> set[int]:
    try:
        return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except (FileNotFoundError, ProcessLookupError):
        return set()


def descendants(pid: int) -> set[int]:
    """Return all descendants of a process; those of nested pid namespaces are visible from here."""
    found: set[int] = set()
    for child in children(pid):
        found |= {child} | descendants(child)
    return found


def living(pids: dict[int, int]) -> list[int]:
    """Return those of the processes, given by pid and start time, that still run."""
    return [pid for pid, ticks in pids.items() if start_ticks(pid) == ticks and not _is_zombie(pid)]


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - the kernel's doings outside have no event to wait on
            await asyncio.sleep(0.005)


def launcher_pid(state_dir: Path) -> int:
    (record,) = state_dir.glob("launcher-*.json")
    return int(record.stem.split("-")[1])


def records(state_dir: Path) -> list[Path]:
    return [*state_dir.glob("launcher-*"), *state_dir.glob("groups-*")]


def mounts() -> str:
    return Path("/proc/self/mountinfo").read_text()


def recorded(folder: Path) -> set[str]:
    """Return the names of the control groups of this folder's services."""
    return {record.name.removeprefix("groups-") for record in folder.glob("groups-*")}


def groups_of(names: set[str]) -> list[Path]:
    hierarchy = cgroups.detect_here()
    return [group for name in names for group in hierarchy.find(name)] if hierarchy is not None else []


async def test_ending_a_session_leaves_no_process_and_no_mount(engine: JailEngine, tmp_path: Path) -> None:
    before = mounts()
    await open_session(engine, "first")
    idle = descendants(launcher_pid(tmp_path))
    await open_session(engine, "s")
    assert (await engine.run("s", Program(code=STRAYS), 5.0)).outcome is RunOutcome.OK
    assert len(descendants(launcher_pid(tmp_path)) - idle) == 3
    assert mounts() == before
    await engine.end("s")
    assert descendants(launcher_pid(tmp_path)) == idle
    assert mounts() == before


async def test_close_leaves_no_process_group_or_record(tmp_path: Path) -> None:
    engine, others = make_engine(tmp_path), descendants(os.getpid())
    await engine.start()
    await open_session(engine, "s")
    names = recorded(tmp_path)
    assert bool(groups_of(names)) == (cgroups.detect_here() is not None)
    await engine.run("s", Program(code=STRAYS), 5.0)
    pids = {pid: start_ticks(pid) for pid in descendants(os.getpid()) - others}
    assert len(pids) >= 5, "launcher, zygote, session, two strays"
    await engine.close()
    await until(lambda: not living(pids))
    assert groups_of(names) == []
    assert records(tmp_path) == []


@pytest.mark.parametrize("victim", ["launcher", "zygote"])
async def test_killed_zygote_is_an_infra_failure_and_is_replaced(
    engine: JailEngine, tmp_path: Path, victim: str
) -> None:
    await open_session(engine, "busy")
    await open_session(engine, "idle")
    await engine.run("idle", Program(code=STRAYS), 5.0)
    launcher = launcher_pid(tmp_path)
    below = {pid: start_ticks(pid) for pid in descendants(launcher)}
    (zygote,) = children(launcher)
    running = asyncio.create_task(engine.run("busy", Program(code="import time; print('on'); time.sleep(9)"), 9.0))
    await asyncio.sleep(0)
    os.kill(launcher if victim == "launcher" else zygote, signal.SIGKILL)
    with pytest.raises(SandboxFailed):
        await running
    with pytest.raises(SandboxFailed):
        await engine.run("idle", Program(code="1"), 1.0)
    await until(lambda: not living(below))
    await open_session(engine, "next")
    assert (await engine.run("next", Program(code="6*7"), 5.0)).result == "42"


SERVICE = """
import asyncio, sys
from pathlib import Path
from rollmesh.sandbox_runtime.program import Program
from rollmesh.services.sandbox.config import SandboxConfig
from rollmesh.services.sandbox.engines.jail_engine import JailEngine
from rollmesh.services.sandbox.config import PoolsConfig
from rollmesh.shared.domain.ids import RandomIds

async def main():
    config = SandboxConfig(pools=PoolsConfig(ready_max=0))
    engine = JailEngine(config, state_dir=Path(sys.argv[1]), ids=RandomIds())
    await engine.start()
    for name in "ab":
        await engine.open(name, "python", engine.limits("python"))
        await engine.run(name, Program(code=sys.argv[2]), 5.0)
    print("ready", flush=True)
    await engine.run("a", Program(code="while True: pass"), 9.0)

asyncio.run(main())
"""


def start_process(*command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)


async def test_killed_service_leaves_nothing_that_the_next_start_does_not_end(tmp_path: Path) -> None:
    service = start_process(sys.executable, "-c", SERVICE, str(tmp_path), STRAYS)
    assert service.stdout is not None
    assert await asyncio.to_thread(service.stdout.readline) == b"ready\n"
    pids = {pid: start_ticks(pid) for pid in descendants(service.pid)}
    assert len(pids) == 8, "launcher, zygote, two sessions with two strays each"
    service.kill()
    service.wait()
    service.stdout.close()
    await until(lambda: not living(pids))
    names = recorded(tmp_path)
    assert bool(groups_of(names)) == (cgroups.detect_here() is not None)
    engine = make_engine(tmp_path)
    await engine.start()
    assert groups_of(names) == []
    await open_session(engine, "a")
    await engine.close()


async def test_a_launcher_that_outlived_its_service_is_ended_at_start(tmp_path: Path) -> None:
    survivor = start_process("sleep", "300")
    bystander = start_process("sleep", "300")
    try:
        state = StateDir(tmp_path)
        state.record_launcher(survivor.pid)
        (tmp_path / f"launcher-{bystander.pid}.json").write_text(f'{{"pid": {bystander.pid}, "start_ticks": 1}}')
        engine = make_engine(tmp_path)
        await engine.start()
        await engine.close()
        assert survivor.wait(WAIT_S) == -signal.SIGKILL
        assert bystander.poll() is None, "same number, another process"
    finally:
        for process in (survivor, bystander):
            process.kill()
            process.communicate()


async def test_a_state_directory_serves_one_service_at_a_time(engine: JailEngine, tmp_path: Path) -> None:
    second = make_engine(tmp_path)
    with pytest.raises(ConfigError, match="in use by another sandbox service"):
        await second.start()
    await second.close()
    await open_session(engine, "s")


async def test_slots_are_bounded_and_released(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, sessions_max=2)
    await engine.start()
    await open_session(engine, "a")
    await open_session(engine, "b")
    with pytest.raises(Overloaded) as refused:
        await open_session(engine, "c")
    assert refused.value.retry_after_s == 0.5
    await engine.end("a")
    await open_session(engine, "c")
    await engine.close()


async def test_cancelled_run_ends_its_session(engine: JailEngine, tmp_path: Path) -> None:
    await open_session(engine, "first")
    idle = descendants(launcher_pid(tmp_path))
    await open_session(engine, "s")
    running = asyncio.create_task(engine.run("s", Program(code="while True: pass"), 9.0))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    with pytest.raises(UnknownSession):
        await engine.run("s", Program(code="1"), 1.0)
    await until(lambda: descendants(launcher_pid(tmp_path)) == idle)


async def test_session_ended_during_a_run_is_unknown_to_it(engine: JailEngine) -> None:
    await open_session(engine, "s")
    running = asyncio.create_task(engine.run("s", Program(code="while True: pass"), 9.0))
    await asyncio.sleep(0)
    await engine.end("s")
    with pytest.raises(UnknownSession, match="was closed during a command"):
        await running


async def test_session_that_exits_between_runs_reports_it(engine: JailEngine) -> None:
    await open_session(engine, "s")
    await engine.run("s", Program(code="import os, threading; threading.Timer(1.0, os._exit, (3,)).start()"), 5.0)
    live = engine._live["s"]
    await asyncio.wait_for(asyncio.shield(live.ended), WAIT_S)
    result = await engine.run("s", Program(code="1"), 1.0)
    assert (result.outcome, result.session_alive) == (RunOutcome.EXITED, False)
    assert "status 3" in result.error_message
    with pytest.raises(UnknownSession):
        await engine.run("s", Program(code="1"), 1.0)


@pytest.mark.parametrize(
    ("profile", "reason"),
    [
        ({"preload": ["no_such_module"]}, "No module named 'no_such_module'"),
        ({"prelude": "1/0"}, "ZeroDivisionError"),
        (
            {"prelude": "import threading, time; threading.Thread(target=time.sleep, args=(9,), daemon=True).start()"},
            "threads",
        ),
    ],
)
async def test_profile_that_cannot_start_is_an_infra_failure_with_its_reason(
    tmp_path: Path, profile: dict[str, object], reason: str
) -> None:
    config = config_from_dict(SandboxConfig, {"profiles": {"python": profile}})
    engine = JailEngine(config, state_dir=tmp_path, ids=RandomIds())
    await engine.start()
    with pytest.raises(SandboxFailed, match=reason):
        await open_session(engine, "s")
    await engine.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root sets uids")
async def test_jail_that_cannot_be_made_is_an_infra_failure_naming_the_step(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, uid_base=2**32 - 1)  # -1 is not a uid
    await engine.start()
    with pytest.raises(SandboxFailed, match="cannot create the jail: "):
        await open_session(engine, "s")
    await engine.close()


async def test_a_prelude_moves_no_session_out_of_its_home(tmp_path: Path) -> None:
    profile = {"prelude": "import os\nos.environ['HOME'] = os.environ['TMPDIR'] = '/elsewhere'"}
    config = config_from_dict(SandboxConfig, {"profiles": {"python": profile}})
    engine = JailEngine(config, state_dir=tmp_path / "state", ids=RandomIds())
    await engine.start()
    await open_session(engine, "s")
    code = "import os, tempfile\n[os.environ['HOME'], tempfile.gettempdir(), os.getcwd()]"
    assert (await engine.run("s", Program(code=code), 5.0)).result == str(["/session"] * 3)
    await engine.close()


async def test_prelude_and_library_paths_reach_every_session(tmp_path: Path) -> None:
    library = tmp_path / "library"
    library.mkdir()
    (library / "shapes.py").write_text("def area(side): return side * side\n")
    profile = {
        "library_paths": [str(library)],
        "prelude": "import shapes\ndef twice(text): return shapes.area(len(text)) * 2",
    }
    config = config_from_dict(SandboxConfig, {"profiles": {"python": profile}})
    engine = JailEngine(config, state_dir=tmp_path / "state", ids=RandomIds())
    await engine.start()
    await open_session(engine, "s")
    assert (await engine.call("s", "twice", ["abc"], 1.0)).result == "18"
    assert (await engine.run("s", Program(code=f"open({str(library / 'x')!r}, 'w')"), 1.0)).error_type == "OSError"
    await engine.close()


async def test_a_preloaded_generator_draws_other_numbers_in_each_session(tmp_path: Path) -> None:
    profile = {
        "library_paths": [str(Path(numpy.__file__).parents[1])],
        "preload": ["numpy", "numpy.random"],
        "prelude": "import numpy\nnumpy.random.seed(1)\ndef draw(): return repr([numpy.random.rand(), numpy.random.randint(2**60)])",
    }
    config = config_from_dict(SandboxConfig, {"profiles": {"python": profile}})
    engine = JailEngine(config, state_dir=tmp_path / "state", ids=RandomIds())
    await engine.start()
    drawn = []
    for session_id in ("one", "two", "three"):
        await open_session(engine, session_id)
        drawn.append((await engine.call(session_id, "draw", [], 5.0)).result)
    await engine.close()
    assert len(set(drawn)) == 3
