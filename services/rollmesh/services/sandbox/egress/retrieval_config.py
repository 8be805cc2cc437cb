"""Settings of retrieval."""

from __future__ import annotations

from typing import Literal

from rollmesh.shared.settings import PositiveInt, Settings


class EndpointConfig(Settings):
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

    def check_fields(self) -> None:
        if self.url.count("{query}") != 1 or self.url.replace("{query}", "").replace("{count}", "").count("{"):
            raise ValueError(f"`url` must contain {{query}} once, and no other field but {{count}}, got {self.url!r}")
        if self.document and self.document.count("{id}") != 1:
            raise ValueError(f"`document` must contain {{id}} once, got {self.document!r}")


class RetrievalConfig(Settings):
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
    results_max: PositiveInt = 5
    """Maximum number of results of one search."""
    snippet_chars_max: PositiveInt = 300
    """Maximum characters of the text of each result."""
    page_chars_max: PositiveInt = 4000
    """Characters of a page or document that are shown at a time; the tool explains how to continue."""
    query_chars_max: PositiveInt = 500
    """Maximum characters of a query; a longer one is refused."""

    def check_fields(self) -> None:
        if (self.engine == "corpus") != bool(self.corpus) or (self.engine == "endpoint") != (self.endpoint is not None):
            raise ValueError(f"`engine` must have its own settings only: {self.engine!r} needs `{self.engine}`")


class CacheConfig(Settings):
    """Recorded responses, so that a repeated rollout sees what the first one saw."""

    mode: Literal["off", "on", "only"] = "off"
    """`on` records and replays; records do not expire. `only` replays: a request without a record is refused, and
    nothing is requested externally."""
    path: str = ""
    """File of the records. If empty, one per policy in the state directory of the node. Nodes of one host may share it.
    A record is valid for the configuration that created it: rules, endpoint, corpus and sizes."""
    bytes_max: PositiveInt = 1 << 30
    """Maximum bytes of recorded bodies; beyond it the least recently used records are evicted."""
