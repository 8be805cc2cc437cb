"""The retrieval port: what answers searches and holds documents."""

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
    """`text/html` is turned into text inside the jail: markup from outside is hostile."""
    text: str


class Backend(Protocol):
    """An engine of retrieval. Methods raise `EgressRefused` and end within the caller's deadline."""

    @property
    def digest(self) -> str:
        """Names everything of the backend that its answers depend on, as far as it is ours: part of cache keys."""
        ...

    async def search(self, query: str) -> Sequence[Hit]:
        """Best first, at most `results_max`."""
        ...

    async def page(self, url: str) -> Document:
        """The page at a URL."""
        ...

    async def document(self, doc_id: str) -> Document:
        """The document of an id that a search gave."""
        ...

    def close(self) -> None: ...
