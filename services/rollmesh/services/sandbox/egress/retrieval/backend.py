"""The retrieval port: answers searches and returns documents.

Backends are found by name, or loaded from user code as `file.py:Name`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rollmesh.shared.config.plugin import Plugin, required, required_attribute
from rollmesh.shared.config.registry import Registry


class Hit(msgspec.Struct, frozen=True, kw_only=True):
    """One result of a search."""

    id: str
    url: str = ""
    title: str = ""
    snippet: str = ""


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """A page or document, whole."""

    id: str
    url: str = ""
    title: str = ""
    content_type: str = "text/plain"
    """MIME type. `text/html` is converted to text inside the jail, because external markup is hostile."""
    text: str


class Backend(Plugin):
    """Base of retrieval backends: answers searches. Methods raise `EgressRefused` and end within the deadline of the
    caller.

    Constructed in a thread as `cls(limits=..., folder=..., upstream=..., options=...)`, or without `options` if the
    class has no `Options`. `limits` is the `RetrievalConfig`, `folder` a directory of the node for an index, and
    `upstream` the client that enforces the allow-list. It raises ConfigError if it cannot start.
    """

    @required_attribute
    def digest(self) -> str:
        """Digest of the configuration and local data that the results depend on; part of cache keys."""
        raise NotImplementedError

    @required
    async def search(self, query: str) -> Sequence[Hit]:
        """Return the best results first, at most `results_max`."""
        raise NotImplementedError

    @required
    async def page(self, url: str) -> Document:
        """Return the page at a URL."""
        raise NotImplementedError

    @required
    async def document(self, doc_id: str) -> Document:
        """Return the document with an id from a search result."""
        raise NotImplementedError

    def close(self) -> None:
        """Release resources."""


BACKENDS = Registry(
    "retrieval backend",
    {
        "corpus": "rollmesh.services.sandbox.egress.retrieval.corpus:CorpusBackend",
        "endpoint": "rollmesh.services.sandbox.egress.retrieval.endpoint:EndpointBackend",
    },
    Backend,
)
