"""Responses on disk by request, recorded once and replayed permanently. The first record of a request is kept.

SQLite runs in a separate thread; processes of one host may share a file. The size is bounded: the least recently used
records are evicted. If the disk fails, responses are served but not recorded, except in a mode that only replays
records.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import sqlite3
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from rollmesh.services.sandbox.egress.exchange import EgressRefused, EgressReply, EgressRequest
from rollmesh.services.sandbox.egress.retrieval_config import CacheConfig
from rollmesh.shared.errors import ConfigError

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_BUSY_S = 5.0
_SCHEMA = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
CREATE TABLE IF NOT EXISTS records (
  key TEXT PRIMARY KEY, url TEXT, status INTEGER, headers TEXT, body BLOB, bytes INTEGER, sha256 TEXT, used INTEGER);
CREATE INDEX IF NOT EXISTS by_use ON records (used);
CREATE INDEX IF NOT EXISTS by_digest ON records (sha256);
CREATE TABLE IF NOT EXISTS totals (one INTEGER PRIMARY KEY CHECK (one = 1), bytes INTEGER, uses INTEGER);
INSERT OR IGNORE INTO totals VALUES (1, 0, 0);
"""
_RECORD_BYTES = 512
"""Approximate bytes of a record besides its body."""
_RECORDED = (200, 404)
"""Recorded statuses. Others depend on the current state of the server."""


class Cache:
    """An open file of records. Create it with `opened`."""

    def __init__(self, config: CacheConfig, store: sqlite3.Connection) -> None:
        self._config = config
        self._store = store
        self._thread = ThreadPoolExecutor(1, "egress cache")

    @classmethod
    def opened(cls, config: CacheConfig, path: Path) -> Cache:
        """Open or create the file; in mode `only` it must exist. Blocking. Raises ConfigError."""
        path = Path(config.path or path)
        try:
            if config.mode == "only":
                store = sqlite3.connect(f"file:{path}?mode=ro", uri=True, check_same_thread=False)
                store.execute("SELECT count(*) FROM totals")
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                store = sqlite3.connect(path, timeout=_BUSY_S, check_same_thread=False)
                store.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"egress: the cache {path} cannot be opened: {error}") from error
        return cls(config, store)

    def close(self) -> None:
        """Close the file after pending writes."""
        self._thread.submit(self._store.close)
        self._thread.shutdown(wait=False)

    async def answer(
        self, digest: str, request: EgressRequest, ask: Callable[[], Awaitable[EgressReply]]
    ) -> EgressReply:
        """Return the record of a request, created by `ask` if it does not exist. `digest` identifies everything else
        that responses depend on."""
        replayed_only = self._config.mode == "only"
        if request.method != "GET" or request.body:
            if replayed_only:
                raise EgressRefused(
                    "not_recorded", "this policy only replays recorded responses, which are GET requests without a body"
                )
            return await ask()
        key = _key(digest, request)
        if (kept := await self._do(lambda: self._find(key))) is not None:
            return kept
        if replayed_only:
            raise EgressRefused(
                "not_recorded", "this policy only replays recorded responses, and this request is not recorded"
            )
        reply = await ask()
        if reply.status not in _RECORDED:
            return reply
        return await self._do(lambda: self._keep(key, request.target, reply)) or reply

    async def _do(self, action: Callable[[], _T | None]) -> _T | None:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, action)
        except sqlite3.Error as error:
            if self._config.mode == "only":
                raise EgressRefused("upstream", "the service cannot read its records") from error
            _log.warning("the egress cache failed; responses are not recorded: %s", error)
            return None

    def _find(self, key: str) -> EgressReply | None:
        row = self._store.execute("SELECT status, headers, body FROM records WHERE key = ?", (key,)).fetchone()
        if row is None:
            return None
        if self._config.mode != "only":
            with self._store:
                self._store.execute("UPDATE totals SET uses = uses + 1")
                self._store.execute("UPDATE records SET used = (SELECT uses FROM totals) WHERE key = ?", (key,))
        headers = json.loads(row[1])
        refused_by = headers.get("x-refused-by", "")
        return EgressReply(status=row[0], headers=headers, body=row[2], cached=not refused_by, refused_by=refused_by)

    def _keep(self, key: str, url: str, reply: EgressReply) -> EgressReply | None:
        """Store a record and return the stored one: of two simultaneous requests both get the first response."""
        size = len(reply.body) + _RECORD_BYTES
        if size > self._config.bytes_max:
            return None
        digest = hashlib.sha256(reply.body).hexdigest()
        with self._store:
            self._store.execute("UPDATE totals SET uses = uses + 1")
            done = self._store.execute(
                "INSERT OR IGNORE INTO records SELECT ?, ?, ?, ?, ?, ?, ?, uses FROM totals",
                (key, url, reply.status, json.dumps(dict(reply.headers)), reply.body, size, digest),
            )
            if done.rowcount:
                self._store.execute("UPDATE totals SET bytes = bytes + ?", (size,))
                self._shrink()
                return reply
        return self._find(key)

    def _shrink(self) -> None:
        (total,) = self._store.execute("SELECT bytes FROM totals").fetchone()
        while total > self._config.bytes_max:
            key, size = self._store.execute("SELECT key, bytes FROM records ORDER BY used LIMIT 1").fetchone()
            self._store.execute("DELETE FROM records WHERE key = ?", (key,))
            self._store.execute("UPDATE totals SET bytes = bytes - ?", (size,))
            total -= size


def _key(digest: str, request: EgressRequest) -> str:
    accepted = [request.headers.get(name, "") for name in ("accept", "accept-language")]
    return hashlib.sha256(json.dumps([digest, request.target, *accepted]).encode()).hexdigest()
