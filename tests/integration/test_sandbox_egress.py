"""Egress from real jails to a real server: allowed requests arrive, and all others are refused by their rule."""

from __future__ import annotations

import json
import logging
import os
import socket
import textwrap
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollmesh.sandbox_runtime.program import Program
from rollmesh.services.sandbox.config import ProfileConfig, SandboxConfig
from rollmesh.services.sandbox.egress.config import EgressConfig, EgressRule
from rollmesh.services.sandbox.engine import RunOutcome
from rollmesh.services.sandbox.engines.jail_engine import JailEngine
from rollmesh.shared.domain.ids import SeededIds

from .outside import Outside, outside

HOST = "allowed.test"
PRELUDE = """
import socket, os, json
from rollmesh.sandbox_runtime import egress

def get(target, **options):
    try:
        answer = egress.ask(target, **options)
    except egress.EgressError as error:
        return str(error)
    return f"{answer.status} {answer.body[:50].decode()}"

def raw(data, finish=True):
    link = egress.connect()
    try:
        link.sendall(data)
    except BrokenPipeError:
        pass
    if finish:
        link.shutdown(socket.SHUT_WR)
    got = b""
    try:
        while piece := link.recv(65536):
            got += piece
    except ConnectionResetError:
        pass
    return got.decode()
"""


@pytest.fixture
def layout() -> Iterator[Outside]:
    with outside() as made:
        yield made


def policy(layout: Outside, *rules: EgressRule, **changes: Any) -> EgressConfig:
    addresses: dict[str, tuple[str, ...]] = {
        HOST: ("127.0.0.1",),
        "other.test": ("127.0.0.1",),
        "public.test": ("127.0.0.1",),
    }
    usual = EgressRule(host=HOST, schemes=("http",), ports=(layout.port,), allow_private=True)
    return EgressConfig(rules=rules or (usual,), addresses=addresses, **changes)


@asynccontextmanager
async def jail(folder: Path, egress: EgressConfig | None) -> AsyncIterator[JailEngine]:
    profile = ProfileConfig(prelude=PRELUDE, egress="" if egress is None else "web", limits={"call_s": 8.0})
    config = SandboxConfig(profiles={"python": profile}, egress={} if egress is None else {"web": egress})
    engine = JailEngine(config, state_dir=folder, ids=SeededIds(os.getpid()))
    await engine.start()
    try:
        await engine.open("s", "python", engine.limits("python"))
        yield engine
    finally:
        await engine.close()


async def run(engine: JailEngine, code: str, session_id: str = "s") -> str:
    result = await engine.run(session_id, Program(code=textwrap.dedent(code)), 8.0)
    assert result.outcome is RunOutcome.OK, result
    return result.result


async def test_allowed_request_arrives_and_its_answer_comes_back(tmp_path: Path, layout: Outside) -> None:
    async with jail(tmp_path, policy(layout)) as engine:
        url = f"http://{HOST}:{layout.port}/page?q=1"
        assert await run(engine, f"get({url!r})") == repr("200 hello")
        code = f"""
            import os
            children = []
            for _ in range(3):
                if (pid := os.fork()) == 0:
                    os._exit(0 if get({url!r}) == "200 hello" else 1)
                children.append(pid)
            [os.waitpid(pid, 0)[1] for pid in children]
        """
        assert await run(engine, code) == "[0, 0, 0]", "processes of a session share its port"
    assert layout.paths == ["/page?q=1"] * 4


async def test_headers_and_keys_of_each_side_stay_there(tmp_path: Path, layout: Outside) -> None:
    key = tmp_path / "key"
    key.write_text("Bearer s3cret\n")
    rule = EgressRule(
        host=HOST, schemes=("http",), ports=(layout.port,), allow_private=True, header_files={"Authorization": str(key)}
    )
    async with jail(tmp_path / "state", policy(layout, rule)) as engine:
        sent = {
            "Cookie": "c",
            "Authorization": "mine",
            "Proxy-Authorization": "x",
            "X-Odd": "y",
            "Accept": "text/plain",
        }
        code = f"sorted(egress.ask('http://{HOST}:{layout.port}/page', headers={sent!r}).headers)"
        assert await run(engine, code) == repr(["connection", "content-length", "content-type"])
        assert "s3cret" not in await run(
            engine, "str([open(f).read() for f in os.listdir('.')]) + str(dict(os.environ))"
        )
    _, _, headers, _ = layout.requests[0]
    assert headers["authorization"] == "Bearer s3cret"
    assert headers["accept"] == "text/plain"
    assert headers["host"] == f"{HOST}:{layout.port}"
    assert not {"cookie", "proxy-authorization", "x-odd"} & set(headers)


OUTSIDE_THE_POLICY = (
    ("http://other.test:{port}/page", "host"),
    (f"http://sub.{HOST}:{{port}}/page", "host"),
    (f"https://{HOST}:{{port}}/page", "scheme"),
    (f"file://{HOST}/etc/passwd", "scheme"),
    (f"http://{HOST}:22/page", "port"),
    ("http://127.0.0.1:{port}/page", "ip_literal"),
    ("http://127.1:{port}/page", "ip_literal"),
    ("http://2130706433:{port}/page", "ip_literal"),
    ("http://0x7f000001:{port}/page", "ip_literal"),
    ("http://[::1]:{port}/page", "ip_literal"),
    (f"http://user:pw@{HOST}:{{port}}/page", "malformed"),
    (f"http://{HOST}:{{port}}\\\\@other.test/page", "malformed"),
    (f"http://{HOST}:{{port}}/page#x", "malformed"),
    (f"http://{HOST}:{{port}}/large", "response_bytes"),
    (f"http://{HOST}:{{port}}/bomb", "response_bytes"),
    (f"http://{HOST}:{{port}}/odd", "encoding"),
    ("/search?q=x", "not_found"),
)


async def test_request_outside_the_policy_is_refused_by_its_rule(tmp_path: Path, layout: Outside) -> None:
    async with jail(tmp_path, policy(layout, response_bytes_max=100_000)) as engine:
        for template, rule in OUTSIDE_THE_POLICY:
            said = await run(engine, f"get({template.format(port=layout.port)!r})")
            assert f"egress refused by rule `{rule}` of policy `web`" in said, template
    assert layout.paths == ["/large", "/bomb", "/odd"]


async def test_private_address_needs_its_exception_and_link_local_has_none(tmp_path: Path, layout: Outside) -> None:
    public = EgressRule(host="public.test", schemes=("http",), ports=(layout.port,))
    meta = EgressRule(host="meta.test", schemes=("http",), ports=(layout.port,), allow_private=True)
    config = policy(layout, public, meta)
    config = EgressConfig(rules=config.rules, addresses={**config.addresses, "meta.test": ("169.254.169.254",)})
    async with jail(tmp_path, config) as engine:
        for host in ("public.test", "meta.test"):
            said = await run(engine, f"get('http://{host}:{layout.port}/page')")
            assert "refused by rule `address`" in said
    assert layout.requests == []


async def test_redirect_is_an_answer_and_is_checked_when_followed(tmp_path: Path, layout: Outside) -> None:
    layout.answers["/away"] = (302, {"Location": f"http://127.0.0.1:{layout.port}/page"}, b"")
    async with jail(tmp_path, policy(layout)) as engine:
        code = f"""
            answer = egress.ask("http://{HOST}:{layout.port}/away")
            (answer.status, get(answer.headers["location"]))
        """
        said = await run(engine, code)
        assert said.startswith("(302, ")
        assert "`ip_literal`" in said
    assert layout.paths == ["/away"]


NO_SINGLE_PLAIN_REQUEST = (
    ("b'GARBAGE\\r\\n\\r\\n'", "400"),
    ("b'GET http://allowed.test/ HTTP/1.1\\r\\n\\r\\n'", "400"),  # no Host
    ("b'GET / HTTP/1.1\\r\\nHost: a\\r\\nContent-Length: x\\r\\n\\r\\n'", "400"),
    ("b'GET / HTTP/1.1\\r\\nHost: a\\r\\nContent-Length: 1\\r\\nContent-Length: 2\\r\\n\\r\\nab'", "400"),
    ("b'POST / HTTP/1.1\\r\\nHost: a\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\nZZ\\r\\n'", "400"),
    ("b'GET / HTTP/1.1\\r\\nHost: a\\r\\nX: ' + b'x' * 100_000", "431"),
    ("b'POST / HTTP/1.1\\r\\nHost: a\\r\\nContent-Length: 999999999\\r\\n\\r\\n'", "413"),
    (
        "b'POST / HTTP/1.1\\r\\nHost: a\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n' + (b'8000\\r\\n' + b'x' * 0x8000 + b'\\r\\n') * 3",
        "413",
    ),
    ("b'CONNECT allowed.test:443 HTTP/1.1\\r\\nHost: allowed.test\\r\\n\\r\\n'", "405"),
    ("b'GET / HTTP/1.1\\r\\nHost: a\\r\\n\\r\\nGET / HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n'", "400"),
    ("b'POST / HTTP/1.1\\r\\nHost: a\\r\\nExpect: 100-continue\\r\\nContent-Length: 5\\r\\n\\r\\n'", "400"),
)


async def test_bytes_that_are_no_single_plain_request_are_refused(tmp_path: Path, layout: Outside) -> None:
    async with jail(tmp_path, policy(layout)) as engine:
        for data, status in NO_SINGLE_PLAIN_REQUEST:
            said = await run(engine, f"raw({data})")
            assert said[1:].startswith(f"HTTP/1.1 {status} "), (data, said)
            assert "egress refused by rule" in said
        assert "hello" in await run(engine, f"get('http://{HOST}:{layout.port}/page')"), "the port still serves"
    assert layout.paths == ["/page"]


async def test_headers_in_foreign_letters_pass_as_they_came(tmp_path: Path, layout: Outside) -> None:
    layout.answers["/foreign"] = (302, {"Location": "/caf\xe9"}, b"")
    async with jail(tmp_path, policy(layout)) as engine:
        code = f"raw(b'GET http://{HOST}:{layout.port}/page HTTP/1.1\\r\\nHost: a\\r\\nAccept: \\xe9\\r\\n\\r\\n')"
        assert (await run(engine, code))[1:].startswith("HTTP/1.1 200 ")
        code = f"egress.ask('http://{HOST}:{layout.port}/foreign').headers['location']"
        assert await run(engine, code) == repr("/caf\xe9")
    assert layout.requests[0][2]["accept"] == "\xe9"


async def test_slow_request_and_unread_answer_cost_only_their_connection(tmp_path: Path, layout: Outside) -> None:
    layout.answers["/much"] = (200, {}, b"x" * (1 << 20))
    async with jail(tmp_path, policy(layout, request_s=0.3, connections_max=2)) as engine:
        said = await run(engine, "raw(b'GET / HTTP/1.1\\r\\nHost', finish=False)")
        assert said.startswith("'HTTP/1.1 408 ")
        code = f"""
            link = egress.connect()
            link.sendall(b"GET http://{HOST}:{layout.port}/much HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n")
            import time
            end = time.monotonic() + 5
            while time.monotonic() < end and "200" not in get("http://{HOST}:{layout.port}/page"):
                pass
            import select
            hung_up = select.poll()
            hung_up.register(link, 0)
            len(hung_up.poll(7000)), len(link.recv(1 << 20, socket.MSG_WAITALL)) < 1 << 20
        """
        assert await run(engine, code) == "(1, True)", "cut after 0.3 s unread"


async def test_connections_and_requests_of_a_session_are_counted(tmp_path: Path, layout: Outside) -> None:
    async with jail(tmp_path, policy(layout, requests_max=6, connections_max=2)) as engine:
        code = f"""
            held = [egress.connect() for _ in range(2)]
            said = get("http://{HOST}:{layout.port}/page")
            del held
            said
        """
        assert "rule `requests`" in await run(engine, code)
        code = f"[get('http://{HOST}:{layout.port}/page') for _ in range(9)][-2:]"
        last = await run(engine, code)
        assert "the session's egress has ended" in last
        await engine.open("t", "python", engine.limits("python"))
        assert await run(engine, f"get('http://{HOST}:{layout.port}/page')", "t") == repr("200 hello")
    assert len(layout.requests) <= 4


async def test_tenants_rate_is_bounded(tmp_path: Path, layout: Outside) -> None:
    async with jail(tmp_path, policy(layout, rate_per_s=0.001, burst=2)) as engine:
        said = await run(engine, f"str([get('http://{HOST}:{layout.port}/page') for _ in range(3)])")
        assert said.count("200 hello") == 2
        assert "rule `rate`" in said
        await engine.open("t", "python", engine.limits("python"), tenant="another")
        assert await run(engine, f"get('http://{HOST}:{layout.port}/page')", "t") == repr("200 hello")


async def test_host_that_does_not_answer_is_refused_in_time(tmp_path: Path, layout: Outside) -> None:
    async with jail(tmp_path, policy(layout, timeout_s=0.3)) as engine:
        assert "rule `timeout`" in await run(engine, f"get('http://{HOST}:{layout.port}/hang')")


async def test_jail_with_egress_has_no_other_way_out(tmp_path: Path, layout: Outside) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0rollmesh-egress-{os.getpid()}")
    listener.listen()
    code = f"""
        def attempt(action):
            try:
                action()
            except OSError as error:
                return type(error).__name__
            return "did it"

        def over_port():
            port = socket.socket(fileno=os.dup(4))
            port.connect("\\0rollmesh-egress-{os.getpid()}")

        [attempt(lambda: socket.create_connection(("127.0.0.1", {layout.port}))),
         attempt(lambda: socket.socket(socket.AF_UNIX)),
         attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)),
         attempt(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)),
         attempt(over_port),
         attempt(lambda: egress.connect().connect("\\0rollmesh-egress-{os.getpid()}")),
         attempt(lambda: egress.connect().connect("/run/docker.sock"))]
    """
    with listener:
        async with jail(tmp_path, policy(layout)) as engine:
            said = await run(engine, code)
    assert "did it" not in said, said
    assert layout.requests == []


async def test_profile_without_policy_has_no_port(tmp_path: Path, layout: Outside) -> None:
    async with jail(tmp_path, None) as engine:
        assert "names no policy" in await run(engine, f"get('http://{HOST}:{layout.port}/page')")
        code = """
            def is_open(fd):
                try:
                    os.fstat(fd)
                except OSError:
                    return False
                return True
            [fd for fd in range(64) if is_open(fd)]
        """
        assert await run(engine, code) == "[0, 1, 2, 3]"


async def test_every_request_is_logged_with_the_digest_of_what_it_returned(
    tmp_path: Path, layout: Outside, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rollmesh.services.sandbox.egress.proxy")
    async with jail(tmp_path, policy(layout)) as engine:
        await run(engine, f"get('http://{HOST}:{layout.port}/page'), get('http://other.test/')")
    lines = [json.loads(record.getMessage().removeprefix("egress ")) for record in caplog.records]
    assert [(line["session"], line["outcome"], line["status"]) for line in lines] == [
        ("s", "answered", 200),
        ("s", "host", 403),
    ]
    assert lines[0]["sha256"] == "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"
    assert lines[0]["bytes"] == 5
    assert lines[0]["url"] == f"http://{HOST}:{layout.port}/page"
