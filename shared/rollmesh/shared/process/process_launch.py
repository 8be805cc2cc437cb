"""Commands that the kernel kills when the process that started them ends for any reason, and commands whose whole
process tree ends with them.

    subprocess.Popen(bound_to_parent([sys.executable, "-m", "worker"]))

Linux sends the death signal when the parent's *thread* that started the command ends. Start it from the main thread, or
from one that runs as long as the command should. The signal goes to this command only, so its children must be bound to
it in turn.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

# Runs in a fresh interpreter and becomes the command. Python code between fork and exec in the parent (preexec_fn)
# could deadlock on a lock that another of its threads held. PR_SET_PDEATHSIG (1) survives exec; the parent may have
# exited before it was set. SIGKILL (9), because a stopped or stuck process handles no other signal.
_LAUNCHER = """
import ctypes, os, sys
parent, *command = sys.argv[1:]
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(parent): sys.exit("the parent is gone")
os.execvp(command[0], command)
"""


def bound_to_parent(command: Sequence[str]) -> list[str]:
    """Return the command line that runs `command` (same process id, streams and environment) and is killed when this
    process ends."""
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command]


# The keeper runs in a fresh interpreter and starts the command in a separate session. It adopts the command's orphans
# (PR_SET_CHILD_SUBREAPER, 36), and exits when all of them are gone. SIGTERM asks the command's group to end, and kills
# the tree after `stop_s`. The death of the parent (SIGUSR1), like the end of the command, kills the rest of the tree at
# once. A command that cannot start exits with 127.
_KEEPER = """
import ctypes, os, signal, sys
parent, stop_s, folder, *command = sys.argv[1:]
prctl = ctypes.CDLL(None).prctl
leader = 0
def kill(*_):
    while True:
        try: names = open(f"/proc/self/task/{os.getpid()}/children").read().split()
        except OSError: names = [str(leader)]
        if not names: return
        for name in names:
            try: os.killpg(int(name), 9)
            except OSError: pass
            try: os.kill(int(name), 9)
            except OSError: pass
        if reaping:
            try: os.waitpid(-1, 0)
            except ChildProcessError: return
        else: return
def stop(*_):
    try: os.killpg(leader, 15)
    except OSError: pass
    signal.setitimer(signal.ITIMER_REAL, float(stop_s))
reaping = False
held = {15, 10, 14}
signal.pthread_sigmask(signal.SIG_BLOCK, held)
signal.signal(15, stop); signal.signal(10, kill); signal.signal(14, kill)
prctl(1, 10); prctl(36, 1)
if os.getppid() != int(parent):
    import shutil
    shutil.rmtree(folder, ignore_errors=True)
    sys.exit("the parent is gone")
keeper = os.getpid()
leader = os.fork()
if not leader:
    os.setsid(); prctl(1, 9)
    for number in (*held, signal.SIGPIPE, signal.SIGXFSZ): signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, held)
    if os.getppid() != keeper: os._exit(1)
    try:
        os.chdir(folder)
        os.execvp(command[0], command)
    except OSError as err:
        os.write(2, f"cannot run {command[0]}: {err.strerror}\\n".encode())
        os._exit(127)
for stream in (0, 1, 2): os.close(stream)
signal.pthread_sigmask(signal.SIG_UNBLOCK, held)
status = None
while status is None:
    pid, ended = os.waitpid(-1, 0)
    if pid == leader: status = ended
signal.pthread_sigmask(signal.SIG_BLOCK, held)
reaping = True
kill()
import shutil
shutil.rmtree(folder, ignore_errors=True)
os._exit(os.waitstatus_to_exitcode(status) & 0xFF if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))
"""


def kept_tree(command: Sequence[str], *, folder: str, stop_s: float) -> list[str]:
    """Return the command line that runs `command` in `folder`, and ends all of its processes when it or this process
    ends.

    The folder is deleted then. SIGTERM ends the command with SIGTERM, and its tree with SIGKILL after `stop_s` seconds.
    The exit status is that of the command: 128 + N after signal N, 127 if it cannot start.
    """
    return [sys.executable, "-I", "-S", "-c", _KEEPER, str(os.getpid()), str(stop_s), folder, *command]


def kill_with_variable(name: str, value: str) -> None:
    """Kill the processes that have inherited an environment variable, for a tree whose keeper was killed. Blocks for at
    most a second."""
    wanted = f"{name}={value}".encode()
    deadline_s = time.monotonic() + 1.0
    while time.monotonic() < deadline_s:
        found = [int(folder.name) for folder in Path("/proc").glob("[0-9]*") if wanted in _environment(folder)]
        if not found:
            return
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _environment(folder: Path) -> list[bytes]:
    """Return the variables of a process; none of one that has exited, or that belongs to another user."""
    try:
        return (folder / "environ").read_bytes().split(b"\0")
    except OSError:
        return []
