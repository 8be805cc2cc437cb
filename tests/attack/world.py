"""The host around the attacks: bait that an attacker could reach if a mechanism were missing, and checks whether it
changed.

Only the isolation mechanisms protect the bait: files and sockets are open to every user, and the attacker gets names
and numbers.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_IPC_CREAT, _IPC_RMID = 0o1000, 0


@dataclass(frozen=True, slots=True)
class Sights:
    """State of the host. Two states are compared around each attack."""

    files: Mapping[str, tuple[bytes, int]]
    shared_memory: tuple[bytes, int]
    received: int
    victim_alive: bool
    host_name: str
    our_mounts: int
    strays: tuple[str, ...]
    clock_offset_s: float

    def changes(self, later: Sights) -> list[str]:
        """Return the differences from an earlier state."""
        names = ("files", "shared_memory", "received", "victim_alive", "host_name", "our_mounts", "strays")
        changed = [f"host: {name} changed" for name in names if getattr(self, name) != getattr(later, name)]
        if abs(self.clock_offset_s - later.clock_offset_s) > 1.0:
            changed.append("host: the clock was set")
        return changed


class World:
    """The bait. Create it with `world()`."""

    def __init__(self, folder: Path) -> None:
        self.token = secrets.token_hex(8)
        self.secret = f"secret-{secrets.token_hex(16)}"
        self.folder = folder
        folder.chmod(0o777)
        self._canary = folder / "canary"
        self._canary.write_text(self.secret)
        self._canary.chmod(0o666)
        self._shared = Path("/dev/shm") / f"rollmesh-attack-{self.token}"
        self._shared.write_text(self.secret)
        self._shared.chmod(0o666)
        self._segment = ctypes.CDLL(None).shmget(0, 4096, _IPC_CREAT | 0o666)
        self._sockets = self._listen()
        self._victim = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", "import sys; sys.stdin.read()", self.secret],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        """Process that ends with this one in any case."""

    def _listen(self) -> dict[str, socket.socket]:
        made = {
            "tcp": socket.socket(socket.AF_INET, socket.SOCK_STREAM),
            "udp": socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
            "stream": socket.socket(socket.AF_UNIX, socket.SOCK_STREAM),
            "datagram": socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM),
            "path": socket.socket(socket.AF_UNIX, socket.SOCK_STREAM),
        }
        for name, address in (("tcp", ("127.0.0.1", 0)), ("udp", ("127.0.0.1", 0))):
            made[name].bind(address)
        for name in ("stream", "datagram"):
            made[name].bind(f"\0rollmesh-attack-{name}-{self.token}")
        made["path"].bind(str(self.folder / "socket"))
        (self.folder / "socket").chmod(0o777)
        for name, bound in made.items():
            bound.setblocking(False)
            if name in ("tcp", "stream", "path"):
                bound.listen(4)
        return made

    def facts(self) -> dict[str, object]:
        """Facts for the attacker."""
        return {
            "CANARY": str(self._canary),
            "FOLDER": str(self.folder),
            "SHARED": str(self._shared),
            "SEGMENT": self._segment,
            "TCP_PORT": self._sockets["tcp"].getsockname()[1],
            "UDP_PORT": self._sockets["udp"].getsockname()[1],
            "ABSTRACT_STREAM": self._sockets["stream"].getsockname().decode(),
            "ABSTRACT_DATAGRAM": self._sockets["datagram"].getsockname().decode(),
            "UNIX_PATH": str(self.folder / "socket"),
            "VICTIM_PID": self._victim.pid,
            "SERVICE_PID": os.getpid(),
            "REPOSITORY": str(ROOT),
            "TOKEN": self.token,
        }

    def look(self) -> Sights:
        """Drain the packets that arrived at the sockets."""
        return Sights(
            files={str(path): _seen(path) for path in sorted(self.folder.rglob("*"))},
            shared_memory=_seen(self._shared),
            received=sum(_drain(bound) for bound in self._sockets.values()),
            victim_alive=self._victim.poll() is None and _state(self._victim.pid) not in ("T", "Z"),
            host_name=socket.gethostname(),
            our_mounts=Path("/proc/self/mounts").read_text().count(self.token),
            strays=tuple(str(path) for path in _strays(self.token)),
            clock_offset_s=time.time() - time.monotonic(),
        )

    def close(self) -> None:
        self._victim.send_signal(signal.SIGKILL)
        self._victim.communicate()
        for bound in self._sockets.values():
            bound.close()
        ctypes.CDLL(None).shmctl(self._segment, _IPC_RMID, None)
        self._shared.unlink(missing_ok=True)


@contextlib.contextmanager
def world() -> Iterator[World]:
    """Yield a world for one run and remove it afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="rollmesh-attack-"))
    made = World(folder)
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(folder, ignore_errors=True)


def _seen(path: Path) -> tuple[bytes, int]:
    try:
        return (path.read_bytes() if path.is_file() else b""), path.lstat().st_mode
    except OSError:
        return b"gone", 0


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def _drain(bound: socket.socket) -> int:
    """Return the number of connections or datagrams since the last call."""
    count = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            if bound.type == socket.SOCK_STREAM:
                bound.accept()[0].close()
            else:
                bound.recv(1)
            count += 1
    return count


def _strays(token: str) -> Iterator[Path]:
    """Return files with our token in their names, in directories where attackers would leave them."""
    for folder in ("/tmp", "/dev/shm", "/var/tmp", "/dev", "/etc", "/usr/lib", "/run", str(ROOT)):
        yield from sorted(Path(folder).glob(f"*stray-{token}*"))
