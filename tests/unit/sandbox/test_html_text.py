"""Conversion of HTML pages to text."""

from __future__ import annotations

import re
from typing import Any, SupportsIndex

import pytest

from rollmesh.sandbox_runtime import html_text
from rollmesh.sandbox_runtime.html_text import to_text


def test_text_of_a_page_is_its_visible_words_by_line() -> None:
    page = """<html><head><title>A &amp;
        B</title><style>p {}</style><script>var a = "<p>no</p>";</script></head>
        <body><h1>Head</h1><p>one  <b>two</b><br>three</p><ul><li>x<li>y</ul><svg><text>no</text></svg></body>"""
    assert to_text(page) == ("A & B", "Head\none two\nthree\nx\ny")


def test_broken_markup_still_has_its_text() -> None:
    assert to_text("</script></p><p>a<p>b</div></style>c<") == ("", "a\nb\nc<")
    assert to_text("") == ("", "")


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<!DOCTYPE html><?xml?><!-- <p> a > b -->x<!-->y", "xy"),
        ("1 < 2 <3 </> </ >", "1 < 2 <3"),
        ("<a title='x > y' href=\"/>\">link</a>", "link"),
        ("<p title='open>a</p>b", "a\nb"),
        ("<p\nclass=x >a</P >b", "a\nb"),
        ("<svg/>a<br/>b", "a\nb"),
        ("<script>no</scriptx></SCRIPT >yes", "yes"),
        ("<style>no", ""),
        ("a <b and no end", "a <b and no end"),
        ("a<!-- b <p>c", "a<!-- b <p>c"),
        ("&lt;p&gt; &eacute; &#65;&#x42; &nope; &", "<p> \u00e9 AB &nope; &"),
        ("&#" + "9" * 5_000 + ";", "\ufffd"),
    ],
)
def test_markup_in_all_its_forms(page: str, text: str) -> None:
    assert to_text(page) == ("", text)


class Counted(str):
    """A text that counts the characters over which `find` goes."""

    num_read = 0

    def find(self, sub: str, start: SupportsIndex | None = 0, end: SupportsIndex | None = None) -> int:
        found = super().find(sub, start, end)
        Counted.num_read += (len(self) if found == -1 else found + len(sub)) - int(start or 0)
        return found


class CountedPattern:
    """A pattern that counts the characters between the place where it begins and the end of what it finds."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern

    def match(self, text: str, at: int) -> re.Match[str] | None:
        return self._counted(self._pattern.match(text, at), 1, at)

    def search(self, text: str, at: int) -> re.Match[str] | None:
        return self._counted(self._pattern.search(text, at), len(text) - at, at)

    def _counted(self, found: re.Match[str] | None, num_missed: int, at: int) -> re.Match[str] | None:
        Counted.num_read += num_missed if found is None else found.end() - at
        return found


@pytest.mark.parametrize(
    "part",
    [
        *("<", "<!", "<!--", "<?", "</", "</a", "</a ", "<a", "<a ", "<a x=", "<a x='", '<a x="', "<a x='>", "<a x=' '"),
        *("<script>", "<style>x</style", "<script></script>", "<title>", "<svg>", "<![", "<!-- -", "&#", "&#9", "<a/"),
        *("<p>", "<p>x</p>", "<!-->", "-->", "> <!", "<a b='c' d=\"e\">"),
    ],
)  # fmt: skip
def test_any_page_is_read_in_linear_time(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    patterns: dict[str, Any] = {name: getattr(html_text, name) for name in ("_TAG", "_TAG_PART")}
    for name, pattern in patterns.items():
        monkeypatch.setattr(html_text, name, CountedPattern(pattern))
    ends = {name: CountedPattern(pattern) for name, pattern in html_text._RAW_ENDS.items()}
    monkeypatch.setattr(html_text, "_RAW_ENDS", ends)
    for tail in ("", "'", '"', ">", "-->", "</script>"):
        page = Counted(part * 2_000 + tail)
        monkeypatch.setattr(Counted, "num_read", 0)
        to_text(page)
        assert Counted.num_read <= 4 * len(page) + 100
