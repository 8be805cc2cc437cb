"""Attacks on each guarantee that `rollmesh.sandbox_runtime.contain` lists as covered, in real jails."""

from __future__ import annotations

import asyncio
import os
import socket
import textwrap
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from rollmesh.sandbox_runtime import cgroups
from rollmesh.sandbox_runtime.program import Program
from rollmesh.services.sandbox.config import PoolsConfig, ProfileConfig, SandboxConfig
from rollmesh.services.sandbox.engine import RunOutcome, RunResult
from rollmesh.services.sandbox.engines.jail_engine import JailEngine
from rollmesh.shared.domain.ids import SeededIds

LIMITS: dict[str, int | float] = {
    "call_s": 2.0,
    "memory_bytes": 96 << 20,
    "processes_max": 12,
    "disk_bytes": 4 << 20,
    "inodes_max": 64,
    "file_bytes": 2 << 20,
    "output_bytes": 1000,
    "flood_bytes": 100_000,
}


UID_BASE = 62000
"""A separate name prefix, so that other nodes on this host and other tests do not count."""


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[JailEngine]:
    profiles = {"python": ProfileConfig(limits=LIMITS)}
    pools = PoolsConfig(ready_max=0)  # processes are counted by uid
    config = SandboxConfig(profiles=profiles, grace_s=5.0, uid_base=UID_BASE, pools=pools)
    made = JailEngine(config, state_dir=tmp_path, ids=SeededIds(os.getpid()))
    await made.start()
    yield made
    await made.close()


async def open_session(engine: JailEngine, session_id: str = "s") -> None:
    await engine.open(session_id, "python", engine.limits("python"))


async def run(engine: JailEngine, code: str, session_id: str = "s", wall_s: float = 2.0) -> RunResult:
    return await engine.run(session_id, Program(code=textwrap.dedent(code)), wall_s)


async def attack(engine: JailEngine, code: str, wall_s: float = 2.0) -> RunResult:
    """Run one piece of code in a fresh session."""
    await open_session(engine)
    return await run(engine, code, wall_s=wall_s)


async def survives(engine: JailEngine) -> None:
    """Check that a new session works, so the attack before it did no harm."""
    await open_session(engine, "neighbor")
    assert (await run(engine, "6*7", "neighbor")).result == "42"
    await engine.end("neighbor")


def processes_of(uid_low: int, uid_high: int) -> list[int]:
    """Return host processes with a uid in a range: those of sessions if the tests run as root."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                uid = os.stat(f"/proc/{entry}").st_uid
            except FileNotFoundError:
                continue
            if uid_low <= uid < uid_high:
                found.append(int(entry))
    return found


# Network --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK"])
async def test_sockets_cannot_be_made(engine: JailEngine, family: str) -> None:
    result = await attack(engine, f"import socket\nsocket.socket(socket.{family}, socket.SOCK_DGRAM)")
    assert (result.outcome, result.error_type) == (RunOutcome.ERROR, "PermissionError")


async def test_abstract_addresses_of_the_host_are_out_of_reach(engine: JailEngine) -> None:
    # A datagram socketpair can name any abstract address of its network namespace.
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as host:
        host.bind("\0rollmesh-test-isolation")
        result = await attack(
            engine,
            r"""
            import socket
            a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
            a.sendto(b"out", "\0rollmesh-test-isolation")
            """,
        )
        assert (result.outcome, result.error_type) == (RunOutcome.ERROR, "PermissionError")


# Files ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    ["/etc/shadow", "/proc/1/environ", "/sys/kernel", "/run", "/home", "/var", "/dev/mem", "/dev/kmsg", __file__],
)
async def test_host_paths_do_not_exist(engine: JailEngine, path: str) -> None:
    result = await attack(engine, f"import os\nos.path.lexists({path!r})")
    assert result.result == "False"


async def test_nothing_but_the_private_directory_can_be_written(engine: JailEngine) -> None:
    result = await attack(
        engine,
        """
        import os
        found = []
        for top in ("/", *(os.path.join("/", name) for name in os.listdir("/") if name not in ("session", "tmp"))):
            for folder, _, _ in os.walk(top):
                try:
                    open(os.path.join(folder, "x"), "w").close()
                    found.append(folder)
                except OSError:
                    pass
                if folder.count("/") > 2:
                    break
        [name for name in found if not name.startswith("/session")]
        """,
    )
    assert result.result == "[]"


async def test_root_cannot_be_remounted_or_left(engine: JailEngine) -> None:
    result = await attack(
        engine,
        """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        said = []
        for attempt in (
            lambda: libc.mount(b"none", b"/", b"", 32 | 4096, None), lambda: libc.umount2(b"/session", 2),
            lambda: libc.chroot(b"."), lambda: libc.unshare(0x10000000), lambda: libc.unshare(0x20000),
            lambda: libc.setns(0, 0),
        ):
            said.append((attempt(), ctypes.get_errno()))
        said
        """,
    )
    assert result.result == str([(-1, 1)] * 6)


async def test_sessions_see_neither_files_nor_processes_of_each_other(engine: JailEngine) -> None:
    await open_session(engine, "one")
    await open_session(engine, "two")
    await run(
        engine, "import os; open('secret', 'w').write('x'); os.fork() or __import__('time').sleep(60)", "one", 0.2
    )
    seen = await run(engine, "import os\nos.listdir('/session'), os.listdir('/tmp'), os.getpid()", "two")
    assert seen.result == "([], [], 1)"
    killed = await run(
        engine,
        "import os\nfor pid in range(2, 300):\n  try: os.kill(pid, 9); print(pid)\n  except OSError: pass",
        "two",
    )
    assert (killed.outcome, killed.stdout) == (RunOutcome.OK, "")


async def test_session_inherits_nothing(engine: JailEngine) -> None:
    os.environ["ROLLMESH_TEST_SECRET"] = "x"
    try:
        result = await attack(
            engine,
            """
            import os, sys
            fds = []
            for fd in range(1024):
                try: os.fstat(fd); fds.append(fd)
                except OSError: pass
            fds, [k for k in os.environ if "SECRET" in k], sys.argv, [m for m in sys.modules if "grpc" in m]
            """,
        )
    finally:
        del os.environ["ROLLMESH_TEST_SECRET"]
    assert result.result == "([0, 1, 2, 3], [], ['-c'], [])"


async def test_session_has_no_privileges(engine: JailEngine) -> None:
    result = await attack(
        engine,
        """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        assert libc.capget(header, data) == 0
        list(data), os.getuid() != 0, os.getgroups(), libc.prctl(39, 0, 0, 0, 0), libc.prctl(21, 0, 0, 0, 0), os.uname().nodename
        """,
    )
    # capabilities, uid, groups, no_new_privs, seccomp mode 2 (filter), and not the host's name
    assert result.result in (f"([0, 0, 0, 0, 0, 0], True, {groups}, 1, 2, 'sandbox')" for groups in ([], [65534]))


@pytest.mark.parametrize(
    "call", ["ptrace(0,0,0,0)", "keyctl(0,0,0)", "perf_event_open(0,0,0,0,0)", "bpf(0,0,0)", "io_uring_setup(1,0)",
             "userfaultfd(0)", "memfd_create(b'x',0)", "process_vm_readv(1,0,0,0,0,0)"],
)  # fmt: skip
async def test_dangerous_system_calls_are_refused(engine: JailEngine, call: str) -> None:
    name, arguments = call.split("(", 1)
    numbers = {"ptrace": 101, "keyctl": 250, "perf_event_open": 298, "bpf": 321, "io_uring_setup": 425,
               "userfaultfd": 323, "memfd_create": 319, "process_vm_readv": 310}  # fmt: skip
    if os.uname().machine != "x86_64":
        pytest.skip("numbers of x86_64")
    code = f"import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n(libc.syscall({numbers[name]}, {arguments}, ctypes.get_errno())"
    assert (await attack(engine, code)).result == "(-1, 1)"


# Limits ---------------------------------------------------------------------------------------------------------------


async def test_memory_bomb_is_the_memory_outcome(engine: JailEngine) -> None:
    result = await attack(engine, "kept = []\nwhile True: kept.append(bytearray(1 << 20))")
    assert result.outcome is RunOutcome.MEMORY
    await survives(engine)


async def test_memory_of_many_processes_is_bounded_together(engine: JailEngine) -> None:
    hierarchy = cgroups.detect_here()
    if hierarchy is None or "memory" not in hierarchy.parents:
        pytest.skip("no writable memory cgroup here")
    result = await attack(
        engine,
        """
        import os, time
        for _ in range(8):
            if os.fork() == 0:
                kept = bytearray(60 << 20)
                for i in range(0, len(kept), 4096): kept[i] = 1
                time.sleep(30)
        killed = os.wait()[1]
        killed
        """,
    )
    assert result.result == "9" or result.outcome is RunOutcome.MEMORY
    await survives(engine)


async def test_cores_of_all_processes_are_bounded_together(engine: JailEngine) -> None:
    hierarchy = cgroups.detect_here()
    if hierarchy is None or "cpu" not in hierarchy.parents:
        pytest.skip("no writable cpu cgroup here")
    await engine.open("s", "python", replace(engine.limits("python"), cpus=0.2))
    result = await run(
        engine,
        """
        import os, time
        began = time.monotonic()
        for _ in range(2):
            if os.fork() == 0:
                while time.monotonic() < began + 1: pass
                os._exit(0)
        for _ in range(2): os.wait()
        used = os.times()
        (used.children_user + used.children_system) / (time.monotonic() - began)
        """,
        wall_s=2.0,
    )
    assert float(result.result) < 0.4


async def test_fork_bomb_is_the_process_outcome_and_ends_the_session(engine: JailEngine) -> None:
    result = await attack(engine, "import os\nwhile True: os.fork()")
    assert (result.outcome, result.session_alive) == (RunOutcome.PROCESSES, False)
    await survives(engine)


async def test_thread_bomb_is_the_process_outcome(engine: JailEngine) -> None:
    code = "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    assert (await attack(engine, code)).outcome is RunOutcome.PROCESSES


async def test_endless_loop_is_interrupted_in_time_and_keeps_the_session(engine: JailEngine) -> None:
    await run_and_check_time(engine, "x = 7\nprint('before')\nwhile True: pass", alive=True)
    assert (await run(engine, "x")).result == "7"


@pytest.mark.parametrize("code", ["sum(iter(int, 1))", "import signal\nsignal.setitimer(0, 0)\nwhile True: pass"])
async def test_code_that_no_interrupt_reaches_is_killed_in_time(engine: JailEngine, code: str) -> None:
    await run_and_check_time(engine, code, alive=False)
    await survives(engine)


@pytest.mark.row("S087")
async def test_thousands_of_calls_have_their_own_results_beside_calls_that_run_out_of_time(engine: JailEngine) -> None:
    """Six sessions make more than 2,000 calls at the same time, and in another one endless loops run out of time."""
    names = [f"s{number}" for number in range(6)]
    for name in [*names, "loops"]:
        await open_session(engine, name)

    async def calls(name: str) -> list[str]:
        return [(await run(engine, f"'{name}', {number}", name, BUSY_S)).result for number in range(2000 // 6 + 1)]

    async def loops() -> list[tuple[RunOutcome, bool]]:
        found = [await run(engine, "while True: pass", "loops", 0.05) for _ in range(4)]
        return [(result.outcome, result.session_alive) for result in found]

    called, ended = await asyncio.gather(asyncio.gather(*map(calls, names)), loops())
    for name, results in zip(names, called, strict=True):
        assert results == [f"('{name}', {number})" for number in range(len(results))]
    assert sum(map(len, called)) > 2000
    assert ended == [(RunOutcome.TIME, True)] * 4
    assert (await run(engine, "6*7", "loops")).result == "42"


BUSY_S = 15.0
"""The programs never end by themselves, so any bound suffices; this one also holds on busy cores."""


async def run_and_check_time(engine: JailEngine, code: str, *, alive: bool) -> None:
    began_s = time.monotonic()
    result = await attack(engine, code, wall_s=0.3)
    took_s = time.monotonic() - began_s
    assert (result.outcome, result.session_alive) == (RunOutcome.TIME, alive)
    assert 0.3 <= took_s < 0.3 + 5.0 + BUSY_S, "limit, grace, and what a busy machine takes for them"
    if alive:
        assert result.stdout == "before\n"
        assert "while True: pass" in result.traceback


async def test_printing_beyond_the_limit_is_cut_and_marked(engine: JailEngine) -> None:
    result = await attack(engine, "print('é' * 5000)")
    assert (result.outcome, result.truncated, len(result.stdout.encode())) == (RunOutcome.OK, True, 1000)


async def test_output_flood_is_the_output_outcome(engine: JailEngine) -> None:
    result = await attack(engine, "while True: print('x' * 1000)")
    assert (result.outcome, result.truncated, len(result.stdout)) == (RunOutcome.OUTPUT, True, 1000)


async def test_child_processes_output_is_returned_and_bounded(engine: JailEngine) -> None:
    await open_session(engine)
    code = "import subprocess\nsubprocess.run(['sh', '-c', 'echo out; echo err >&2; yes | head -c {}'])\nNone"
    assert (await run(engine, code.format(4))).stdout == "out\ny\ny\n"
    flood = await run(engine, code.format(100_000_000))
    assert (flood.truncated, len(flood.stdout), flood.stderr[:4]) == (True, 1000, "err\n")


async def test_disk_and_inodes_are_bounded(engine: JailEngine) -> None:
    result = await attack(
        engine,
        """
        def fill():
            for number in range(100):
                with open(f"f{number}", "wb") as file: file.write(bytes(1 << 20))
        def many():
            for number in range(1000): open(f"g{number}", "w").close()
        said = []
        for attempt in (fill, many):
            try: attempt()
            except OSError as error: said.append(error.strerror)
        said
        """,
    )
    assert result.result == str(["No space left on device"] * 2)


async def test_a_file_beyond_its_limit_is_refused(engine: JailEngine) -> None:
    result = await attack(engine, "open('big', 'wb').write(bytes(3 << 20))")
    assert (result.error_type, "File too large" in result.error_message) == ("OSError", True)


async def test_descriptors_are_bounded(engine: JailEngine) -> None:
    result = await attack(engine, "kept = []\nwhile True: kept.append(open('/dev/null'))")
    assert (result.outcome, "Too many open files" in result.error_message) == (RunOutcome.ERROR, True)


# Ends -----------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="as an ordinary user sessions have the user's own uid outside")
async def test_detached_children_die_with_the_session(engine: JailEngine) -> None:
    low, high = UID_BASE, UID_BASE + 256
    assert processes_of(low, high) == []
    await open_session(engine)
    await run(engine, "import subprocess\nfor _ in range(3): subprocess.Popen(['setsid', 'sleep', '300'])")
    assert len(processes_of(low, high)) == 4
    await engine.end("s")
    assert processes_of(low, high) == []


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import os; os._exit(3)", "status 3"),
        ("import ctypes; ctypes.string_at(0)", "signal 11"),
        ("import os; os.write(3, b'\\xff' * 100)", "protocol"),
        (
            'import os, struct; b = b\'{"outcome":"ok","stdout":"\\xff\\xfe"}\'; os.write(3, struct.pack(\'<I\', len(b)) + b)',
            "protocol",
        ),
        (
            'import os, struct; b = b\'{"outcome":"ok","files":7}\'; os.write(3, struct.pack(\'<I\', len(b)) + b)',
            "protocol",
        ),
        ("import os, struct; b = b'[' * 100000; os.write(3, struct.pack('<I', len(b)) + b)", "protocol"),
    ],
)
async def test_an_ended_and_a_garbled_session_are_distinguished(engine: JailEngine, code: str, message: str) -> None:
    result = await attack(engine, code)
    assert (result.outcome, result.session_alive) == (RunOutcome.EXITED, False)
    assert message in result.error_message
    await survives(engine)


async def test_children_that_return_from_the_code_do_not_answer_for_the_session(engine: JailEngine) -> None:
    await open_session(engine)
    assert (await run(engine, "import os\npid = os.fork()\npid == 0")).result == "False"
    assert (await run(engine, "os.waitpid(pid, 0)[1] != 0")).result == "True"


async def test_neighbours_work_while_a_session_spins(engine: JailEngine) -> None:
    await open_session(engine, "spinning")
    spinning = asyncio.create_task(run(engine, "while True: pass", "spinning", 1.0))
    await survives(engine)
    assert not spinning.done()
    assert (await spinning).outcome is RunOutcome.TIME


# The interpreter ------------------------------------------------------------------------------------------------------


async def test_definitions_survive_and_tracebacks_have_the_users_lines(engine: JailEngine) -> None:
    await open_session(engine)
    await run(engine, "def half(x):\n    y = x\n    return y / 0")
    result = await run(engine, "a = 1\nhalf(a)")
    assert (result.outcome, result.error_type, result.error_message) == (
        RunOutcome.ERROR, "ZeroDivisionError", "division by zero",
    )  # fmt: skip
    assert 'File "<call 2>", line 2, in <module>\n    half(a)' in result.traceback
    assert 'File "<call 1>", line 3, in half\n    return y / 0' in result.traceback
    assert "rollmesh" not in result.traceback


@pytest.mark.parametrize("code", ["raise SystemExit(0)", "raise KeyboardInterrupt", "def f(): return f()\nf()", "x ="])
async def test_whatever_is_raised_is_an_error_and_keeps_the_session(engine: JailEngine, code: str) -> None:
    assert (await attack(engine, code)).outcome is RunOutcome.ERROR
    assert (await run(engine, "1+1")).result == "2"


async def test_odd_text_passes(engine: JailEngine) -> None:
    result = await attack(engine, "print('\\ud800 \\x00 é 😀')\n'\\udcff'")
    assert (result.stdout, result.result) == ("? \x00 é 😀\n", "'\\udcff'")


async def test_signal_to_its_process_group_stays_in_the_session(engine: JailEngine) -> None:
    await open_session(engine, "other")
    await attack(
        engine, "import os, signal\nif os.fork() == 0:\n    os.kill(0, signal.SIGKILL)\nos.kill(0, signal.SIGKILL)"
    )
    assert (await run(engine, "1", session_id="other")).result == "1"
    await open_session(engine, "third")
    assert (await run(engine, "3", session_id="third")).result == "3"
