"""Search tools of a session: `search`, `browse` and `retrieve`, over the egress of its profile. Each takes and returns
one text.

The content of pages is untrusted and parsed here, inside the jail. Long texts are returned in pieces; the end of a
piece explains how to get the next one. Raises EgressError with the proxy's reason if it refuses a request.
"""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import quote

from rollmesh.sandbox_runtime import egress, html_text

_FROM = re.compile(r"(?s)(.*\S)\s+@([0-9]{1,9})")


def search(query: str) -> str:
    """Return the best results for a few words: number, title, id, URL and a part of the text of each."""
    results = _asked(f"/search?q={quote(query.strip())}")["results"]
    if not results:
        return "no results"
    return "\n\n".join(_shown(number, result) for number, result in enumerate(results, 1))


def browse(url: str) -> str:
    """Return the text of the page at a URL; `<url> @4000` continues at character 4000."""
    return _piece("browse", "/browse?url=", url)


def retrieve(doc_id: str) -> str:
    """Return the text of a document by its id from a search; `<id> @4000` continues at character 4000."""
    return _piece("retrieve", "/retrieve?id=", doc_id)


def _asked(target: str) -> Any:
    return json.loads(egress.ask(target).body)


def _shown(number: int, result: dict[str, str]) -> str:
    lines = [f"[{number}] {result['title'] or result['id']}", f"id: {result['id']}"]
    lines += [f"url: {result['url']}"] if result["url"] else []
    return "\n".join([*lines, " ".join(result["snippet"].split())])


def _piece(verb: str, path: str, wanted: str) -> str:
    name, begin = wanted.strip(), 0
    if (parts := _FROM.fullmatch(name)) is not None:
        name, begin = parts[1], int(parts[2])
    answer = _asked(path + quote(name, safe=""))
    page, size = answer["page"], answer["page_chars_max"]
    title, text = str(page["title"]), str(page["text"])
    if page["content_type"].startswith(("text/html", "application/xhtml")):
        title, text = html_text.to_text(text)
    end = begin + size
    shown = (f"{title}\n\n" if title and not begin else "") + text[begin:end]
    if end < len(text):
        shown += f"\n[{end} of {len(text)} characters; continue with {verb}: {name} @{end}]"
    return shown
