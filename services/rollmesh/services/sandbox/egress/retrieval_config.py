"""Configuration of retrieval."""

from __future__ import annotations

from typing import Literal

import msgspec


class EndpointConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A search endpoint that answers GET with JSON. The policy's rules must allow its URL; its key belongs into that rule."""

    url: str
    """Template, e.g. `https://search.internal/v1?q={query}&n={count}`; both are filled in percent-encoded."""
    document: str = ""
    """Template with {id} for documents by id, where `id_field` is set; empty: they are not served, pages are browsed by URL."""
    results: str = "results"
    """Where the list of results lies in the answer: keys by dots, e.g. `web.results`; empty if the answer is the list."""
    id_field: str = ""
    """Key of a result's id; empty means that its URL is its id."""
    url_field: str = "url"
    """Key of its URL."""
    title_field: str = "title"
    """Key of its title; results without one have none."""
    text_field: str = "snippet"
    """Key of its text, cut to `snippet_chars_max`."""

    def __post_init__(self) -> None:
        if self.url.count("{query}") != 1 or self.url.replace("{query}", "").replace("{count}", "").count("{"):
            raise ValueError(f"url must hold {{query}} once, and no other field but {{count}}: {self.url!r}")
        if self.document and self.document.count("{id}") != 1:
            raise ValueError(f"document must hold {{id}} once: {self.document!r}")


class RetrievalConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `search`, `browse` and `retrieve` work on."""

    engine: Literal["corpus", "endpoint"]
    """`corpus`: offline, documents of a file, nothing is asked outside. `endpoint`: searches and pages come from outside."""
    corpus: str = ""
    """JSON Lines of {id, url, title, text}; id and text are required. Indexed once per content, by BM25 over title and text."""
    index_dir: str = ""
    """Where the index is kept, about twice the corpus in size; empty means the node's state directory."""
    endpoint: EndpointConfig | None = None
    """The search endpoint."""
    results_max: int = 5
    """Results of one search."""
    snippet_chars_max: int = 300
    """Of each result."""
    page_chars_max: int = 4000
    """Of a page or document shown at a time; the tool tells how to go on."""
    query_chars_max: int = 500
    """Longest query; a longer one is refused."""

    def __post_init__(self) -> None:
        for name in ("results_max", "snippet_chars_max", "page_chars_max", "query_chars_max"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if (self.engine == "corpus") != bool(self.corpus) or (self.engine == "endpoint") != (self.endpoint is not None):
            raise ValueError(f"engine {self.engine} needs `{self.engine}`, and not the other's settings")


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Answers kept on disk, so that a repeated rollout sees what the first one saw."""

    mode: Literal["off", "on", "only"] = "off"
    """`on` records and replays; answers do not expire. `only` replays: what was not recorded is refused, nothing is asked outside."""
    path: str = ""
    """File of the records; empty means one per policy in the node's state directory. Nodes of one host may share it. Records count for
    the configuration that made them: rules, endpoint, corpus and sizes."""
    bytes_max: int = 1 << 30
    """Bodies kept; beyond it those unused for longest go."""

    def __post_init__(self) -> None:
        if self.bytes_max <= 0:
            raise ValueError(f"bytes_max must be positive, got {self.bytes_max}")
