"""A retrieval backend: text files of one directory, found by the words that they contain."""

import hashlib
from pathlib import Path

import msgspec

from rollmesh.services.sandbox.egress.exchange import EgressRefused
from rollmesh.services.sandbox.egress.retrieval.backend import Backend, Document, Hit


class NotesOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    directory: str


class NotesBackend(Backend):
    Options = NotesOptions

    def __init__(self, *, limits, folder, upstream, options):
        self.limits = limits
        self.notes = {path.name: path.read_text("utf-8") for path in sorted(Path(options.directory).glob("*.txt"))}

    @property
    def digest(self):  # part of the key of cached results
        return hashlib.sha256(repr(self.notes).encode()).hexdigest()

    async def search(self, query):
        words = query.lower().split()
        counts = {name: sum(word in text.lower() for word in words) for name, text in self.notes.items()}
        found = sorted((name for name, count in counts.items() if count), key=lambda name: -counts[name])
        cut = self.limits.snippet_chars_max
        return [Hit(id=name, title=name, snippet=self.notes[name][:cut]) for name in found[: self.limits.results_max]]

    async def document(self, doc_id):
        if doc_id not in self.notes:
            raise EgressRefused("not_found", f"no note is called {doc_id!r}")
        return Document(id=doc_id, title=doc_id, text=self.notes[doc_id])

    async def page(self, url):
        return await self.document(url)

    def close(self):
        pass
