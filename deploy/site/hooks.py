"""Hooks of mkdocs: pages from outside of docs/ join the site, and what GitHub and mkdocs read differently is
translated.

- README.md is the first page. Links between pages of `PAGES` and of docs/ are kept. Links to other files become plain
  text.
- Marks after the language of a code block, such as `sh mesh`, are for the tests of the documentation.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
PAGES = {"README.md": "index.md", "ARCHITECTURE.md": "repository.md", "benchmarks/README.md": "benchmarks/README.md"}
"""Pages outside of docs/, and their paths in the site."""
_SOURCES = {page: source for source, page in PAGES.items()}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^([ ]*```\w+) .*$", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages from outside of docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Translate links into and out of docs/, and remove the marks of code blocks."""
    path = page.file.src_uri
    return _FENCE.sub(r"\1", _LINK.sub(lambda link: _in_site(link, path), markdown))


def _in_site(link: re.Match[str], page: str) -> str:
    picture, text, target = link.groups()
    path, _, anchor = target.partition("#")
    if "://" in target or not path:
        return link.group()
    source = _SOURCES.get(page, f"docs/{page}")
    found = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if source.startswith("docs/") and found.startswith("docs/"):
        return link.group()
    if found not in PAGES and not found.startswith("docs/"):
        return text
    if (ROOT / found).is_dir():
        found = next(one.relative_to(ROOT).as_posix() for one in sorted((ROOT / found).glob("*.md")))
    to = posixpath.relpath(PAGES.get(found, found.removeprefix("docs/")), posixpath.dirname(page) or ".")
    return f"{picture}[{text}]({to}{'#' + anchor if anchor else ''})"
