"""The zygote: a warm, contained, single-threaded interpreter that forks one session per request.

It has no secret, no environment and no descriptor except its control socket and the namespace handles, because a fork
inherits everything. It is pid 1 of a separate pid namespace, so its exit always ends every session. It exchanges
packets with the service:

    in   open {id, slot, uid, limits, egress, private_dir} with descriptors [session socket, entry files of cgroups ..., egress port if egress is 1]; kill {id}
    out  ready; fatal {reason}; failed {id, reason}; ended {id, status, cpu_s, cpu_limit_s, rss_bytes}

`ended` is sent when the kernel, or the session's reaper, has reaped all processes of the session. If a reaper itself
was killed, the zygote does its work.
"""  # noqa: E501, W505

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
from dataclasses import dataclass, field, replace
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
from rollmesh.sandbox_runtime.languages.programs import COMMANDS, Command
from rollmesh.sandbox_runtime.limits import Limits
from rollmesh.sandbox_runtime.mechanisms import IsolationPlan
from rollmesh.sandbox_runtime.session import serve_session

_ALWAYS = (
    "base64", "inspect", "tempfile", "traceback",
    "rollmesh.sandbox_runtime.judging.candidate", "rollmesh.sandbox_runtime.judging.checking",
    "rollmesh.sandbox_runtime.judging.program", "rollmesh.sandbox_runtime.judging.remote",
    "rollmesh.sandbox_runtime.judging.sql", "rollmesh.sandbox_runtime.judging.unit",
)  # fmt: skip
"""Modules that sessions themselves need or that nearly every program imports."""
_LATE = ("encodings.idna", "subprocess", "threading", "unittest")
"""Modules that sessions import on first use. Otherwise every session would pay for the work of `threading` after a fork
and for the mappings of each shared library."""
_OWN_FRAMES = 64
"""More than the number of stack frames of the jail's own code below foreign code."""
_UNLIMITED_S = 1 << 53
"""More CPU seconds than any process uses."""


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
        """Ids of sessions that the service asked to kill."""
        self._by_pidfd: dict[int, str] = {}
        self._kill_methods: dict[str, reaper.KillMethod | None] = {}
        self._uses_reapers = not context.has(mechanisms.PID_NAMESPACE)
        if self._uses_reapers:
            reaper.adopt_orphans()

    def serve(self) -> None:
        """Serve until the service closes its end."""
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
        pidfd = os.pidfd_open(pid)
        self._pids[packet["id"]] = pid
        self._by_pidfd[pidfd] = packet["id"]
        self._poll.register(pidfd, select.POLLIN)

    def _limits_of(self, message: framing.Message) -> Limits:
        """Return the limits. Most sessions have the limits of the previous one, which are then reused without a new
        check."""
        if message != self._limits_message:
            self._limits, self._limits_message = Limits(**message), message
        return self._limits

    def _fork(self, spec: contain.SessionSpec, slot: int, method: reaper.KillMethod | None) -> int:
        """Fork the session's first process, or with `method` its reaper. Raises OSError."""
        if self._context.has(mechanisms.NETWORK_NAMESPACE):
            self._networks.enter(slot)
        pid = os.fork() if method else namespaces.fork_as_init(self._context.pid_namespace_fd)
        if pid:
            return pid
        self._control.detach()  # the session reuses its number, so a late finalizer must not close it
        if method is not None:
            reaper.reap_session(
                lambda parent: serve_session(self._context, replace(spec, reaper_pid=parent), self._namespace), method
            )
        serve_session(self._context, spec, self._namespace)

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
        """Return whether the kill of the watched process does not identify its cause: the service requested it, or the
        program can do it."""
        method = self._kill_methods[session_id]
        return session_id in self._killed or (method is not None and not method.confined)

    def _cpu_limit_s(self, pidfd: int) -> int:
        """Return the CPU limit of a process that has exited and is not reaped yet, because the program may have lowered
        it. 0 if it is unknown or the process was not killed. A reaper has no limit, and reports the end of its session
        by its exit status: no program can cause the kill of a reaper, but any program can cause that of a session's
        first process.
        """
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
        """Convert the exit status of a first process or a reaper to that of the session. Afterwards no process of the
        session is left."""
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
    """The environment of a zygote. All of it is code of the operator and runs before containment."""

    preload: Sequence[str] = ()
    """Modules imported before the fork, so that sessions find them loaded."""
    library_paths: Sequence[str] = ()
    """Directories added to sys.path and readable in the jail, e.g. a site-packages."""
    tools: Sequence[str] = ()
    """Modules whose public functions are in every session's namespace."""
    prelude: str = ""
    """Source executed once; every session starts with its definitions."""
    languages: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Languages of the operator: the fields of `languages.programs.Command` by name."""
    pickler: str = ""
    """Directory of the cloudpickle package, for snapshots; without it sessions cannot be saved."""


def run_zygote(control: socket.socket, profile: ZygoteProfile, plan: IsolationPlan) -> None:
    """Load the profile, contain the process, serve. An error before serving is sent as `fatal` and ends the process."""
    privileges.die_with_parent()
    try:
        namespace = _load_profile(profile, late=mechanisms.MOUNT_NAMESPACE in plan.mechanisms)
        context = contain.contain_zygote(plan, read_only=profile.library_paths)
    except Exception as error:  # the one place where a failed start is recorded
        reason = f"{type(error).__name__}: {error}"
        framing.send_packet(control, {"event": "fatal", "reason": reason[:1000]})
        raise SystemExit(reason) from error
    # Each session costs the zygote one pidfd; sessions get a separate, lower limit.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gc.collect()
    gc.freeze()
    framing.send_packet(control, {"event": "ready"})
    Zygote(control, context, namespace).serve()


def _load_profile(profile: ZygoteProfile, *, late: bool) -> dict[str, Any]:
    """Import and execute what the profile declares. Return the namespace with which sessions start.

    `late`: whether sessions can import rarely used modules later. Without a separate root they may not even be able to
    enter the interpreter's directories, for example below a home directory.
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
    COMMANDS.update((name, Command(**fields)) for name, fields in profile.languages.items())
    if profile.prelude:
        exec(compile(profile.prelude, "<prelude>", "exec"), namespace)  # noqa: S102 - the operator's own code
    if (num_threads := len(os.listdir("/proc/self/task"))) != 1:
        raise RuntimeError(f"the preloaded modules started {num_threads - 1} threads; a fork would lose them")
    _add_standard_builtins()
    process_env.reset()
    warmup.warm_up(namespace)
    return namespace


def _add_standard_builtins() -> None:
    """Give sessions the environment of `python FILE`: the builtins that `-S` omits, and 1000 stack frames. `exit` does
    not close stdin."""
    vars(builtins).update(exit=sys.exit, quit=sys.exit)
    sys.setrecursionlimit(sys.getrecursionlimit() + _OWN_FRAMES)


def _public_functions(module: ModuleType) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, FunctionType) and value.__module__ == module.__name__ and not name.startswith("_")
    }
