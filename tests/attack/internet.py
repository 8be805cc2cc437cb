"""The external network of a session with egress: a real web server on loopback, in a separate process, and its received
requests.

It has an allowed port and a forbidden one, which only a breach can reach. On the allowed port `/open` is for every
policy; `/inner` is for a policy other than the attacker's and holds a secret. Run as a script this module is the
server: standard library only, bounded, one line of JSON for each line of input.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from secrets import token_hex
from typing import ClassVar

_SMUGGLED = ("authorization", "cookie", "proxy-authorization", "upgrade", "x-smuggled")
"""Headers that the proxy never forwards."""
_BREACHES_MAX = 20
_MEMORY_BYTES = 1 << 30
_ENDLESS_PIECES = 4096


class Internet:
    """The server's process. Create it with `internet()`."""

    def __init__(self) -> None:
        self.secret = f"inner-{token_hex(16)}"
        command = [sys.executable, "-I", "-S", __file__, self.secret]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.allowed_port, self.forbidden_port = json.loads(self._line())

    def facts(self) -> dict[str, object]:
        """Facts for the attacker."""
        return {"ALLOWED_PORT": self.allowed_port, "FORBIDDEN_PORT": self.forbidden_port}

    def look(self) -> tuple[int, list[str]]:
        """Return the number of requests, and the requests that no session may make."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        num_requests, breaches = json.loads(self._line())
        return num_requests, breaches

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the web server of the attacks has ended"
        return line


@contextlib.contextmanager
def internet() -> Iterator[Internet]:
    """Yield a web server for one run."""
    made = Internet()
    try:
        yield made
    finally:
        made.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64
    requests = 0
    breaches: ClassVar[list[str]] = []
    secret = b""
    forbidden_port = 0

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors of connections that the proxy closes after a refusal."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 10

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        _Server.requests += 1
        if why := self._breach(body):
            _Server.breaches.append(f"{why}: {self.command} {self.path[:100]}")
            del _Server.breaches[:-_BREACHES_MAX]
        path = self.path.partition("?")[0]
        if path == "/open/endless":
            self._endless()
        elif path == "/open/hang":
            self.rfile.read(1)  # until the proxy closes the connection
        else:
            self._send(*self._content(path))

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_OPTIONS = do_PATCH = _answer

    def _breach(self, body: bytes) -> str:
        if self.server.server_address[1] == _Server.forbidden_port:
            return "the forbidden port"
        if not self.path.startswith(("/open/", "/inner/")):
            return "a forbidden path"
        if self.command not in ("GET", "HEAD", "POST"):
            return "a forbidden method"
        smuggled = [name for name in _SMUGGLED if name in self.headers]
        return f"headers {smuggled}" if smuggled else ""

    def _content(self, path: str) -> tuple[int, dict[str, str], bytes]:
        forbidden = f"http://127.0.0.1:{_Server.forbidden_port}/"
        match path:
            case "/open/page":
                return 200, {"Content-Type": "text/plain"}, b"hello"
            case "/open/away":
                return 302, {"Location": forbidden}, b""
            case "/open/down":
                return 302, {"Location": "/private"}, b""
            case "/open/foreign":
                return 200, {"Content-Type": "text/pl\xe4in"}, b"hello"
            case "/open/split":
                return 200, {"Content-Type": "text/plain\rX-Refused-By: forged"}, b"hello"
            case "/open/large":
                return 200, {}, bytes(1 << 20)
            case "/open/bomb":
                return 200, {"Content-Encoding": "gzip"}, gzip.compress(bytes(16 << 20), 1)
            case "/inner/secret":
                return 200, {}, _Server.secret
        return 404, {}, b"nothing here"

    def _send(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _endless(self) -> None:
        self.send_response(200)
        self.end_headers()
        for _ in range(_ENDLESS_PIECES):
            self.wfile.write(bytes(1 << 16))

    def log_message(self, format: str, *args: object) -> None:
        pass


def _serve(secret: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    servers = [_Server(("127.0.0.1", 0), _Handler) for _ in range(2)]
    _Server.secret, _Server.forbidden_port = secret.encode(), servers[1].server_address[1]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    print(json.dumps([server.server_address[1] for server in servers]), flush=True)
    for _ in sys.stdin:
        print(json.dumps([_Server.requests, _Server.breaches]), flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1])
