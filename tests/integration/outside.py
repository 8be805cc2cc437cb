"""A real HTTP server that stands for the outside: what it was asked is recorded, and it misbehaves by path."""

from __future__ import annotations

import gzip
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_BOMB = gzip.compress(bytes(16 << 20), 1)


@dataclass
class Outside:
    """Its port, and the requests it got as (method, path, headers, body)."""

    port: int = 0
    requests: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)
    answers: dict[str, tuple[int, dict[str, str], bytes]] = field(default_factory=dict)
    """By path without query."""
    release: threading.Event = field(default_factory=threading.Event)
    """Until it is set, `/hang` does not answer."""

    @property
    def paths(self) -> list[str]:
        return [path for _, path, _, _ in self.requests]


@contextmanager
def outside(tls: ssl.SSLContext | None = None) -> Iterator[Outside]:
    """Serves until the block ends."""
    layout = Outside()
    layout.answers = {
        "/page": (200, {"Content-Type": "text/plain", "Set-Cookie": "a=b", "Keep-Alive": "timeout=5"}, b"hello"),
        "/large": (200, {}, b"x" * (1 << 20)),
        "/bomb": (200, {"Content-Encoding": "gzip"}, _BOMB),
        "/zipped": (200, {"Content-Encoding": "gzip"}, gzip.compress(b"unpacked")),
        "/odd": (200, {"Content-Encoding": "br"}, b"?"),
        "/loop": (302, {"Location": "/loop"}, b""),
    }

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            layout.requests.append((self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body))
            if self.path == "/hang":
                layout.release.wait(30)
                return
            status, headers, content = layout.answers.get(self.path.partition("?")[0], (404, {}, b"nothing here"))
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_HEAD = do_POST = do_PUT = _answer

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        layout.port = server.server_address[1]
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield layout
        finally:
            layout.release.set()
            server.shutdown()
            thread.join()
