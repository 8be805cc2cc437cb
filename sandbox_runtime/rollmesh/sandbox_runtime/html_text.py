"""Extract the text of an HTML page. Runs inside the jail, because the page is untrusted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape

_SKIPPED = ("script", "style", "noscript", "template", "svg")
_BLOCKS = (
    "p", "div", "br", "li", "tr", "table", "section", "article", "header", "h1", "h2", "h3", "h4", "h5", "h6", "pre",
)  # fmt: skip
_BLANK = re.compile(r"[ \t\r\f\v]+")


def to_text(html: str) -> tuple[str, str]:
    """Return the title and the text of a page without markup."""
    reader = _TextExtractor()
    reader.feed(html)
    reader.close()
    lines = (_BLANK.sub(" ", line).strip() for line in "".join(reader.pieces).splitlines())
    return " ".join(reader.title.split()), "\n".join(line for line in lines if line)


class _TextExtractor(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.title = ""
        self.pieces: list[str] = []
        self._skipped = 0
        self._in_title = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._skipped += tag in _SKIPPED
        self._in_title = tag == "title"
        if tag in _BLOCKS:
            self.pieces.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._skipped -= tag in _SKIPPED and self._skipped > 0
        self._in_title = False
        if tag in _BLOCKS:
            self.pieces.append("\n")

    def handle_data(self, data: str) -> None:
        if self._in_title and not self._skipped:
            self.title += data
        elif not self._skipped:
            self.pieces.append(data)
