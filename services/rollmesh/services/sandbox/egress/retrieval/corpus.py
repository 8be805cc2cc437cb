"""An offline corpus: documents of a JSON Lines file, ranked by BM25 in SQLite's full-text index.

The index file is named by the digest of the corpus. It is built once, is complete when it has its final name, and is
opened read-only and reused by later starts. Ranking is deterministic: equal scores keep the order of the corpus.
Queries run in one separate thread, contain words only (no query syntax reaches SQLite), and are interrupted at their
deadline.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import msgspec

from rollmesh.services.sandbox.egress.exchange import EgressRefused
from rollmesh.services.sandbox.egress.retrieval.backend import Backend, Document, Hit
from rollmesh.services.sandbox.egress.retrieval_config import RetrievalConfig
from rollmesh.services.sandbox.egress.upstream import Upstream
from rollmesh.shared.config.settings import Settings
from rollmesh.shared.domain.decoding import UNDECODABLE
from rollmesh.shared.errors import ConfigError

_T = TypeVar("_T")

_FORMAT = b"1"
"""Version of the index format; part of its digest."""
_WORD = re.compile(r"\w+")
_WORDS_MAX = 32
_SNIPPET_WORDS = 60
_QUERY_S = 10.0
_STEPS_PER_LOOK = 10_000
_SCHEMA = """
CREATE TABLE documents (number INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, url TEXT, title TEXT, text TEXT NOT NULL);
CREATE INDEX by_url ON documents (url);
CREATE VIRTUAL TABLE words USING fts5 (title, text, content='documents', content_rowid='number', tokenize='porter unicode61');
"""  # noqa: E501
_SEARCH = f"""
SELECT id, url, documents.title, snippet(words, 1, '', '', '...', {_SNIPPET_WORDS}) FROM words
JOIN documents ON number = words.rowid WHERE words MATCH ? ORDER BY bm25(words, 2.0, 1.0), words.rowid LIMIT ?
"""


class _Line(msgspec.Struct, frozen=True):
    id: str
    text: str
    url: str = ""
    title: str = ""


class CorpusOptions(Settings):
    """Settings of the corpus."""

    path: str
    """JSON Lines of {id, url, title, text}; id and text are required. Indexed once per content, by BM25 over title and
    text."""
    index_dir: str = ""
    """Directory of the index, which is about twice as large as the corpus. Default: the state directory of the node."""


class CorpusBackend(Backend):
    """An indexed corpus; implements `Backend`."""

    Options = CorpusOptions

    def __init__(self, *, limits: RetrievalConfig, folder: Path, upstream: Upstream, options: CorpusOptions) -> None:
        """Index the corpus in `folder` unless its index exists. Block; raise ConfigError."""
        corpus, folder = Path(options.path), Path(options.index_dir or folder)
        self._limits = limits
        self._deadline_s = 0.0
        try:
            self._digest = _digest(corpus)
            index = folder / f"corpus-{self._digest[:32]}.sqlite"
            if not index.exists():
                folder.mkdir(parents=True, exist_ok=True)
                _build(corpus, index)
            self._store = sqlite3.connect(f"file:{index}?mode=ro&immutable=1", uri=True, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"egress: the corpus {corpus} cannot be indexed in {folder}: {error}") from error
        self._store.set_progress_handler(lambda: time.monotonic() > self._deadline_s, _STEPS_PER_LOOK)
        self._thread = ThreadPoolExecutor(1, "corpus")

    @property
    def digest(self) -> str:
        return self._digest

    async def search(self, query: str) -> Sequence[Hit]:
        words = _WORD.findall(query)[:_WORDS_MAX]
        if not words:
            return []
        match = " OR ".join(f'"{word}"' for word in words)
        rows = await self._ask(lambda: self._store.execute(_SEARCH, (match, self._limits.results_max)).fetchall())
        cut = self._limits.snippet_chars_max
        return [Hit(id=row[0], url=row[1], title=row[2], snippet=row[3][:cut]) for row in rows]

    async def page(self, url: str) -> Document:
        return await self._one("url", url)

    async def document(self, doc_id: str) -> Document:
        return await self._one("id", doc_id)

    def close(self) -> None:
        """Interrupt a query in progress and close the index."""
        self._store.interrupt()
        self._thread.submit(self._store.close)
        self._thread.shutdown(wait=False)

    async def _one(self, column: str, value: str) -> Document:
        query = f"SELECT id, url, title, text FROM documents WHERE {column} = ? ORDER BY number LIMIT 1"
        row = await self._ask(lambda: self._store.execute(query, (value,)).fetchone())
        if row is None:
            raise EgressRefused("not_found", f"the corpus has no document with {column} {value[:200]!r}")
        return Document(id=row[0], url=row[1], title=row[2], text=row[3])

    async def _ask(self, query: Callable[[], _T]) -> _T:
        def bounded() -> _T:
            self._deadline_s = time.monotonic() + _QUERY_S
            return query()

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, bounded)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorname != "SQLITE_INTERRUPT":
                raise EgressRefused("upstream", "the service cannot read the corpus") from error
            raise EgressRefused("timeout", f"the corpus did not answer within {_QUERY_S:g} s") from error


def _digest(corpus: Path) -> str:
    with corpus.open("rb") as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()
    return hashlib.sha256(_FORMAT + content.encode()).hexdigest()


def _build(corpus: Path, index: Path) -> None:
    """Build the index under a temporary name until it is complete. If two nodes build it at once, both results are
    valid."""
    draft = index.with_suffix(f".{os.getpid()}")
    draft.unlink(missing_ok=True)
    try:
        with closing(sqlite3.connect(draft)) as store:
            store.executescript("PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF;" + _SCHEMA)
            with store:
                store.executemany("INSERT INTO documents (id, url, title, text) VALUES (?, ?, ?, ?)", _rows(corpus))
                store.execute("INSERT INTO words (words) VALUES ('rebuild')")
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.rename(index)
    finally:
        draft.unlink(missing_ok=True)


def _rows(corpus: Path) -> Iterator[tuple[str, str, str, str]]:
    seen: set[bytes] = set()
    with corpus.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if not raw.strip():
                continue
            line = _decoded(corpus, number, raw)
            key = hashlib.blake2b(line.id.encode(), digest_size=16).digest()
            if key in seen:
                raise ConfigError(f"{corpus}:{number}: the id {line.id!r} is duplicated")
            seen.add(key)
            yield line.id, line.url, line.title, line.text


def _decoded(corpus: Path, number: int, raw: bytes) -> _Line:
    try:
        return msgspec.json.decode(raw, type=_Line)
    except UNDECODABLE as error:
        raise ConfigError(f"{corpus}:{number}: not a document {{id, url, title, text}}: {error}") from error
