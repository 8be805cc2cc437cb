"""The reaper of a session without a pid namespace: starts the session, outlives it, and kills all its processes at the
end.

    zygote -- reaper -- the session's first process -- its descendants

Every orphan of the session becomes a child of the reaper (it is their subreaper), so the session is gone when the
reaper has no children. The reaper exits when the session's first process exits, on SIGTERM, and when the zygote exits,
each time after all other processes. SIGCONT reports the exit of the zygote, because it is the one signal that also
reaches a stopped reaper. The reaper kills as follows:

- As root: a child of the reaper that is no longer root may signal the session's processes (effective uid), and they may
  not signal it (its real and saved uid differ). One kill(-1) suffices, which the kernel makes atomic against forks.
- As an ordinary user with Landlock 6 or later: the reaper runs in a Landlock domain around the session's, from which no
  signal escapes; one kill(-1) suffices. If the domain does not block signals, the session does not start.
- Otherwise child by child. A session that forks endlessly is not bounded in this way.

The zygote is the subreaper above: it kills the processes that a killed reaper leaves, as root by the first method,
otherwise child by child.

Exit status: the session's, 128 + n for signal n, or `FAILED` if the reaper itself failed. Larger statuses are cut to
127.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NoReturn

from rollmesh.sandbox_runtime import landlock, privileges, syscalls

FAILED = 255
_SIGNALLED = 128
_AWAITED = {signal.SIGCHLD, signal.SIGTERM, signal.SIGCONT}
_ROUNDS_MAX = 1000
"""Maximum rounds of killing child by child. Each round kills all children that existed at its start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Uids:
    """Uids of a session and its killer. No other process on this host may use them, because kill(-1) reaches every
    process of either."""

    session: int
    killer: int

    def __post_init__(self) -> None:
        if min(self.session, self.killer) <= 0 or self.session == self.killer:
            raise ValueError(f"a session and its killer need separate uids, got {self.session} and {self.killer}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KillMethod:
    """How a reaper kills: by uids, otherwise by a Landlock domain, otherwise child by child."""

    uids: Uids | None
    scoped: bool

    @property
    def confined(self) -> bool:
        """Whether signals of the session stay inside it, so that it can kill neither its reaper nor foreign
        processes."""
        return self.uids is not None or self.scoped


def adopt_orphans() -> None:
    """Become the subreaper of all descendants of this process."""
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1, "subreaper")


def reap_session(begin: Callable[[int], NoReturn], method: KillMethod) -> NoReturn:
    """Run as the reaper of a new process, in which `begin` is called with the reaper's pid. Never returns in either
    process."""
    status = FAILED
    try:
        status = _start_and_reap(begin, method)
    except OSError as error:
        sys.stderr.write(f"reaper: {error}\n")
        sys.stderr.flush()
    finally:
        os._exit(status)


def session_status(status: int) -> int:
    """Convert the exit status of a reaper to that of its session, in the form of `os.waitstatus_to_exitcode`."""
    return _SIGNALLED - status if _SIGNALLED < status < FAILED else status


def kill_session(uids: Uids) -> None:
    """Kill all processes of the session, as root. Raises OSError if the signal could not be sent."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            _kill_as(uids)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    if status:
        raise OSError(f"the processes of uid {uids.session} could not be killed: status {status}")


def kill_orphans(proc_fd: int, known: Collection[int]) -> None:
    """Kill and reap the children that are not `known`: the orphans of a killed reaper. Called by the subreaper above
    the reapers. Raises OSError if they fork faster than they can be killed."""
    for _ in range(_ROUNDS_MAX):
        orphans = [pid for pid in _children(proc_fd) if pid not in known]
        if not orphans:
            return
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    raise OSError("processes of a session without a reaper fork faster than they can be killed")


def _children(proc_fd: int) -> list[int]:
    own = os.getpid()
    fd = os.open(f"{own}/task/{own}/children", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc_fd)
    with open(fd, encoding="ascii") as children:
        return [int(pid) for pid in children.read().split()]


def _kill_as(uids: Uids) -> None:
    os.setgroups([])
    os.setresgid(uids.killer, uids.killer, uids.killer)
    os.setresuid(uids.killer, uids.session, uids.killer)
    if os.getresuid() != (uids.killer, uids.session, uids.killer):
        raise OSError("the uids did not change: kill(-1) would reach processes outside the session")
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)


def _start_and_reap(begin: Callable[[int], NoReturn], method: KillMethod) -> int:
    zygote, reaper = os.getppid(), os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    adopt_orphans()
    if method.uids is None and method.scoped:
        _enter_domain(zygote)
    gate, opener = os.pipe()
    first = os.fork()
    if first == 0:
        os.close(opener)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if os.read(gate, 1):
            os.close(gate)
            begin(reaper)
        os._exit(0)
    _signal_when_parent_exits(zygote)
    os.write(opener, b"1")  # only now: an earlier error closes the pipe, and the session ends before it starts
    syscalls.call("close_range", 3, 0xFFFFFFFF, 0)
    return _kill_and_reap(first, method, _wait_for_end(first, zygote))


def _enter_domain(zygote: int) -> None:
    privileges.no_new_privileges()
    landlock.scope_signals()
    try:
        os.kill(zygote, 0)
    except PermissionError:
        return
    raise OSError("the Landlock domain does not block signals: kill(-1) would reach processes outside the session")


def _signal_when_parent_exits(zygote: int) -> None:
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGCONT, "pdeathsig")
    if os.getppid() != zygote:
        raise OSError("the zygote ended")


def _wait_for_end(first: int, zygote: int) -> int | None:
    """Return the wait status of the session's first process, or None on SIGTERM or when the zygote has exited. Reaps
    orphans meanwhile."""
    while signal.sigwait(_AWAITED) != signal.SIGTERM and os.getppid() == zygote:
        pid, status = os.waitpid(-1, os.WNOHANG)
        while pid:
            if pid == first:
                return status
            pid, status = os.waitpid(-1, os.WNOHANG)  # `first` still exists, so there is a child to wait for
    return None


def _kill_and_reap(first: int, method: KillMethod, ended: int | None) -> int:
    """Kill and reap until no child is left. Return the exit status."""
    if ended is None:
        os.kill(first, signal.SIGKILL)  # by pid, because it may not have switched to its uid yet
    _kill(method)
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, 0)
            ended = status if pid == first else ended
            if method.uids is None:
                _kill(method)
    code = FAILED if ended is None else os.waitstatus_to_exitcode(ended)
    return _SIGNALLED - code if code < 0 else min(code, _SIGNALLED - 1)


def _kill(method: KillMethod) -> None:
    if method.uids is not None:
        kill_session(method.uids)
    elif method.scoped:
        _kill_domain()
    else:
        _kill_children()


def _kill_domain() -> None:
    """Kill all processes of the domain. `_enter_domain` has checked that signals stay inside."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(-1, signal.SIGKILL)


def _kill_children() -> None:
    proc_fd = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for pid in _children(proc_fd):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
    finally:
        os.close(proc_fd)
