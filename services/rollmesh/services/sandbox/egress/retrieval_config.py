"""Settings of retrieval."""

from __future__ import annotations

from typing import Literal

import msgspec


class EndpointConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A search endpoint that returns JSON to GET. The policy's rules must allow its URL, and that rule holds its key."""

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

    def __post_init__(self) -> None:
        if self.url.count("{query}") != 1 or self.url.replace("{query}", "").replace("{count}", "").count("{"):
            raise ValueError(f"url must hold {{query}} once, and no other field but {{count}}: {self.url!r}")
        if self.document and self.document.count("{id}") != 1:
            raise ValueError(f"document must hold {{id}} once: {self.document!r}")


class RetrievalConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Backend and limits of the tools `search`, `browse` and `retrieve`."""

    engine: Literal["corpus", "endpoint"]
    """`corpus`: offline documents of a file, without external requests. `endpoint`: searches and pages from external
    servers."""
    corpus: str = ""
    """JSON Lines file of {id, url, title, text}; id and text are required. Indexed once per content, by BM25 over title
    and text."""
    index_dir: str = ""
    """Directory of the index, about twice the size of the corpus. If empty, the state directory of the node."""
    endpoint: EndpointConfig | None = None
    """The search endpoint; required for engine `endpoint`."""
    results_max: int = 5
    """Maximum number of results of one search."""
    snippet_chars_max: int = 300
    """Maximum characters of the text of each result."""
    page_chars_max: int = 4000
    """Characters of a page or document that are shown at a time; the tool explains how to continue."""
    query_chars_max: int = 500
    """Maximum characters of a query; a longer one is refused."""

    def __post_init__(self) -> None:
        for name in ("results_max", "snippet_chars_max", "page_chars_max", "query_chars_max"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if (self.engine == "corpus") != bool(self.corpus) or (self.engine == "endpoint") != (self.endpoint is not None):
            raise ValueError(f"engine {self.engine} needs `{self.engine}`, and not the other's settings")


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Recorded responses, so that a repeated rollout sees what the first one saw."""

    mode: Literal["off", "on", "only"] = "off"
    """`on` records and replays; records do not expire. `only` replays: a request without a record is refused, and
    nothing is requested externally."""
    path: str = ""
    """File of the records. If empty, one per policy in the state directory of the node. Nodes of one host may share it.
    A record is valid for the configuration that created it: rules, endpoint, corpus and sizes."""
    bytes_max: int = 1 << 30
    """Maximum bytes of recorded bodies; beyond it the least recently used records are evicted."""

    def __post_init__(self) -> None:
        if self.bytes_max <= 0:
            raise ValueError(f"bytes_max must be positive, got {self.bytes_max}")
