"""Settings of retrieval."""

from __future__ import annotations

from typing import Literal

from rollmesh.shared.config.registry import Extension
from rollmesh.shared.config.settings import PositiveInt, Settings


class RetrievalConfig(Settings):
    """Backend and limits of the tools `search`, `browse` and `retrieve`."""

    backend: Extension
    """`corpus`: documents of a file, without external requests; `endpoint`: searches and pages from external servers;
    or your own."""
    results_max: PositiveInt = 5
    """Maximum number of results of one search."""
    snippet_chars_max: PositiveInt = 300
    """Maximum characters of the text of each result."""
    page_chars_max: PositiveInt = 4000
    """Characters of a page or document that are shown at a time; the tool explains how to continue."""
    query_chars_max: PositiveInt = 500
    """Maximum characters of a query; a longer one is refused."""


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
