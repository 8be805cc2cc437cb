"""The site of the documentation: every page is in its navigation, and every link reaches its heading."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from .commands import PAGES, ROOT

DOCS = ROOT / "docs"
CONFIG = ROOT / "deploy" / "site" / "mkdocs.yml"
NOT_IN_SITE = {"_parts/methods_guide.md"}
OUTSIDE = {"index.md", "repository.md", "benchmarks/README.md"}
"""Pages that deploy/site/hooks.py adds from outside of docs/."""
_LINK = re.compile(r"\]\(([^)\s]*)#([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
_EXTERNAL = re.compile(r"""<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=["'](?:https?:)?//""")


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, which names a function."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub makes them."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    found: Counter[str] = Counter()
    made = set()
    for heading in _HEADING.findall(text):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        made.add(f"{slug}-{found[slug]}" if found[slug] else slug)
        found[slug] += 1
    return made


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_headings_reach_them(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for path, anchor in _LINK.findall(text):
        if "://" not in path:
            target = page if not path else page.parent / path
            assert anchor in anchors(target.resolve()), f"{page.name}: {path}#{anchor}"


def nav(entry: Any) -> Iterator[str]:
    """Yield the pages of a part of the navigation."""
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, dict):
        for below in entry.values():
            yield from nav(below)
    else:
        for one in entry:
            yield from nav(one)


def test_every_page_is_once_in_the_navigation() -> None:
    listed = Counter(nav(yaml.load(CONFIG.read_text(), _Loader)["nav"]))
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - NOT_IN_SITE
    assert pages - listed.keys() == set(), f"add to the navigation in {CONFIG}"
    assert listed.keys() - pages == OUTSIDE
    assert max(listed.values()) == 1


@pytest.mark.slow
def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed; run: make docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(CONFIG), "-d", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > len(PAGES) - 3
    assert [page.name for page in pages if _EXTERNAL.search(page.read_text())] == []
    assert "sh mesh" not in (tmp_path / "runbooks.html").read_text()
    assert 'src="pictures/mesh.svg"' in (tmp_path / "index.html").read_text()
