"""The zygote: a warm, contained, single-threaded interpreter that forks one session per request.

It holds no secret, no environment and no descriptor but its control socket and the namespace handles, since a fork inherits
everything. It is pid 1 of its own pid namespace, so that its death, however it comes, ends every session. It speaks packets
with the service:

  in   open {id, place, uid, limits, egress, private_dir} with descriptors [session socket, entrances of cgroups ..., egress port if egress is 1]; kill {id}
  out  ready; fatal {reason}; failed {id, reason}; ended {id, status, cpu_s, cpu_limit_s, rss_bytes}

`ended` is sent when the kernel has reaped the whole pid namespace, or the session's warden all of it: nothing of the session is
left by then. A warden that was itself killed leaves that to the zygote.
"""

from __future__ import annotations

import builtins
import gc
import importlib
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType, ModuleType
from typing import Any

from rollmesh.sandbox_runtime import (
    contain,
    framing,
    late_import,
    mechanisms,
    namespaces,
    privileges,
    process_env,
    reaper,
    warmup,
)
from rollmesh.sandbox_runtime.limits import Limits
from rollmesh.sandbox_runtime.mechanisms import IsolationPlan
from rollmesh.sandbox_runtime.session import serve_session

_ALWAYS = (
    "base64", "inspect", "tempfile", "traceback",
    "rollmesh.sandbox_runtime.judging.candidate", "rollmesh.sandbox_runtime.judging.checking",
    "rollmesh.sandbox_runtime.judging.program", "rollmesh.sandbox_runtime.judging.remote", "rollmesh.sandbox_runtime.judging.sql", "rollmesh.sandbox_runtime.judging.unit",
)  # fmt: skip
"""What sessions themselves need or nearly every program imports."""
_LATE = ("encodings.idna", "subprocess", "threading", "unittest")
"""What sessions import when they first need it. Every session would pay for the work of `threading` after a fork, and for the
mappings of each shared library."""
_OWN_FRAMES = 64
"""More than the stack frames of the jail's own code below any foreign code."""
_UNLIMITED_S = 1 << 53
"""More than any process uses."""


class Zygote:
    """Sessions by id, and their pidfds."""

    def __init__(self, control: socket.socket, context: contain.ZygoteContext, namespace: Mapping[str, Any]) -> None:
        self._control = control
        self._context = context
        self._namespace = namespace
        self._networks = namespaces.Networks(context.proc_fd)
        self._poll = select.poll()
        self._limits, self._limits_message = Limits(), Limits().as_dict()
        self._pids: dict[str, int] = {}
        self._killed: set[str] = set()
        """Of those, whom the service had killed."""
        self._by_pidfd: dict[int, str] = {}
        self._kill_methods: dict[str, reaper.KillMethod | None] = {}
        self._uses_reapers = not context.has(mechanisms.PID_NAMESPACE)
        if self._uses_reapers:
            reaper.adopt_orphans()

    def serve(self) -> None:
        """Until the service closes its end."""
        self._poll.register(self._control, select.POLLIN)
        while True:
            for fd, _ in self._poll.poll():
                if fd != self._control.fileno():
                    self._reap(fd)
                elif not self._handle():
                    return

    def _handle(self) -> bool:
        packet, fds = framing.receive_packet(self._control)
        if packet is None:
            return False
        if packet["op"] == "open":
            self._open(packet, fds)
        elif (pid := self._pids.get(packet["id"])) is not None:
            self._killed.add(packet["id"])
            os.kill(pid, signal.SIGTERM if self._uses_reapers else signal.SIGKILL)
        return True

    def _open(self, packet: framing.Message, fds: Sequence[int]) -> None:
        procs, ports = fds[1 : len(fds) - packet["egress"]], fds[len(fds) - packet["egress"] :]
        spec = contain.SessionSpec(
            limits=self._limits_of(packet["limits"]),
            uid=packet["uid"],
            socket_fd=fds[0],
            cgroup_fds=tuple(procs),
            egress_fd=next(iter(ports), -1),
            private_dir=packet["private_dir"],
        )
        try:
            method = contain.kill_method_for(self._context.plan, spec.uid) if self._uses_reapers else None
            pid = self._fork(spec, packet["slot"], method)
        except OSError as error:
            _close_all(fds)
            self._send({"event": "failed", "id": packet["id"], "reason": f"network or fork: {error}"})
            return
        _close_all(fds)
        self._kill_methods[packet["id"]] = method
        self._watch(packet["id"], pid)

    def _limits_of(self, message: framing.Message) -> Limits:
        """Most sessions have those of the one before, which are not made and checked again."""
        if message != self._limits_message:
            self._limits, self._limits_message = Limits(**message), message
        return self._limits

    def _fork(self, spec: contain.SessionSpec, slot: int, method: reaper.KillMethod | None) -> int:
        """The session's first process, or with `method` its warden. Raises OSError."""
        if self._context.has(mechanisms.NETWORK_NAMESPACE):
            self._networks.enter(slot)
        pid = os.fork() if method else namespaces.fork_as_init(self._context.pid_namespace_fd)
        if pid:
            return pid
        self._control.detach()  # its number is reused in the session; a late finaliser must not close that
        if method is not None:
            reaper.reap_session(
                lambda parent: serve_session(self._context, replace(spec, reaper_pid=parent), self._namespace), method
            )
        serve_session(self._context, spec, self._namespace)

    def _watch(self, session_id: str, pid: int) -> None:
        pidfd = os.pidfd_open(pid)
        self._pids[session_id] = pid
        self._by_pidfd[pidfd] = session_id
        self._poll.register(pidfd, select.POLLIN)

    def _reap(self, pidfd: int) -> None:
        session_id = self._by_pidfd.pop(pidfd)
        pid = self._pids.pop(session_id)
        cpu_limit_s = 0 if self._kill_is_ambiguous(session_id) else self._cpu_limit_s(pidfd)
        self._killed.discard(session_id)
        _, status, usage = os.wait4(pid, 0)
        code = self._status(session_id, os.waitstatus_to_exitcode(status))
        self._poll.unregister(pidfd)
        os.close(pidfd)
        self._send(
            {
                "event": "ended",
                "id": session_id,
                "status": code,
                "cpu_s": usage.ru_utime + usage.ru_stime,
                "cpu_limit_s": cpu_limit_s,
                "rss_bytes": usage.ru_maxrss * 1024,
            }
        )

    def _kill_is_ambiguous(self, session_id: str) -> bool:
        """Whether a kill of what we watch would tell nothing: we asked for it, or the program can do it."""
        method = self._kill_methods[session_id]
        return session_id in self._killed or (method is not None and not method.confined)

    def _cpu_limit_s(self, pidfd: int) -> int:
        """At which the kernel would have killed a process that has ended and is not yet waited for: the program may have lowered it.
        0 if that can't be learnt, or if the process was not killed. A warden has no limit and its session's death is its exit: no
        program is behind the kill of a warden, and any may be behind that of a session's first process."""
        ended = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
        if ended is None or ended.si_code != os.CLD_KILLED or ended.si_status != signal.SIGKILL:
            return 0
        try:
            about = self._read_proc(f"self/fdinfo/{pidfd}")
            limits = self._read_proc(f"{about.partition('Pid:')[2].split()[0]}/limits")
            limit = limits.partition("Max cpu time")[2].split()[1]
            return _UNLIMITED_S if limit == "unlimited" else int(limit)
        except (OSError, ValueError, IndexError):
            return 0

    def _read_proc(self, path: str) -> str:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._context.proc_fd)
        with open(fd, encoding="ascii") as file:
            return file.read()

    def _status(self, session_id: str, code: int) -> int:
        """The session's, from that of its first process or its warden; after this nothing of it is left."""
        method = self._kill_methods.pop(session_id)
        if method is None:
            return code
        if code < 0 or code == reaper.FAILED:
            if method.uids is not None:
                reaper.kill_session(method.uids)
            reaper.kill_orphans(self._context.proc_fd, self._pids.values())
        return reaper.session_status(code)

    def _send(self, packet: framing.Message) -> None:
        try:
            framing.send_packet(self._control, packet)
        except OSError:
            raise SystemExit("the service is gone") from None


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


@dataclass(frozen=True, slots=True, kw_only=True)
class ZygoteProfile:
    """What a zygote has ready. All of it is the operator's code: it runs before containment."""

    preload: Sequence[str] = ()
    """Modules imported ahead, so that sessions find them warm."""
    library_paths: Sequence[str] = ()
    """Directories put on sys.path and shown read-only in the jail, e.g. a site-packages."""
    tools: Sequence[str] = ()
    """Modules whose public functions every session finds in its namespace."""
    prelude: str = ""
    """Source executed once; every session starts with what it defines."""
    pickler: str = ""
    """Directory of the cloudpickle package, for snapshots; without it sessions can't be saved."""


def run_zygote(control: socket.socket, profile: ZygoteProfile, plan: IsolationPlan) -> None:
    """Warm up, contain, serve. A failure before serving is sent as `fatal` and ends the process."""
    privileges.die_with_parent()
    try:
        namespace = _load_profile(profile, late=mechanisms.MOUNT_NAMESPACE in plan.mechanisms)
        context = contain.contain_zygote(plan, read_only=profile.library_paths)
    except Exception as error:  # the one place where a failed start is recorded
        reason = f"{type(error).__name__}: {error}"
        framing.send_packet(control, {"event": "fatal", "reason": reason[:1000]})
        raise SystemExit(reason) from error
    _raise_descriptor_limit()
    gc.collect()
    gc.freeze()
    framing.send_packet(control, {"event": "ready"})
    Zygote(control, context, namespace).serve()


def _load_profile(profile: ZygoteProfile, *, late: bool) -> dict[str, Any]:
    """Import and execute what the profile declares; the namespace sessions begin with.

    `late`: whether sessions can import later what few of them need. Without a root of their own they may not even be let into the
    interpreter's directories, below a home for instance.
    """
    sys.path.extend(profile.library_paths)
    if profile.pickler:
        late_import.register("cloudpickle", profile.pickler)
    early = () if late else (*_LATE, *(["cloudpickle"] if profile.pickler else []))
    for name in (*_ALWAYS, *early, *profile.preload):
        importlib.import_module(name)
    namespace: dict[str, Any] = {}
    for name in profile.tools:
        namespace |= _public_functions(importlib.import_module(name))
    if profile.prelude:
        exec(compile(profile.prelude, "<prelude>", "exec"), namespace)  # noqa: S102 - the operator's own code
    if (num_threads := len(os.listdir("/proc/self/task"))) != 1:
        raise RuntimeError(f"the preloaded modules started {num_threads - 1} threads; a fork would lose them")
    _add_standard_builtins()
    process_env.reset()
    warmup.warm_up(namespace)
    return namespace


def _add_standard_builtins() -> None:
    """Give sessions what `python FILE` would: the builtins that `-S` omits, and 1000 stack frames. `exit` does not close stdin."""
    vars(builtins).update(exit=sys.exit, quit=sys.exit)
    sys.setrecursionlimit(sys.getrecursionlimit() + _OWN_FRAMES)


def _public_functions(module: ModuleType) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, FunctionType) and value.__module__ == module.__name__ and not name.startswith("_")
    }


def _raise_descriptor_limit() -> None:
    """Each session costs the zygote one pidfd; sessions get their own, lower limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
