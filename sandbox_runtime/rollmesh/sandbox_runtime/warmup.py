"""Execute the code paths of every session once in the zygote before the first fork.

The interpreter specializes code after a few executions, resolves names of shared libraries on first use, and fills
caches. A session inherits what the zygote has done; otherwise it costs the session time and a private copy of each page
that it touches. Only our own code runs here.
"""

from __future__ import annotations

import linecache
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rollmesh.sandbox_runtime import framing
from rollmesh.sandbox_runtime.limits import Limits
from rollmesh.sandbox_runtime.program import Program
from rollmesh.sandbox_runtime.session import answer_all

_TIMES = 20
"""More than the number of executions after which CPython 3.11 to 3.13 specialize a function."""
_CODES = ("value = 6\nprint(value * 7)", "[n for n in range(3)]", "1/0")
_WALL_S = 60.0
_SIGNALS = (signal.SIGALRM, signal.SIGPROF)


def warm_up(namespace: Mapping[str, Any]) -> None:
    """Serve a few requests repeatedly like a session, and then restore the zygote's streams and signals."""
    with _streams_and_signals_kept():
        for _ in range(_TIMES):
            _answer_requests(namespace)
    for name in [name for name in linecache.cache if name.startswith("<call ")]:
        del linecache.cache[name]


def _answer_requests(namespace: Mapping[str, Any]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for code in _CODES:
            request = {"verb": "run", "wall_s": _WALL_S, "stream": False, "files_bytes_max": 0}
            ours.sendall(framing.encode(request | Program(code=code).as_message()))
        ours.shutdown(socket.SHUT_WR)
        answer_all(theirs, namespace, Limits())


@contextmanager
def _streams_and_signals_kept() -> Iterator[None]:
    """Save and restore streams and signals, including descriptors 1 and 2: an interpreter truncates the files behind
    them, and here they are the zygote's log."""
    streams, handlers = (sys.stdout, sys.stderr), [signal.getsignal(number) for number in _SIGNALS]
    kept = [os.dup(1), os.dup(2)]
    nothing = os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        yield
    finally:
        for fd, target in zip(kept, (1, 2), strict=True):
            os.dup2(fd, target)
            os.close(fd)
        os.close(nothing)
        sys.stdout, sys.stderr = streams
        for number, handler in zip(_SIGNALS, handlers, strict=True):
            signal.signal(number, handler)
