"""What Landlock alone prevents, in a process without any other mechanism."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rollmesh.sandbox_runtime import landlock

PREAMBLE = """
import os, socket, sys
from rollmesh.sandbox_runtime import landlock, privileges
own, other, port, parent = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
privileges.no_new_privileges()
landlock.restrict(landlock.Paths(read_only=["/usr", "/lib", "/lib64", "/etc/ld.so.cache"], devices=["/dev/null"], own=[own]))
def said(action):
    try: action()
    except OSError as error: return type(error).__name__
    return "done"
"""
ATTEMPTS = {
    "open(own + '/new', 'w').close()": ("done", 1),
    "os.mkdir(own + '/folder')": ("done", 1),
    "open('/dev/null', 'w').close()": ("done", 1),
    "os.execv('/usr/bin/true', ['true']) if os.fork() == 0 else os.wait()": ("done", 1),
    "open(other).read()": ("PermissionError", 1),
    "open(other, 'w').close()": ("PermissionError", 1),
    "os.unlink(other)": ("PermissionError", 1),
    "os.listdir('/')": ("PermissionError", 1),
    "os.mknod(own + '/device', 0o020600, 0x103)": ("PermissionError", 1),
    "os.truncate(other, 0)": ("PermissionError", 3),
    "socket.create_connection(('127.0.0.1', port), 5)": ("PermissionError", 4),
    "socket.create_server(('127.0.0.1', 0))": ("PermissionError", 4),
    "os.kill(parent, 0)": ("PermissionError", 6),
    "socket.socket(socket.AF_UNIX).connect('\\0rollmesh-test-landlock')": ("PermissionError", 6),
}


@pytest.mark.skipif(not landlock.abi(), reason="this kernel has no Landlock")
@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_landlock_alone_decides(tmp_path: Path, attempt: str) -> None:
    expected, since = ATTEMPTS[attempt]
    if landlock.abi() < since:
        pytest.skip(f"since version {since}")
    own, other = tmp_path / "own", tmp_path / "other"
    own.mkdir()
    other.write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind("\0rollmesh-test-landlock")
        abstract.listen()
        code = PREAMBLE + f"print(said(lambda: {attempt}))"
        arguments = [str(own), str(other), str(tcp.getsockname()[1]), str(os.getpid())]
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=False
        )
    assert done.stdout.strip() == expected, done.stderr
    assert other.read_text() == "secret"


def test_an_older_version_says_what_it_lacks() -> None:
    assert landlock.lacks(1).startswith("moves between directories")
    assert landlock.lacks(5) == "abstract sockets and signals"
    assert landlock.lacks(7) == ""
