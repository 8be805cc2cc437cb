"""Hooks of mkdocs: README.md is the first page of the site, and what GitHub and mkdocs read differently is translated.

- Links of README.md begin in the root of the repository. Links to folders and to files outside of docs/ become plain text.
- Marks after the language of a code block, such as `sh mesh`, are for the tests of the documentation.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^([ ]*```\w+) .*$", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Add README.md as the first page."""
    readme = (ROOT / "README.md").read_text()
    files.append(File.generated(config, "index.md", content=_LINK.sub(_from_root, readme)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Translate links to README.md, and remove the marks of code blocks."""
    return _FENCE.sub(r"\1", markdown).replace("](../README.md", "](index.md")


def _from_root(link: re.Match[str]) -> str:
    picture, text, target = link.groups()
    if "://" in target or target.startswith("#"):
        return link.group()
    path, _, anchor = target.partition("#")
    if not path.startswith("docs/"):
        return text
    if (ROOT / path).is_dir():
        path = next(str(one.relative_to(ROOT)) for one in sorted((ROOT / path).glob("*.md")))
    return f"{picture}[{text}]({path.removeprefix('docs/')}{'#' + anchor if anchor else ''})"
