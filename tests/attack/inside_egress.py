"""Names for attacks in a session with egress, besides inside.py. It is the prelude of their profile, read as text;
never imported."""

import re
import select
import socket

from rollmesh.sandbox_runtime import egress


def exchange(data: bytes) -> bytes:
    """Return all received bytes for bytes sent on a new connection."""
    with egress.connect() as link:
        try:
            link.sendall(data)
            link.shutdown(socket.SHUT_WR)
        except (BrokenPipeError, ConnectionResetError):
            pass  # refused before it was sent completely; the response is available
        got = b""
        try:
            while piece := link.recv(65536):
                got += piece
        except ConnectionResetError:
            pass
    return got


def outcome_of(data: bytes) -> str:
    """Return the refusing rule, or the status and the start of the body."""
    try:
        answer = exchange(data)
    except OSError as error:
        rule = re.search("rule `([a-z_]+)`", str(error))
        return f"refused by {rule[1]}" if rule else f"{type(error).__name__}"
    head, _, body = answer.partition(b"\r\n\r\n")
    refused = re.search(rb"\r\nx-refused-by: ([a-z_]+)", head, re.IGNORECASE)
    if refused:
        return f"refused by {refused[1].decode()}"
    return f"got {head[9:12].decode()} {ascii(body[:40])[2:-1]}" if head else "nothing came"


def request(target: str | bytes, method: str = "GET", headers: bytes = b"", body: bytes = b"") -> bytes:
    """Return a request as raw bytes, unchanged by a client library."""
    target = target if isinstance(target, bytes) else target.encode()
    length = b"Content-Length: %d\r\n" % len(body) if body else b""
    return b"%s %s HTTP/1.1\r\nHost: x\r\n%s%s\r\n%s" % (method.encode(), target, headers, length, body)


def ask(label: str, target: str | bytes, method: str = "GET", headers: bytes = b"", body: bytes = b"") -> None:
    """Send a request and print the result."""
    print(label, outcome_of(request(target, method, headers, body)), flush=True)


def ask_patiently(label: str, target: str) -> None:
    """Retry while the proxy has not noticed that earlier connections were closed."""
    for _ in range(10):
        said = outcome_of(request(target))
        if said != "refused by requests":
            break
        select.select([], [], [], 0.05)
    print(label, said, flush=True)
