"""Extract the text of an HTML page in linear time. Runs inside the jail, because the page is untrusted.

`html.parser` of the standard library is quadratic on pages such as `<!<!<!`. This reader moves forward only: markup
without an end ends it, and the rest of the page is text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape

_SKIPPED = ("script", "style", "noscript", "template", "svg")
_BLOCKS = (
    "p", "div", "br", "li", "tr", "table", "section", "article", "header", "h1", "h2", "h3", "h4", "h5", "h6", "pre",
)  # fmt: skip
_BLANK = re.compile(r"[ \t\r\f\v]+")
_TAG = re.compile(r"</?([A-Za-z][^\s/>]*)")
_TAG_PART = re.compile(r""">|=\s*["']""")
_RAW_ENDS = {"script": re.compile(r"</script\b", re.IGNORECASE), "style": re.compile(r"</style\b", re.IGNORECASE)}
"""Elements whose content has no markup -> their end."""
_LONG_REFERENCE = re.compile(r"&#[0-9]{8,};?")
"""A reference to a character that does not exist. `unescape` rejects those with thousands of digits."""


def to_text(html: str) -> tuple[str, str]:
    """Return the title and the text of a page without markup."""
    title: list[str] = []
    pieces: list[str] = []
    num_skipped, in_title = 0, False
    for kind, text in _tokens(html):
        if kind == "text":
            if not num_skipped:
                (title if in_title else pieces).append(unescape(_LONG_REFERENCE.sub("\ufffd", text)))
            continue
        begins = kind == "start"
        num_skipped = max(0, num_skipped + (text in _SKIPPED) * (1 if begins else -1))
        in_title = begins and text == "title"
        if text in _BLOCKS:
            pieces.append("\n")
    lines = (_BLANK.sub(" ", line).strip() for line in "".join(pieces).splitlines())
    return " ".join("".join(title).split()), "\n".join(line for line in lines if line)


def _tokens(html: str) -> Iterator[tuple[str, str]]:
    """Yield `text` with a text, and `start` and `end` with the name of a tag. Comments and declarations are omitted."""
    at = 0
    while (begin := html.find("<", at)) != -1:
        yield "text", html[at:begin]
        at = begin
        if (tag := _TAG.match(html, begin)) is not None:
            name, closes = tag[1].lower(), html.startswith("</", begin)
            end = html.find(">", tag.end()) if closes else _tag_end(html, tag.end())
            if end == -1:
                break
            at = end + 1
            yield ("end" if closes else "start"), name
            if not closes and html[end - 1] == "/":
                yield "end", name
            elif not closes and name in _RAW_ENDS:
                raw_end = _RAW_ENDS[name].search(html, at)
                at = raw_end.start() if raw_end is not None else len(html)
        elif html.startswith(("<!", "<?", "</"), begin):
            mark = "-->" if html.startswith("<!--", begin) else ">"
            end = html.find(mark, begin + 2)
            if end == -1:
                break
            at = end + len(mark)
        else:
            yield "text", "<"
            at = begin + 1
    yield "text", html[at:]


def _tag_end(html: str, at: int) -> int:
    """Return the place of the `>` that ends a tag, or -1. One in the quotes of an attribute does not."""
    while (part := _TAG_PART.search(html, at)) is not None:
        if part[0] == ">":
            return part.start()
        end = html.find(part[0][-1], part.end())
        at = part.end() if end == -1 else end + 1
    return -1
