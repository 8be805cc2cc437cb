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
