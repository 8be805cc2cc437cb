"""Retrieval from external servers: a search endpoint that returns JSON, and pages. Every request passes the
allow-list."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

import msgspec

from rollmesh.services.sandbox.egress.exchange import EgressRefused, EgressReply
from rollmesh.services.sandbox.egress.retrieval.backend import Backend, Document, Hit
from rollmesh.services.sandbox.egress.retrieval_config import RetrievalConfig
from rollmesh.services.sandbox.egress.upstream import Upstream
from rollmesh.shared.config.settings import Settings
from rollmesh.shared.domain.decoding import UNDECODABLE

_CHARSET = re.compile(r"charset=\"?([A-Za-z0-9_.:-]{1,40})", re.IGNORECASE)
_TEXTS = ("text/", "application/json", "application/xhtml+xml", "application/xml")
_FIELD_CHARS_MAX = 1000
_ACCEPT_PAGE = {"accept": "text/html, text/plain;q=0.9, */*;q=0.1"}


class EndpointOptions(Settings):
    """A search endpoint that returns JSON to GET. The policy's rules must allow its URL, and that rule holds its
    key."""

    url: str
    """URL template, e.g. `https://search.internal/v1?q={query}&n={count}`. Values are percent-encoded."""
    document: str = ""
    """URL template with {id} for documents by id, if `id_field` is set. If empty, documents are not served, and pages
    are browsed by URL."""
    results: str = "results"
    """Path of the list of results in the response: keys separated by dots, e.g. `web.results`; empty if the response is
    the list."""
    id_field: str = ""
    """Key of a result's id. If empty, the URL is the id."""
    url_field: str = "url"
    """Key of a result's URL."""
    title_field: str = "title"
    """Key of a result's title; results without it have no title."""
    text_field: str = "snippet"
    """Key of a result's text, which is cut to `snippet_chars_max`."""

    def check_fields(self) -> None:
        if self.url.count("{query}") != 1 or self.url.replace("{query}", "").replace("{count}", "").count("{"):
            raise ValueError(f"`url` must contain {{query}} once, and no other field but {{count}}, got {self.url!r}")
        if self.document and self.document.count("{id}") != 1:
            raise ValueError(f"`document` must contain {{id}} once, got {self.document!r}")


class EndpointBackend(Backend):
    """A client of the search endpoint; implements `Backend`."""

    Options = EndpointOptions

    def __init__(self, *, limits: RetrievalConfig, folder: Path, upstream: Upstream, options: EndpointOptions) -> None:
        """`folder` is not used."""
        self._endpoint = options
        self._limits = limits
        self._upstream = upstream

    @property
    def digest(self) -> str:
        described = msgspec.json.encode(self._endpoint) + self._upstream.digest.encode()
        return hashlib.sha256(described).hexdigest()

    async def search(self, query: str) -> Sequence[Hit]:
        target = _filled(self._endpoint.url, query=query, count=str(self._limits.results_max))
        reply = await self._upstream.follow(target, {"accept": "application/json"})
        if reply.status != 200:
            raise EgressRefused("upstream", f"the search endpoint returned status {reply.status}")
        results = _results(reply.body, self._endpoint.results)
        return [hit for result in results if (hit := self._hit(result))][: self._limits.results_max]

    async def page(self, url: str) -> Document:
        reply = await self._upstream.follow(url, _ACCEPT_PAGE)
        if reply.status in (404, 410):
            raise EgressRefused("not_found", f"there is no page at {url}: status {reply.status}")
        if reply.status != 200:
            raise EgressRefused("upstream", f"{url} returned status {reply.status}")
        content_type = reply.headers.get("content-type", "text/plain").lower()
        if not content_type.startswith(_TEXTS):
            raise EgressRefused("content", f"{url} is not text but {content_type[:100]}")
        return Document(
            id=url, url=url, content_type=content_type.partition(";")[0].strip(), text=_text(reply, content_type)
        )

    async def document(self, doc_id: str) -> Document:
        if self._endpoint.id_field and not self._endpoint.document:
            raise EgressRefused("not_found", "this search has no documents by id; browse the URL of a result")
        if not self._endpoint.id_field:
            return await self.page(doc_id)
        return await self.page(_filled(self._endpoint.document, id=doc_id))

    def close(self) -> None:
        """Do nothing: an endpoint holds no resources."""

    def _hit(self, result: object) -> Hit | None:
        """Decode a result leniently, because the endpoint's response is untrusted. Return None without an id."""
        if not isinstance(result, Mapping):
            return None
        names = self._endpoint
        url, title, text = (_field(result, name) for name in (names.url_field, names.title_field, names.text_field))
        doc_id = _field(result, names.id_field) if names.id_field else url
        if not doc_id:
            return None
        return Hit(id=doc_id, url=url, title=title, snippet=text[: self._limits.snippet_chars_max])


def _filled(template: str, **values: str) -> str:
    for name, value in values.items():
        template = template.replace("{" + name + "}", quote(value, safe="", errors="replace"))
    return template


def _results(body: bytes, path: str) -> Sequence[object]:
    try:
        found = msgspec.json.decode(body)
    except UNDECODABLE as error:
        raise EgressRefused("upstream", f"the search endpoint did not return JSON: {error}") from error
    for key in path.split(".") if path else ():
        found = found.get(key) if isinstance(found, dict) else None
    if not isinstance(found, list):
        raise EgressRefused("upstream", f"the response of the search endpoint has no list at {path!r}")
    return found


def _field(result: Mapping[object, object], name: str) -> str:
    value = result.get(name)
    return str(value)[:_FIELD_CHARS_MAX] if isinstance(value, str | int | float) else ""


def _text(reply: EgressReply, content_type: str) -> str:
    named = _CHARSET.search(content_type)
    try:
        return reply.body.decode(named[1] if named else "utf-8", errors="replace")
    except LookupError:
        return reply.body.decode(errors="replace")
