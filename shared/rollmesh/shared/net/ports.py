"""TCP ports of this machine: choose free ports that stay free, and find the owner of a port.

A server whose clients reconnect after its restart needs a port that no other process takes meanwhile. The kernel gives
outgoing connections ports of the ephemeral range. A client that connects to such a port while the server is down may
get that port as its own source port: it then connects to itself, and the server finds its port in use. Ports are
therefore chosen outside that range. A chosen port is not listened on yet, and not while its server restarts: a
reservation keeps other processes of this module from choosing it. Linux only, by /proc and abstract sockets.
"""

from __future__ import annotations

import errno
import random
import socket
from pathlib import Path

_LOWEST = 10240
_TRIES_MAX = 1000
_LISTEN = "0A"
_COMMAND_CHARS_MAX = 100
_RESERVED_MAX = 256
_reserved: dict[int, socket.socket] = {}
"""Reservations of this process, oldest first. They end with the process, or when more than `_RESERVED_MAX` newer ones
were made."""


def lasting_ports(num: int, rng: random.Random | None = None) -> list[int]:
    """Return free ports on loopback, outside the ephemeral range if possible, and reserve them against other callers on
    this machine."""
    rng = rng or random.SystemRandom()
    below = range(_LOWEST, _ephemeral_begin())
    found: list[int] = []
    for attempt in range(_TRIES_MAX):
        if len(found) == num:
            return found
        wanted = rng.choice(below) if below and attempt < _TRIES_MAX // 2 else 0
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", wanted))
            except OSError:
                continue
            port = probe.getsockname()[1]
            if _reserve(port):
                found.append(port)
    raise AssertionError("no free port")


def _reserve(port: int) -> bool:
    """Reserve the port by an abstract socket of its number, which the kernel gives to one process and removes with it.
    Such sockets belong to the network namespace, as ports do. False if it is reserved already."""
    reservation = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        reservation.bind(f"\0rollmesh-port-{port}")
    except OSError:
        reservation.close()
        return False
    _reserved[port] = reservation
    while len(_reserved) > _RESERVED_MAX:
        _reserved.pop(next(iter(_reserved))).close()
    return True


def is_taken(host: str, port: int) -> bool:
    """Return whether the port is in use. OSError for an address that does not belong to this machine."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        # Old connections in TIME_WAIT do not prevent listening.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as err:
            if err.errno != errno.EADDRINUSE:
                raise
            return True
        return False


def owner_of(port: int) -> str:
    """Describe the process that has `port`, with its command if this user may read it."""
    inodes = _sockets_at(port)
    for process in Path("/proc").glob("[0-9]*"):
        if inodes & _sockets_of(process):
            return f"process {process.name} ({_command(process)})"
    return "a process of another user" if inodes else "another process"


def _ephemeral_begin() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32768


def _sockets_at(port: int) -> set[str]:
    """Return the inodes of listening sockets, or of any socket if none listens."""
    rows = []
    for name in ("tcp", "tcp6"):
        try:
            rows += [line.split() for line in Path("/proc/net", name).read_text().splitlines()[1:]]
        except OSError:
            continue
    local = [row for row in rows if int(row[1].rpartition(":")[2], 16) == port]
    listening = [row for row in local if row[3] == _LISTEN]
    return {row[9] for row in listening or local} - {"0"}


def _sockets_of(process: Path) -> set[str]:
    found = set()
    try:
        for descriptor in (process / "fd").iterdir():
            target = descriptor.readlink().name
            if target.startswith("socket:["):
                found.add(target[8:-1])
    except OSError:  # exited meanwhile, or belongs to another user
        pass
    return found


def _command(process: Path) -> str:
    try:
        words = (process / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return "ended meanwhile"
    return b" ".join(words).decode(errors="replace")[:_COMMAND_CHARS_MAX]
