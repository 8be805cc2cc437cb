"""External retrieval and its records, against a real server: requests, records, and replay without requests."""

from __future__ import annotations

import json
import sqlite3
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from rollmesh.app.certificates import make_certificates
from rollmesh.services.sandbox.egress.addresses import resolve_by_dns
from rollmesh.services.sandbox.egress.config import EgressConfig, EgressRule
from rollmesh.services.sandbox.egress.exchange import EgressReply, EgressRequest
from rollmesh.services.sandbox.egress.ports import make_proxy
from rollmesh.services.sandbox.egress.proxy import EgressClient, Proxy
from rollmesh.services.sandbox.egress.retrieval_config import CacheConfig, RetrievalConfig
from rollmesh.shared.clock import SystemClock
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.errors import ConfigError

from .outside import Outside, outside

HOST = "engine.test"
CLIENT = EgressClient(session="s")


@pytest.fixture
def layout() -> Iterator[Outside]:
    with outside() as made:
        results = [
            {"link": "https://a.test/", "name": "A", "text": "x" * 900},
            "odd",
            {"name": "no link"},
            {"link": "https://b.test/"},
        ]
        found = json.dumps({"web": {"results": results}}).encode()
        made.answers["/search"] = (200, {"Content-Type": "application/json"}, found)
        made.answers["/html"] = (200, {"Content-Type": "text/html; charset=latin-1"}, "<p>caf\xe9".encode("latin-1"))
        made.answers["/image"] = (200, {"Content-Type": "image/png"}, b"\x89PNG")
        made.answers["/moved"] = (301, {"Location": "/html#part"}, b"")
        made.answers["/inside"] = (302, {"Location": f"http://inside.test:{made.port}/secret"}, b"")
        made.answers["/broken"] = (503, {}, b"later")
        yield made


def config(layout: Outside, search: str = "/search", **changes: Any) -> EgressConfig:
    base = f"http://{HOST}:{layout.port}"
    fields = {"results": "web.results", "url_field": "link", "title_field": "name", "text_field": "text"}
    endpoint = Extension("endpoint", {"url": f"{base}{search}?q={{query}}&n={{count}}", **fields})
    mine = EgressRule(host=HOST, schemes=("http",), ports=(layout.port,), allow_private=True, methods=("GET", "POST"))
    inside = EgressRule(host="inside.test", schemes=("http",), ports=(layout.port,))
    return EgressConfig(
        rules=(mine, inside),
        addresses={HOST: ("127.0.0.1",), "inside.test": ("127.0.0.1",)},
        retrieval=RetrievalConfig(backend=endpoint),
        **changes,
    )


@asynccontextmanager
async def proxy(folder: Path, made: EgressConfig) -> AsyncIterator[Proxy]:
    opened = make_proxy("web", made, folder, clock=SystemClock(), resolver=resolve_by_dns)
    try:
        yield opened
    finally:
        opened.close()


async def ask(opened: Proxy, target: str, method: str = "GET") -> EgressReply:
    async with opened.answering(CLIENT, EgressRequest(method=method, target=target)) as reply:
        return reply


async def browse(opened: Proxy, layout: Outside, path: str) -> EgressReply:
    return await ask(opened, "/browse?url=" + quote(f"http://{HOST}:{layout.port}{path}", safe=""))


async def test_search_maps_what_the_endpoint_says(tmp_path: Path, layout: Outside) -> None:
    async with proxy(tmp_path, config(layout)) as opened:
        reply = await ask(opened, "/search?q=a%20%26n%3D9%20%C3%A9")
    assert json.loads(reply.body)["results"] == [
        {"id": "https://a.test/", "url": "https://a.test/", "title": "A", "snippet": "x" * 300},
        {"id": "https://b.test/", "url": "https://b.test/", "title": "", "snippet": ""},
    ]
    assert layout.paths == ["/search?q=a%20%26n%3D9%20%C3%A9&n=5"], "the query can't add parameters"


@pytest.mark.parametrize("answer", [b"[]", b"{}", b'{"web": 3}', b'{"web": {"results": {}}}', b"[" * 100_000, b"\xff"])
async def test_endpoint_that_answers_nonsense_is_an_upstream_fault(
    tmp_path: Path, layout: Outside, answer: bytes
) -> None:
    layout.answers["/search"] = (200, {}, answer)
    async with proxy(tmp_path, config(layout)) as opened:
        reply = await ask(opened, "/search?q=x")
    assert (reply.status, reply.refused_by) == (502, "upstream")


async def test_pages_are_followed_checked_and_text(tmp_path: Path, layout: Outside) -> None:
    async with proxy(tmp_path, config(layout, redirects_max=3)) as opened:
        page = json.loads((await browse(opened, layout, "/moved")).body)["page"]
        assert (page["text"], page["content_type"]) == ("<p>caf\xe9", "text/html")
        refused = {
            path: (await browse(opened, layout, path)).refused_by
            for path in ("/inside", "/loop", "/image", "/no", "/broken")
        }
        assert refused == {
            "/inside": "address", "/loop": "redirects", "/image": "content", "/no": "not_found", "/broken": "upstream",
        }  # fmt: skip
    assert "/secret" not in layout.paths


async def test_recorded_answers_are_replayed_without_asking(tmp_path: Path, layout: Outside) -> None:
    async with proxy(tmp_path, config(layout, cache=CacheConfig(mode="on"))) as opened:
        first = [
            await ask(opened, "/search?q=x"),
            await browse(opened, layout, "/html"),
            await browse(opened, layout, "/no"),
        ]
        asked = len(layout.requests)
        layout.answers.clear()
        again = [
            await ask(opened, "/search?q=x"),
            await browse(opened, layout, "/html"),
            await browse(opened, layout, "/no"),
        ]
        assert [reply.body for reply in again] == [reply.body for reply in first]
        assert [reply.cached for reply in again] == [True, True, False]
        assert again[2].refused_by == "not_found"
        assert (asked, len(layout.requests)) == (3, 3)
    async with proxy(tmp_path, config(layout, cache=CacheConfig(mode="only"))) as opened:
        assert (await ask(opened, "/search?q=x")).body == first[0].body
        assert (await ask(opened, "/search?q=y")).refused_by == "not_recorded"
        assert (await ask(opened, f"http://{HOST}:{layout.port}/page", "POST")).refused_by == "not_recorded"
    assert len(layout.requests) == 3


async def test_what_fails_or_changes_things_is_not_recorded(tmp_path: Path, layout: Outside) -> None:
    async with proxy(tmp_path, config(layout, cache=CacheConfig(mode="on"))) as opened:
        target = f"http://{HOST}:{layout.port}"
        for path, method in (("/broken", "GET"), ("/page", "POST"), ("/page", "GET")):
            for _ in range(2):
                await ask(opened, target + path, method)
    assert layout.paths == ["/broken", "/broken", "/page", "/page", "/page"], "only the GET that succeeded"


async def test_records_of_another_policy_are_not_this_ones(tmp_path: Path, layout: Outside) -> None:
    async with proxy(tmp_path, config(layout, cache=CacheConfig(mode="on"))) as opened:
        await ask(opened, "/search?q=x")
        await ask(opened, f"http://inside.test:{layout.port}/page")
    async with proxy(tmp_path, config(layout, search="/search2", cache=CacheConfig(mode="only"))) as opened:
        assert (await ask(opened, "/search?q=x")).refused_by == "not_recorded"


async def test_cache_stays_within_its_bytes_and_keeps_what_is_used(tmp_path: Path, layout: Outside) -> None:
    layout.answers |= {f"/{n}": (200, {}, b"x" * 10_000) for n in range(6)}
    async with proxy(tmp_path, config(layout, cache=CacheConfig(mode="on", bytes_max=35_000))) as opened:
        for n in (0, 1, 0, 2, 0, 3, 0, 4, 0):
            await ask(opened, f"http://{HOST}:{layout.port}/{n}")
    assert layout.paths == ["/0", "/1", "/2", "/3", "/4"]
    with closing(sqlite3.connect(tmp_path / "web.records")) as store:
        kept = {row[0][-2:] for row in store.execute("SELECT url FROM records")}
        (total,) = store.execute("SELECT bytes FROM totals").fetchone()
        (summed,) = store.execute("SELECT sum(bytes) FROM records").fetchone()
    assert kept == {"/0", "/3", "/4"}
    assert total == summed <= 35_000


async def test_broken_cache_file_stops_the_start(tmp_path: Path, layout: Outside) -> None:
    for mode, content in (("only", None), ("on", b"not a database" * 100)):
        if content is not None:
            (tmp_path / "web.records").write_bytes(content)
        with pytest.raises(ConfigError, match="cannot be opened"):
            async with proxy(tmp_path, config(layout, cache=CacheConfig(mode=mode))):  # type: ignore[arg-type]
                pass


async def test_unread_responses_are_bounded_together(tmp_path: Path, layout: Outside) -> None:
    layout.answers["/much"] = (200, {}, b"x" * 60_000)
    made = config(layout, response_bytes_max=100_000, untaken_bytes_max=100_000)
    request = EgressRequest(method="GET", target=f"http://{HOST}:{layout.port}/much")
    async with proxy(tmp_path, made) as opened:
        async with opened.answering(CLIENT, request) as held, opened.answering(CLIENT, request) as refused:
            assert (held.status, refused.status, refused.refused_by) == (200, 503, "busy")
        async with opened.answering(CLIENT, request) as again:
            assert again.status == 200


async def test_key_that_is_no_header_is_not_quoted(tmp_path: Path, layout: Outside) -> None:
    key = tmp_path / "key"
    for content in ("s3cret\r\nX: y", "s3cret\x00", "s3cr\u00e9t"):
        key.write_text(content)
        rule = EgressRule(
            host=HOST,
            schemes=("http",),
            ports=(layout.port,),
            allow_private=True,
            header_files={"Authorization": str(key)},
        )
        made = EgressConfig(rules=(rule,), addresses={HOST: ("127.0.0.1",)})
        async with proxy(tmp_path, made) as opened:
            reply = await ask(opened, f"http://{HOST}:{layout.port}/page")
        assert reply.refused_by == "upstream"
        assert b"s3cr" not in reply.body
    assert layout.requests == []


async def test_tls_is_spoken_with_a_checked_certificate(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "tls", hosts=[HOST])
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(made.certificate, made.key)
    with outside(tls) as secure:
        rules = tuple(EgressRule(host=host, ports=(secure.port,), allow_private=True) for host in (HOST, "other.test"))
        addresses: dict[str, tuple[str, ...]] = {HOST: ("127.0.0.1",), "other.test": ("127.0.0.1",)}
        trusting = EgressConfig(rules=rules, addresses=addresses, ca_file=str(made.ca))
        async with proxy(tmp_path, trusting) as opened:
            assert (await ask(opened, f"https://{HOST}:{secure.port}/page")).body == b"hello"
            other = await ask(opened, f"https://other.test:{secure.port}/page")
            assert (other.refused_by, b"certificate" in other.body) == ("upstream", True)
        async with proxy(tmp_path, EgressConfig(rules=rules, addresses=addresses)) as opened:
            unknown = await ask(opened, f"https://{HOST}:{secure.port}/page")
            assert (unknown.refused_by, b"certificate" in unknown.body) == ("upstream", True)
    assert secure.paths == ["/page"]
