"""The retrieval port: interface of a backend that searches and stores documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec


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


class Backend(Protocol):
    """A retrieval backend. Methods raise `EgressRefused` and end within the caller's deadline."""

    @property
    def digest(self) -> str:
        """Digest of the configuration and local data that the results depend on; part of cache keys."""
        ...

    async def search(self, query: str) -> Sequence[Hit]:
        """Return the best results first, at most `results_max`."""
        ...

    async def page(self, url: str) -> Document:
        """Return the page at a URL."""
        ...

    async def document(self, doc_id: str) -> Document:
        """Return the document with an id from a search result."""
        ...

    def close(self) -> None: ...
