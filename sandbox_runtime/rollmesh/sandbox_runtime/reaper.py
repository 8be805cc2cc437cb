"""The warden of a session without a pid namespace: starts it, outlives it, and leaves nothing of it.

    zygote -- warden -- the session's first process -- whatever that starts

Every orphan of the session becomes the warden's child (it is their subreaper), so "no child is left" means "nothing is left". It
ends with the session's first process, on SIGTERM, and with the zygote, each time after all the others. The zygote's end is signalled by
SIGCONT, the one signal that a stopped warden takes. How it kills:

- as root: a child of it, which by then is no longer root, but may signal the session's processes (effective uid) while they may not
  signal it (real and saved uid are its own). One kill(-1), which the kernel makes atomic against forks.
- as an ordinary user with Landlock 6 or later: it lives in a Landlock domain around the session's, out of which no signal leads;
  one kill(-1). Where the domain turns out not to hold the session does not begin.
- else child by child: a session that forks without end is not bounded so.

The zygote is the subreaper above: it ends what a warden that was killed leaves, as root in the first way, else child by child.

Exit status: the session's, 128 + n for signal n, `FAILED` if the warden itself failed. Larger statuses are cut to 127.
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
"""Of killing child by child. Each round ends all that were there when it began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Uids:
    """Both belong to nobody else on this host: kill(-1) reaches whatever runs under either."""

    session: int
    killer: int

    def __post_init__(self) -> None:
        if min(self.session, self.killer) <= 0 or self.session == self.killer:
            raise ValueError(f"a session and its killer need uids of their own, got {self.session} and {self.killer}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KillMethod:
    """By what a warden kills: uids, else a domain, else one by one."""

    uids: Uids | None
    scoped: bool

    @property
    def confined(self) -> bool:
        """Whether signals of the session stay inside it: neither its warden nor anybody else's process can be killed by it."""
        return self.uids is not None or self.scoped


def adopt_orphans() -> None:
    """Become the subreaper of all below this process."""
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1, "subreaper")


def reap_session(begin: Callable[[int], NoReturn], method: KillMethod) -> NoReturn:
    """Be the warden of the process that `begin`, given the warden's pid, is called in. Never returns in either."""
    status = FAILED
    try:
        status = _start_and_reap(begin, method)
    except OSError as error:
        sys.stderr.write(f"warden: {error}\n")
        sys.stderr.flush()
    finally:
        os._exit(status)


def session_status(status: int) -> int:
    """Of a session, in the manner of `os.waitstatus_to_exitcode`, from that of its warden."""
    return _SIGNALLED - status if _SIGNALLED < status < FAILED else status


def kill_session(uids: Uids) -> None:
    """As root: SIGKILL for all processes of the session. Raises OSError if that could not be sent."""
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
    """By the subreaper above wardens: kill and reap the children that are not `known`, the orphans of a warden that was killed. Raises
    OSError if they fork faster than they die."""
    for _ in range(_ROUNDS_MAX):
        orphans = [pid for pid in _children(proc_fd) if pid not in known]
        if not orphans:
            return
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    raise OSError("processes of a session whose warden was killed fork faster than they can be killed")


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
        raise OSError("the uids did not change: kill(-1) would reach beyond the session")
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
    os.write(opener, b"1")  # not before: what goes wrong until here closes the gate, and the session ends unbegun
    syscalls.call("close_range", 3, 0xFFFFFFFF, 0)
    return _kill_and_reap(first, method, _wait_for_end(first, zygote))


def _enter_domain(zygote: int) -> None:
    privileges.no_new_privileges()
    landlock.scope_signals()
    try:
        os.kill(zygote, 0)
    except PermissionError:
        return
    raise OSError("the Landlock domain does not hold signals back: kill(-1) would reach beyond the session")


def _signal_when_parent_exits(zygote: int) -> None:
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGCONT, "pdeathsig")
    if os.getppid() != zygote:
        raise OSError("the zygote ended")


def _wait_for_end(first: int, zygote: int) -> int | None:
    """The wait status of the session's first process, or None on SIGTERM or when the zygote has ended. Reaps orphans meanwhile."""
    while signal.sigwait(_AWAITED) != signal.SIGTERM and os.getppid() == zygote:
        pid, status = os.waitpid(-1, os.WNOHANG)
        while pid:
            if pid == first:
                return status
            pid, status = os.waitpid(-1, os.WNOHANG)  # `first` is still there, so there is a child to ask for
    return None


def _kill_and_reap(first: int, method: KillMethod, ended: int | None) -> int:
    """Kill and reap until nothing is left; the exit status to end with."""
    if ended is None:
        os.kill(first, signal.SIGKILL)  # by its pid: it may not have dropped to its uid yet
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
    """A warden gets here only after `_enter_domain` saw that signals stay inside."""
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
