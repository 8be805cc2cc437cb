"""The service's side of one zygote: start it, exchange packets over its control socket, and ensure that it ends.

Everything runs on the event loop: packets arrive by reader callback, and outgoing packets are small and never block.
The launcher is started from the loop's thread on purpose, because its death signal fires when the thread that started
it ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from rollmesh.sandbox_runtime import framing, launcher
from rollmesh.sandbox_runtime.limits import Limits
from rollmesh.sandbox_runtime.mechanisms import IsolationPlan
from rollmesh.services.sandbox.engines.slots import SessionSlot
from rollmesh.shared.errors import SandboxFailed

_END_S = 5.0
"""Seconds for the kernel to kill and reap a whole zygote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionExit:
    """How a session's pid 1 ended. `lost` means that it ended with its zygote and did not cause this itself."""

    status: int = 0
    """Exit status, or minus the signal."""
    cpu_s: float = 0.0
    cpu_limit_s: float = 0.0
    """CPU limit at which the kernel would have killed it."""
    lost: bool = False
    out_of_memory: bool = False
    """Whether the kernel killed a process of the session for the session's own memory limit."""
    refused: str = ""
    """Why it never started; empty if it did."""


class ZygoteProcess:
    """A running zygote. Create one with `start`."""

    def __init__(self, control: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self._loop = asyncio.get_running_loop()
        self._control = control
        self._process = process
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._sessions: dict[str, asyncio.Future[SessionExit]] = {}
        self._fatal = ""
        self._pidfd = os.pidfd_open(process.pid)
        self._loop.add_reader(control, self._read_packet)
        self._loop.add_reader(self._pidfd, self._on_exit)

    @classmethod
    async def start(
        cls, python: str, profile: Mapping[str, Any], plan: IsolationPlan, log: Path, timeout_s: float
    ) -> ZygoteProcess:
        """Execute a launcher and wait until its zygote is contained. Raises SandboxFailed with the zygote's reason."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs, log.open("wb") as errors:
            process = _execute(python, theirs.fileno(), profile, plan, errors)
        zygote = cls(ours, process)
        try:
            async with asyncio.timeout(timeout_s):
                await zygote._ready
        except TimeoutError:
            await zygote.close()
            raise SandboxFailed(f"the zygote was not ready after {timeout_s} s; see {log}") from None
        except BaseException:
            await zygote.close()
            raise
        return zygote

    @property
    def alive(self) -> bool:
        """Whether sessions can be created."""
        return not self._gone.done() and not self._fatal and self._ready.done()

    @property
    def num_sessions(self) -> int:
        """Number of sessions that are not gone."""
        return len(self._sessions)

    @property
    def pid(self) -> int:
        """Pid of the launcher."""
        return self._process.pid

    def open(
        self, session_id: str, slot: SessionSlot, limits: Limits, fds: Sequence[int], egress_fds: Sequence[int] = ()
    ) -> asyncio.Future[SessionExit]:
        """Request a session with the descriptors `fds` = [its socket, entry files of its cgroups ...] and its egress
        port, if it has one. The returned future is done when the session has ended."""
        packet = {
            "op": "open", "id": session_id, "slot": slot.index, "uid": slot.uid, "limits": limits.as_dict(),
            "egress": len(egress_fds), "private_dir": slot.private_dir,
        }  # fmt: skip
        try:
            framing.send_packet(self._control, packet, (*fds, *egress_fds))
        except OSError as error:
            raise SandboxFailed(f"the zygote does not accept requests: {error}") from error
        ended: asyncio.Future[SessionExit] = self._loop.create_future()
        self._sessions[session_id] = ended
        return ended

    def kill(self, session_id: str) -> None:
        """Kill a session; its future is done when all its processes are gone. If the zygote is unreachable, it is
        killed with all its sessions."""
        if session_id not in self._sessions:
            return
        try:
            framing.send_packet(self._control, {"op": "kill", "id": session_id})
        except OSError:
            self._kill_all()

    async def close(self) -> None:
        """End the zygote with all its sessions."""
        self._close_control()
        try:
            async with asyncio.timeout(_END_S):
                await asyncio.shield(self._gone)
        except TimeoutError:
            self._kill_all()
            await asyncio.shield(self._gone)

    def _kill_all(self) -> None:
        """Kill the launcher. Its exit kills the zygote, whose exit kills the sessions."""
        if not self._gone.done():
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _read_packet(self) -> bool:
        """Handle one packet. Return whether there may be another."""
        try:
            packet, _ = framing.receive_packet(self._control)
        except BlockingIOError:
            return False
        if packet is None:
            self._close_control()
            return False
        self._handle_packet(packet)
        return True

    def _handle_packet(self, packet: framing.Message) -> None:
        match packet["event"]:
            case "ready":
                self._ready.set_result(None)
            case "fatal":
                self._fatal = packet["reason"]
            case "failed":
                self._finish(packet["id"], SessionExit(refused=packet["reason"]))
            case "ended":
                self._finish(
                    packet["id"],
                    SessionExit(status=packet["status"], cpu_s=packet["cpu_s"], cpu_limit_s=packet["cpu_limit_s"]),
                )

    def _finish(self, session_id: str, ended: SessionExit) -> None:
        future = self._sessions.pop(session_id, None)
        if future is not None and not future.done():
            future.set_result(ended)

    def _close_control(self) -> None:
        if self._control.fileno() >= 0:
            self._loop.remove_reader(self._control)
            self._control.close()

    def _on_exit(self) -> None:
        """Handle the exit of the launcher, which has reaped the zygote after the kernel has reaped every session."""
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        status = self._process.wait()
        while self._control.fileno() >= 0 and self._read_packet():
            pass  # its last packets contain the reason
        self._close_control()
        self._gone.set_result(None)
        if not self._ready.done():
            self._ready.set_exception(
                SandboxFailed(f"the zygote ended during its start: {self._fatal or f'status {status}'}")
            )
        for session_id in list(self._sessions):
            self._finish(session_id, SessionExit(lost=True))


def _execute(
    python: str, control_fd: int, profile: Mapping[str, Any], plan: IsolationPlan, errors: BinaryIO
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        launcher.command(python or os.path.realpath(sys.executable), control_fd, profile, plan),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        env=launcher.ENVIRONMENT | launcher.AT_START,
        pass_fds=[control_fd],
        cwd="/",
        start_new_session=True,  # the service handles a Ctrl-C at the terminal
    )
