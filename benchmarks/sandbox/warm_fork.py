"""The fastest possible execution: a warm interpreter forks, the child runs the code and exits. NO ISOLATION.

It is a separate program (`python -I -S warm_fork.py FD MODULE...`) that imports only the standard library, so that it
is as small as a zygote. It receives one packet per execution, with the socket of its client attached. The child reads
source text until the client shuts down its side, and returns the output of the code.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import os
import select
import socket
import sys

CODE_BYTES_MAX = 1 << 16


def main() -> None:
    for name in sys.argv[2:]:
        importlib.import_module(name)
    control = socket.socket(fileno=int(sys.argv[1]))
    gc.collect()
    gc.freeze()
    control.send(b"ready")
    _serve(control)


def _serve(control: socket.socket) -> None:
    poll = select.poll()
    poll.register(control, select.POLLIN)
    children: dict[int, int] = {}
    while True:
        for fd, _ in poll.poll():
            if (pid := children.pop(fd, None)) is not None:
                os.waitpid(pid, 0)
                poll.unregister(fd)
                os.close(fd)
                continue
            data, fds, _, _ = socket.recv_fds(control, 16, 1)
            if not data:
                return
            pid = os.fork()
            if pid == 0:
                _run(socket.socket(fileno=fds[0]))
            os.close(fds[0])
            pidfd = os.pidfd_open(pid)
            children[pidfd] = pid
            poll.register(pidfd, select.POLLIN)


def _run(client: socket.socket) -> None:
    printed = io.StringIO()
    try:
        code = client.recv(CODE_BYTES_MAX)
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})  # noqa: S102 - the bench's own one line
        client.sendall(printed.getvalue().encode())
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
